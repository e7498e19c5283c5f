"""How noisy a picture is: the noise level as people write it, and an estimate of it from the picture. Without torch.

    σ̂ = median |d| / 0.6745,        d: the diagonal details of the finest scale of an orthogonal wavelet

Noise is as strong in these details as in the pixels, the picture is in few of them, and the median does not see those
few (Donoho & Johnstone, *Ideal spatial adaptation by wavelet shrinkage*, Biometrika 1994). The wavelet is that of
Daubechies with two vanishing moments, which is blind to linear shading. Fine texture counts as noise: the estimate
errs upwards. Near black and white values are cut off and noise is missing, so only places that are neither count, if
there are enough of them.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bltoolbox.config.block import Block
from bltoolbox.errors import UsageError

#: Estimates are not below this: rounding to 8 bits alone is noise of 0.29/255.
FLOOR = 0.25 / 255
#: Nor more than this: a checkerboard, a dithered scan.
LARGEST = 0.5

#: Pixels of a picture that an estimate looks at, in blocks spread evenly over it.
_PIXELS = 2**22
_BLOCK = 256
_FEWEST = 32
_ROOT = math.sqrt(3.0)
#: The wavelet filter; a detail is the product of one such filter a direction.
_WAVELET = np.array([1 - _ROOT, _ROOT - 3, 3 + _ROOT, -1 - _ROOT]) / (4 * math.sqrt(2.0))
#: The median of |n| for a standard normal n.
_MEDIAN = 0.6744897501960817
_NUMBER = r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"


def parse_noise(given: str | float | None) -> float | str | None:
    """A standard deviation for images in [0, 1] from 25/255, 0.1 or 25 (of 255, as it is above 1); auto and model stay
    as they are."""
    if given is None or given in ("auto", "model"):
        return given
    match = re.fullmatch(rf"\s*({_NUMBER})\s*(?:/\s*({_NUMBER}))?\s*", str(given))
    # 1e999 is a number to the pattern and infinite to Python.
    divisor = float(match[2] or 1) if match else 0.0
    value = float(match[1]) / divisor if match and divisor else math.nan
    if match and not match[2] and value > 1:
        value /= 255
    if not 0 < value <= 1:
        raise UsageError(
            f"noise {given!s} is not a noise level; write e.g. 25/255, 0.1, 25 (of 255), auto or model"
        )
    return value


def show_noise(sigma: float) -> str:
    """As people compare it: in 255ths."""
    return f"{255 * sigma:.3g}/255"


def show_training_noise(noise: Block | None, level: float | None) -> str:
    """What a model was trained for: a level, the name of a noise without one, or recorded measurements."""
    if noise is None:
        return "recorded measurements"
    return f"{noise.name} noise" if level is None else f"noise {show_noise(level)}"


def estimate_noise(image: NDArray[Any]) -> float:
    """σ of noise that is independent from pixel to pixel, for an image H×W×C in [0, 1], uint8 or uint16.

    The root mean square over the channels; a ValueError when the image is too small to tell.
    """
    image = image[..., None] if image.ndim == 2 else image
    levels = [_channel(image[..., c]) for c in range(image.shape[2])]
    overall = math.sqrt(sum(level**2 for level in levels) / len(levels))
    if overall > LARGEST:
        raise ValueError(
            f"the finest details are as strong as noise of {show_noise(overall)} would be, so they are not noise;"
            " give the noise level"
        )
    return max(FLOOR, overall)


def coarse_noise(image: NDArray[Any]) -> float:
    """The same at half the resolution, times 2: equal for noise that is independent from pixel to pixel, larger where
    compression or resizing has smeared it, and for texture."""
    top = float(np.iinfo(image.dtype).max) if image.dtype.kind == "u" else 1.0
    height, width = (side // 2 * 2 for side in image.shape[:2])
    corners = [image[i:height:2, j:width:2].astype(np.float32) for i in (0, 1) for j in (0, 1)]
    return 2 * estimate_noise(np.sum(corners, axis=0) / (4 * top))


def _channel(plane: NDArray[Any]) -> float:
    top = float(np.iinfo(plane.dtype).max) if plane.dtype.kind == "u" else 1.0
    blocks = [block.astype(np.float64) / top for block in _blocks(plane)]
    details = np.concatenate([np.abs(_details(block, _WAVELET)).ravel() for block in blocks])
    means = np.concatenate([_details(block, np.full(4, 0.25)).ravel() for block in blocks])
    if details.size < _FEWEST:
        height, width = plane.shape
        raise ValueError(f"{width}×{height} pixels are too few to estimate the noise; give the noise level")
    sigma = float(np.median(details)) / _MEDIAN
    for _ in range(2):
        # The mean of 16 pixels is independent of their detail, so this chooses places, not noise.
        uncut = details[(means > 2 * sigma) & (means < 1 - 2 * sigma)]
        if uncut.size < max(_FEWEST, 0.01 * details.size):
            break
        sigma = float(np.median(uncut)) / _MEDIAN
    return sigma


def _blocks(plane: NDArray[Any]) -> list[NDArray[Any]]:
    height, width = plane.shape
    if height * width <= _PIXELS:
        return [plane]
    # Blocks on a grid of at least their own size, so that none overlap, and as many as the pixels allow.
    rows, columns = (max(1, side // _BLOCK) for side in (height, width))
    thin = max(1.0, math.sqrt(rows * columns * _BLOCK**2 / _PIXELS))
    tops = np.linspace(0, max(0, height - _BLOCK), max(1, int(rows / thin))).astype(int)
    lefts = np.linspace(0, max(0, width - _BLOCK), max(1, int(columns / thin))).astype(int)
    return [plane[top : top + _BLOCK, left : left + _BLOCK] for top in tops for left in lefts]


def _details(values: NDArray[np.float64], taps: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the product of two filters sees, at every second pixel of every second row."""
    return _filtered(_filtered(values, taps).T, taps).T


def _filtered(values: NDArray[np.float64], taps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every second place where the filter fits, along the columns."""
    count = (values.shape[1] - 4) // 2 + 1
    if count <= 0:
        return np.zeros((values.shape[0], 0))
    parts = [tap * values[:, k : k + 2 * count - 1 : 2] for k, tap in enumerate(taps)]
    return np.sum(parts, axis=0)
