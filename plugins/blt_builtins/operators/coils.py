"""Sensitivity maps of the receive coils of an MRI scanner: from a file, or simulated."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bltoolbox.plugin import MASK, read_array

#: Where simulated coils are and how far they see, in units of half the longer side of the image.
_RADIUS, _REACH = 1.2, 0.9


def read_coils(path: str) -> Tensor:
    """The maps of an ``.npy`` file, (K, H, W) of complex or real numbers, in complex128."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"there is no file {path} (looked in {Path.cwd()}); give the path of an .npy of coil maps"
        )
    try:
        array = read_array(file, MASK)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(
            f"{path} holds an array of shape {'×'.join(map(str, array.shape))}; coil maps are coils × height × width"
        )
    maps = torch.from_numpy(array.astype(np.complex128))
    if not bool(torch.isfinite(maps.abs()).all()) or not bool(maps.any()):
        raise ValueError(f"{path} holds a NaN, an infinity or only zeros; give finite coil maps")
    return maps


def simulated_coils(count: int, height: int, width: int) -> Tensor:
    """Maps of ``count`` coils on a circle around the image, (K, H, W) in complex128, with Σ_k |s_k|² = 1.

    Each is a Gaussian around its coil, its phase that of the place of the coil and turning by a right angle across the
    image, as those of a birdcage coil do.
    """
    longer = max(height, width)
    rows, columns = ((2 * torch.arange(n, dtype=torch.float64) - (n - 1)) / longer for n in (height, width))
    maps = []
    for k in range(count):
        angle = 2 * math.pi * k / count
        up, right = math.sin(angle), math.cos(angle)
        squared = (rows - _RADIUS * up).square().unsqueeze(1) + (columns - _RADIUS * right).square()
        phase = angle + 0.25 * math.pi * (up * rows.unsqueeze(1) + right * columns)
        maps.append(torch.polar((-0.5 * squared / _REACH**2).exp(), phase))
    stacked = torch.stack(maps)
    return stacked / stacked.abs().square().sum(0).sqrt()
