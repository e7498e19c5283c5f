"""How a large picture is cut into tiles and put together again, and how well neighbouring tiles agree where they meet.

Each tile is accurate to the tolerance of its solve, and neighbours err differently. So they fade into each other over a
few pixels on both sides of a cut, and what they differ by there becomes a slope instead of a jump.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Half a step of 8 bits from pixel to pixel: a jump between tiles that might be seen.
VISIBLE = 0.5 / 255
#: Pixels on each side of a cut over which tiles fade into each other, if their overlap is twice that.
FADE = 8
#: Tiles begin at multiples of this, so that networks with strides see the same groups of pixels in every tile.
PACE = 4
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
        return Tile(*(slice(scale * extent.start, scale * extent.stop) for extent in parts))

    def beyond(self, result: NDArray[Any]) -> NDArray[Any]:
        """What is kept, and one row and column beyond it where the tile has them."""
        top, left = self.core_rows.start - self.rows.start, self.core_columns.start - self.columns.start
        height = self.core_rows.stop - self.core_rows.start
        width = self.core_columns.stop - self.core_columns.start
        return result[top : top + height + 1, left : left + width + 1]


def fade_length(parts: Sequence[Tile], overlap: int) -> int:
    """Pixels on each side of a cut: no tile fades out before it has faded in."""
    cores = [core for tile in parts for core in (tile.core_rows, tile.core_columns)]
    return min(FADE, overlap // 2, *(max(0, core.stop - core.start) // 2 for core in cores))


class Canvas:
    """The restored picture, put together from rows of tiles; ``write`` stores finished rows (first, values)."""

    def __init__(
        self, height: int, width: int, planes: int, fade: int, write: Callable[[int, NDArray[Any]], None]
    ) -> None:
        self.height, self.width, self.planes = height, width, planes
        self.fade = fade
        self.write = write
        self.first = 0
        self.band = np.zeros((0, width, planes), np.float32)

    def add(self, tile: Tile, result: NDArray[Any]) -> None:
        """Tiles come row by row."""
        rows, row_weights = _fading(tile.core_rows, self.height, self.fade)
        columns, column_weights = _fading(tile.core_columns, self.width, self.fade)
        if rows.stop > self.first + len(self.band):
            self._begin(rows)
        top, left = tile.rows.start, tile.columns.start
        seen = result[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        weights = row_weights[:, None, None] * column_weights[None, :, None]
        self.band[rows.start - self.first :, columns] += weights * seen

    def finish(self) -> None:
        self.write(self.first, self.band)

    def _begin(self, rows: slice) -> None:
        """A new row of tiles: what none of them changes any more is finished."""
        done = rows.start - self.first
        self.write(self.first, self.band[:done])
        band = np.zeros((rows.stop - rows.start, self.width, self.planes), np.float32)
        band[: len(self.band) - done] = self.band[done:]
        self.first, self.band = rows.start, band


def _fading(core: slice, length: int, fade: int) -> tuple[slice, NDArray[Any]]:
    """The places where a tile counts, and how much: it fades in before its core and out behind it."""
    before, behind = (fade if core.start > 0 else 0), (fade if core.stop < length else 0)
    weights = np.ones(core.stop - core.start + before + behind, np.float32)
    ramp = (np.arange(2 * fade, dtype=np.float32) + 0.5) / max(1, 2 * fade)
    if before:
        weights[: 2 * fade] = ramp
    if behind:
        weights[len(weights) - 2 * fade :] = 1 - ramp
    return slice(core.start - before, core.stop + behind), weights


class Seams:
    """The row and the column just beyond each tile, kept until the neighbour has restored them, too."""

    def __init__(self, width: int, planes: int, fade: int) -> None:
        self.fade = fade
        self.below = np.full((width, planes), np.nan, np.float32)
        self.right: NDArray[Any] | None = None
        self.largest = 0.0

    def compare(self, tile: Tile, result: NDArray[Any]) -> None:
        """Look at the borders that the tile shares with earlier ones."""
        inner = tile.beyond(result)
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

    def _see(self, difference: NDArray[Any]) -> None:
        """What two tiles differ by along a border, (length, planes), is a jump, or a slope where they fade."""
        jump = float(np.abs(_means(difference)).max()) / max(1, 2 * self.fade)
        self.largest = max(self.largest, jump)


def _means(line: NDArray[Any]) -> NDArray[Any]:
    """Of every stretch of a line, or of the whole line where it is shorter."""
    length = min(_STRETCH, len(line))
    sums = np.cumsum(np.concatenate([np.zeros_like(line[:1]), line]), axis=0, dtype=np.float64)
    return (sums[length:] - sums[:-length]) / length


def seam_notes(seam: float) -> Iterator[str]:
    if seam > VISIBLE:
        yield (
            f"there is a jump of up to {255 * seam:.1f}/255 where tiles meet;"
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
    core += -core % PACE
    for first in range(0, length, core):
        last = min(first + core, length)
        yield _around(first, last, overlap, length), slice(first, last)


def _around(first: int, last: int, overlap: int, length: int) -> slice:
    """What is looked at to keep ``first`` to ``last``: a little more than the overlap, for a length that is fast."""
    begin, end = max(0, first - overlap), min(length, last + overlap)
    begin -= begin % PACE
    end = min(length, begin + fast_length(end - begin))
    earlier = range(begin, max(-1, begin - (end - begin) // 8), -PACE)
    return slice(next((start for start in earlier if end - start == fast_length(end - start)), begin), end)


def fast_length(length: int) -> int:
    """The next even length whose Fourier transform is fast: with no prime factor above 7."""
    length += length % 2
    while True:
        rest = length
        for factor in (2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return length
        length += 2
