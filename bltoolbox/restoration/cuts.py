"""How a large picture is cut into tiles, and how well neighbouring tiles agree where they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Half a step of 8 bits: a jump between tiles that might be seen.
VISIBLE = 0.5 / 255
#: Pixels along a border whose mean jump counts: a seam is a line. What differs at single pixels is the accuracy of
#: two solves, as it is everywhere else.
_STRETCH = 16


@dataclass(frozen=True)
class Tile:
    """A part of the picture: what is looked at, and of that what is kept."""

    rows: slice
    columns: slice
    core_rows: slice
    core_columns: slice

    def times(self, scale: int) -> Tile:
        """The same part of a picture that is larger."""
        parts = (self.rows, self.columns, self.core_rows, self.core_columns)
        return Tile(*(slice(scale * part.start, scale * part.stop) for part in parts))

    def inner(self, result: NDArray[Any]) -> NDArray[Any]:
        """What is kept, and one row and column beyond it where the tile has them."""
        top, left = self.core_rows.start - self.rows.start, self.core_columns.start - self.columns.start
        height = self.core_rows.stop - self.core_rows.start
        width = self.core_columns.stop - self.core_columns.start
        return result[top : top + height + 1, left : left + width + 1]


class Seams:
    """The row and the column just beyond each tile, kept until the neighbour has restored them, too."""

    def __init__(self, width: int, planes: int) -> None:
        self.below = np.full((width, planes), np.nan, np.float32)
        self.right: NDArray[Any] | None = None
        self.largest = 0.0

    def compare(self, tile: Tile, inner: NDArray[Any]) -> NDArray[Any]:
        """Look at the borders that the tile shares with earlier ones; what is kept of it."""
        height = tile.core_rows.stop - tile.core_rows.start
        width = tile.core_columns.stop - tile.core_columns.start
        kept = inner[:height, :width]
        if tile.core_rows.start > 0:
            self._see(kept[0] - self.below[tile.core_columns])
        if tile.core_columns.start > 0 and self.right is not None:
            self._see(kept[:, 0] - self.right)
        self.right = inner[:height, width].copy() if inner.shape[1] > width else None
        if inner.shape[0] > height:
            self.below[tile.core_columns] = inner[height, :width]
        return kept

    def _see(self, difference: NDArray[Any]) -> None:
        """The jump along a border (length, planes)."""
        self.largest = max(self.largest, float(np.abs(_means(difference)).max()))


def _means(line: NDArray[Any]) -> NDArray[Any]:
    """Of every stretch of a line, or of the whole line where it is shorter."""
    length = min(_STRETCH, len(line))
    sums = np.cumsum(np.concatenate([np.zeros_like(line[:1]), line]), axis=0, dtype=np.float64)
    return (sums[length:] - sums[:-length]) / length


def seam_notes(seam: float) -> Iterator[str]:
    if seam > VISIBLE:
        yield (
            f"neighbouring tiles differ by up to {255 * seam:.1f}/255 where they meet;"
            " use a smaller tolerance or larger tiles"
        )


def tiles(height: int, width: int, side: int, overlap: int, least: int) -> Iterator[Tile]:
    """Tiles from the top left to the bottom right; at least ``least`` rows and columns are kept of each."""
    for rows, core_rows in _intervals(height, side, overlap, least):
        for columns, core_columns in _intervals(width, side, overlap, least):
            yield Tile(rows, columns, core_rows, core_columns)


def _intervals(length: int, side: int, overlap: int, least: int) -> Iterator[tuple[slice, slice]]:
    if length <= side:
        yield slice(0, length), slice(0, length)
        return
    core = max(least, side - 2 * overlap)
    count = -(-length // core)
    core = -(-length // count)  # as even as possible, so that the last one is not a sliver
    for first in range(0, length, core):
        last = min(first + core, length)
        yield slice(max(0, first - overlap), min(length, last + overlap)), slice(first, last)
