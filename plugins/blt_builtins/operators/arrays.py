"""Small arrays that an operator reads from a NumPy file: kernels and masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bltoolbox.plugin import KERNEL, MASK, SUFFIXES, Constant, ImageError, Limit, read_array, read_image


def read_matrix(path: str, what: str, limit: Limit = KERNEL) -> Tensor:
    """The matrix in an ``.npy`` file, in float64."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {path} (looked in {Path.cwd()}); give the path of an .npy {what}")
    try:
        array = read_array(file, limit)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "buif":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {'×'.join(map(str, array.shape))};"
            f" a {what} is a matrix of numbers"
        )
    return torch.from_numpy(array.astype(np.float64))


def read_weights(path: str) -> Tensor:
    """The weights in an ``.npy`` file: up to three dimensions, none negative, not all zero."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"there is no file {path} (looked in {Path.cwd()}); give the path of an .npy of weights"
        )
    weights = read_array(file, MASK)
    if not 0 < weights.ndim <= 3 or 0 in weights.shape or weights.dtype.kind not in "buif":
        raise ValueError(
            f"{path} holds {weights.dtype} of {weights.ndim} dimensions; weights are numbers of 1 to 3"
        )
    array = torch.from_numpy(weights.astype(np.float64))
    if not bool(torch.isfinite(array).all()) or float(array.min()) < 0 or float(array.max()) == 0:
        raise ValueError(f"{path} holds weights that are negative or not finite, or only zeros")
    return array


def read_mask(path: str) -> Tensor:
    """The mask in an ``.npy`` file: booleans, or zeros and ones, not all zero."""
    mask = read_matrix(path, "mask", MASK)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{path} holds other values than 0 and 1; a mask says which entries are measured")
    if not bool(mask.any()):
        raise ValueError(f"{path} holds zeros only; a mask needs at least one measured entry")
    return mask


def read_picture_mask(path: str) -> Tensor:
    """The mask of an ``.npy`` file, or of a picture: known where it is brighter than middle gray."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in SUFFIXES:
        return read_mask(path)
    try:
        gray = read_image(file, channels=1)[..., 0]
    except ImageError as error:
        raise ValueError(f"the mask cannot be read: {error}") from error
    mask = torch.from_numpy((gray > 0.5).astype(np.float64))
    if not bool(mask.any()):
        raise ValueError(f"{path} is dark everywhere; a mask is bright where pixels are known")
    return mask


def misfit(mask: Constant | None, shape: tuple[int, int]) -> str | None:
    """A message if a mask from a file does not fit images of ``shape``, else None."""
    if mask is None or tuple(mask.value.shape) == shape:
        return None
    height, width = mask.value.shape
    return (
        f"the mask is {height}×{width} but the images are {shape[0]}×{shape[1]};"
        " give a mask of that size, or leave it out for a random one of any size"
    )
