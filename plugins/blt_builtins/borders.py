"""Images extended beyond their borders, and the adjoint: E repeats pixels, Eᵀ adds what lies beyond to them.

    (E x)_p = x_{s(p)},        (Eᵀ t)_i = Σ_{p: s(p) = i} t_p

For a kernel of K×L entries centred at (⌊(K−1)/2⌋, ⌊(L−1)/2⌋), mirrored or periodically. Here both gather pixels by
index: one and two launches on a GPU, in a fixed order of summation, hence deterministic. On a CPU, copies of strips
are faster. Indices depend on sizes alone, and are copied to a device once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bltoolbox.plugin import Constant, ConstantsByKey

Repetition = Literal["symmetric", "periodic"]
#: Height and width of the image, those of the kernel, and the rule.
Key = tuple[int, int, int, int, Repetition]
Indices = npt.NDArray[np.int64]


def margins(size: int) -> tuple[int, int]:
    """Pixels needed before the first and after the last one."""
    return (size - 1) // 2, size // 2


def line_source(length: int, size: int, boundary: Repetition) -> Constant:
    """For each position of an extended line, the pixel that it repeats."""
    return _LINES[length, size, boundary]


def extended(x: Tensor, size: tuple[int, int], boundary: Repetition) -> Tensor:
    """E x of images (B, C, H, W), channels last, by one gather."""
    (count, channels, height, width), (rows, columns) = x.shape, size
    source = _EXTENSIONS[height, width, rows, columns, boundary].beside(x)
    pixels = x.permute(0, 2, 3, 1).reshape(count, -1, channels).index_select(1, source)
    return pixels.view(count, height + rows - 1, width + columns - 1, channels).permute(0, 3, 1, 2)


def folded(framed: Tensor, size: tuple[int, int], boundary: Repetition) -> Tensor:
    """Eᵀ of extended images that have a frame of zeros, one pixel wide, around them; channels last."""
    (count, channels, height, width), (rows, columns) = framed.shape, size
    height, width = height - rows - 1, width - columns - 1
    sources = _FOLDS[height, width, rows, columns, boundary].beside(framed)
    pixels = framed.permute(0, 2, 3, 1).reshape(count, -1, channels).index_select(1, sources.flatten())
    image = pixels.view(count, len(sources), height * width, channels).sum(1)
    return image.view(count, height, width, channels).permute(0, 3, 1, 2)


def _line(length: int, size: int, boundary: Repetition) -> Indices:
    before, after = margins(size)
    position = np.arange(-before, length + after)
    if boundary == "periodic":
        return position % length
    turned = np.where(position < 0, -1 - position, position)
    return np.where(turned >= length, 2 * length - 1 - turned, turned)


def _extension(height: int, width: int, rows: int, columns: int, boundary: Repetition) -> Indices:
    """For each pixel of the extended image, the one that it repeats."""
    down, across = _line(height, rows, boundary), _line(width, columns, boundary)
    return (down[:, None] * width + across).ravel()


def _fold(height: int, width: int, rows: int, columns: int, boundary: Repetition) -> Indices:
    """For each pixel, the places of the framed image that repeat it, one per row, and 0, in the frame, for the rest."""
    repeated = _extension(height, width, rows, columns, boundary)
    place = np.arange(1, height + rows)[:, None] * (width + columns + 1) + np.arange(1, width + columns)
    order = repeated.argsort(kind="stable")
    counts = np.bincount(repeated, minlength=height * width)
    rank = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
    sources = np.zeros((counts.max(), height * width), dtype=np.int64)
    sources[rank, repeated[order]] = place.ravel()[order]
    return sources


_LINES = ConstantsByKey[tuple[int, int, Repetition]](lambda key: torch.from_numpy(_line(*key)))
_EXTENSIONS = ConstantsByKey[Key](lambda key: torch.from_numpy(_extension(*key)))
_FOLDS = ConstantsByKey[Key](lambda key: torch.from_numpy(_fold(*key)))
