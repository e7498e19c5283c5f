"""Blur kernels given as a file, a Gaussian or a matrix. Without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bltoolbox.config.reading import KERNEL, FileRefused
from bltoolbox.errors import UsageError
from bltoolbox.restoration.npy import read_array
from bltoolbox.restoration.pictures.images import ImageError, read_image

_GAUSSIAN = re.compile(r"gaussian:([0-9]*\.?[0-9]+)(?::([0-9]+))?")
#: The largest kernel of a file, a side.
_LARGEST = 255


def parse_kernel(text: str) -> dict[str, Any]:
    """Options of the operator: of ``gaussian:SIGMA[:SIZE]``, an .npy file or a picture, divided by its sum."""
    if text == "gaussian" or text.startswith("gaussian:"):
        match = _GAUSSIAN.fullmatch(text)
        sigma = float(match[1]) if match else 0.0
        if not match or sigma <= 0:
            raise UsageError(f"kernel {text} is not a Gaussian; write e.g. gaussian:2 or gaussian:2:13")
        size = int(match[2]) if match[2] else 2 * math.ceil(3 * sigma) + 1
        if not 0 < size <= _LARGEST:
            raise UsageError(f"kernel {text} has a side of {size} pixels; give one from 1 to {_LARGEST}")
        return {"sigma": sigma, "size": size}
    return kernel_matrix(_read(Path(text).expanduser()), f"kernel {text}")


def kernel_matrix(values: NDArray[Any] | Sequence[Sequence[float]], name: str = "kernel") -> dict[str, Any]:
    """Options of the operator: of a matrix, divided by its sum."""
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} is not a matrix of numbers") from error
    if matrix.ndim != 2 or matrix.size == 0 or max(matrix.shape) > _LARGEST:
        shape = "×".join(map(str, matrix.shape)) or "a single number"
        raise UsageError(f"{name} is {shape}; a kernel is a matrix of at most {_LARGEST} rows and columns")
    total = float(matrix.sum())
    if not (np.isfinite(matrix).all() and total > 1e-6 * float(np.abs(matrix).sum())):
        raise UsageError(f"{name} has no positive finite sum; a blur keeps the brightness")
    return {"kernel": (matrix / total).tolist()}


def _read(path: Path) -> NDArray[np.float64]:
    if not path.is_file():
        raise UsageError(f"there is no kernel file {path}")
    if path.suffix.lower() != ".npy":
        try:
            return read_image(path, channels=1)[..., 0].astype(np.float64)
        except ImageError as error:
            raise UsageError(f"kernel {error}") from error
    try:
        array = read_array(path, KERNEL)
    except FileRefused as error:
        raise UsageError(f"kernel {error}") from error
    except OSError as error:
        raise UsageError(f"kernel {path} cannot be read: {error.strerror or error}") from error
    if array.dtype.kind not in "buif":
        raise UsageError(f"kernel {path} contains complex numbers")
    return array.astype(np.float64)
