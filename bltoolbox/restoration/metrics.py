"""How close two pictures are: PSNR and SSIM, in the memory of a few rows. Without torch.

    PSNR = −10 log₁₀ mean (x − x*)²  dB, for values in [0, 1]

SSIM compares means, variances and the covariance under a Gaussian window of σ = 1.5 on 11×11 pixels, where it fits into
the picture, and is averaged over places and channels (Wang, Bovik, Sheikh & Simoncelli, *Image quality assessment: from
error visibility to structural similarity*, IEEE TIP 2004).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_RADIUS = 5
_C1, _C2 = 0.01**2, 0.03**2
#: Pixels of a strip of rows.
_STRIP = 2**19


def psnr(x: NDArray[Any], x_true: NDArray[Any]) -> float:
    """In dB, for pictures H×W or H×W×C in [0, 1], uint8 or uint16; x is clipped to [0, 1]. Infinite if equal."""
    _same_shape(x, x_true)
    total = 0.0
    for rows in _strips(x, 0):
        error = _plain(x[rows]).clip(0, 1) - _plain(x_true[rows])
        total += float(np.vdot(error, error))
    mean = total / max(1, x.size)
    return math.inf if mean == 0 else -10 * math.log10(mean)


def ssim(x: NDArray[Any], x_true: NDArray[Any]) -> float:
    """Structural similarity, at most 1; NaN for pictures that the window does not fit into."""
    _same_shape(x, x_true)
    size = 2 * _RADIUS + 1
    if min(x.shape[:2]) < size:
        return math.nan
    total, count = 0.0, 0
    for rows in _strips(x, size - 1):
        values = _similarity(_plain(x[rows]).clip(0, 1), _plain(x_true[rows]))
        total += float(values.sum())
        count += values.size
    return total / count


def _similarity(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    mean_a, mean_b = _window(a), _window(b)
    product = mean_a * mean_b
    squares = mean_a * mean_a + mean_b * mean_b
    covariance = _window(a * b) - product
    variances = _window(a * a + b * b) - squares
    numerator = (2 * product + _C1) * (2 * covariance + _C2)
    return np.asarray(numerator / ((squares + _C1) * (variances + _C2)))


def _window(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means under the window, where it fits, over the first two dimensions."""
    distance = np.arange(-_RADIUS, _RADIUS + 1)
    weights = np.exp(-0.5 * (distance / 1.5) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        count = values.shape[axis] - 2 * _RADIUS
        parts = np.zeros([count if k == axis else n for k, n in enumerate(values.shape)])
        for k, weight in enumerate(weights):
            window = slice(k, k + count)
            parts += weight * (values[window] if axis == 0 else values[:, window])
        values = parts
    return values


def _strips(x: NDArray[Any], more: int) -> Iterator[slice]:
    """Rows of a picture in parts, each with ``more`` rows of the next one."""
    height = x.shape[0]
    step = max(1, _STRIP // max(1, x[0].size))
    for first in range(0, height - more, step):
        yield slice(first, min(first + step, height - more) + more)


def _plain(values: NDArray[Any]) -> NDArray[np.float64]:
    top = float(np.iinfo(values.dtype).max) if values.dtype.kind == "u" else 1.0
    return values.astype(np.float64) / top


def _same_shape(x: NDArray[Any], x_true: NDArray[Any]) -> None:
    if x.shape != x_true.shape:
        sizes = ("×".join(map(str, one.shape)) for one in (x, x_true))
        raise ValueError("the pictures differ in size: {} and {}".format(*sizes))
