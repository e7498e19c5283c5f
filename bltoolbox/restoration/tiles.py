"""Pictures of any size through a trained model, in bounded memory.

A picture that is larger than a tile is cut into tiles that overlap, each is restored by itself, and its middle is
kept. The influence of what is cut away decays exponentially; the overlap is measured (``overlap.py``) so that less
than 1e-4 of it remains in a photograph. Neighbouring tiles are compared where they meet, so the size of a seam is
known: if it could be visible, the picture is restarted with an overlap that suffices for any picture.

Pictures smaller than the components can handle are extended by mirroring. An operator that takes a picture to be
periodic or black beyond its border, which no photograph is, is given the `symmetric` rule instead: it would ring.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bltoolbox.bilevel.memory import return_freed_memory
from bltoolbox.bilevel.records import Status
from bltoolbox.errors import BltError
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.metrics import UNIT, values_in
from bltoolbox.restoration.noise_level import estimate_noise, parse_noise
from bltoolbox.restoration.overlap import extremes, margin, measure_overlap, photographs, smallest_side
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.variational import Variational, VariationalAt, prepare

if TYPE_CHECKING:
    from bltoolbox.restoration.model import Model

#: Root mean square distance of a restored picture to the exact minimiser: a fortieth of a step of 8 bits.
TOL = 1e-4
#: Side of the tiles, overlap included; pictures of no more pixels are restored as a whole.
TILE = 768
#: What is kept of a tile has at least this side.
_CORE = 64
#: Half a step of 8 bits: a jump between tiles that might be seen.
_VISIBLE = 0.5 / 255

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """What was done to a picture."""

    noise: float | None
    #: Whether the noise level was estimated from the picture.
    estimated: bool
    tiles: int
    overlap: int
    #: The largest difference of two neighbouring tiles where they meet, for values in [0, 1].
    seam: float
    iterations: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Tile:
    """A part of the picture: what is looked at, and of that what is kept."""

    rows: slice
    columns: slice
    core_rows: slice
    core_columns: slice

    def inner(self, result: NDArray[Any]) -> NDArray[Any]:
        """What is kept, and one row and column beyond it where the tile has them."""
        top, left = self.core_rows.start - self.rows.start, self.core_columns.start - self.columns.start
        height = self.core_rows.stop - self.core_rows.start
        width = self.core_columns.stop - self.core_columns.start
        return result[top : top + height + 1, left : left + width + 1]


@dataclass(frozen=True)
class _Cut:
    """A restored picture, and how it was cut: as a whole, unless said otherwise."""

    out: NDArray[Any]
    tiles: int = 1
    overlap: int = 0
    seam: float = 0.0


class Restorer:
    """A model, ready to restore pictures one after the other.

    Args:
        model: what to restore with.
        tol: root mean square distance to the exact minimiser (of its gradient to 0, where no strong convexity is
            known).
        tile: side of the tiles.
    """

    def __init__(self, model: Model, *, tol: float | None = None, tile: int | None = None) -> None:
        if model.range != UNIT:
            raise BltError(
                f"the model is for images with {values_in(model.range)}, but pictures have values from 0 to 1; use"
                " Model.solve on arrays of measurements"
            )
        self.model = model
        self.tol = TOL if tol is None else tol
        self.tile = TILE if tile is None else tile
        if not 0 < self.tol < math.inf:
            raise BltError(f"tol {self.tol:g} is not a positive number")
        if self.tile < 1:
            raise BltError(f"tile {self.tile} is not a positive number of pixels")
        self.channels = model.channels
        try:
            self.problem, self.side, self.margin = self._prepare(model.problem.restoring)
        except KeyError as error:
            raise BltError(
                f"operator {model.recipe.operator.name!r} needs {error} of each measurement, so it cannot restore"
                " pictures; use Model.solve(y, context=…)"
            ) from error

    def noise(self, image: NDArray[Any], noise: float | str | None = None) -> tuple[float | None, bool]:
        """The noise level that a picture is restored for, and whether it was estimated: the model's own, by
        default, which is None where its noise has no level."""
        level = parse_noise(noise)
        if isinstance(level, str):
            try:
                return estimate_noise(image), True
            except ValueError as error:
                raise BltError(str(error)) from error
        return (self.model.problem.noise_level if level is None else level), False

    def run(
        self, image: NDArray[Any], noise: float | str | None = None, progress: Progress | None = None
    ) -> tuple[NDArray[Any], Report]:
        """Restore an image H×W×C of uint8, uint16, or floats for [0, 1]; the result is of the same kind."""
        sigma, estimated = self.noise(image, noise)
        height, width, planes = image.shape
        solve = self._solver(sigma, planes)
        if self.margin is None or height * width <= self.tile**2:
            cut = _Cut(_from_unit(solve(_to_unit(image)), image.dtype))
            if progress:
                progress(1, 1)
        else:
            cut = self._in_tiles(image, solve, progress)
        notes = (*self._channel_notes(planes), *solve.notes(cut.tiles), *_seam_notes(cut.seam))
        return cut.out, Report(sigma, estimated, cut.tiles, cut.overlap, cut.seam, solve.iterations, notes)

    def _in_tiles(self, image: NDArray[Any], solve: _Solver, progress: Progress | None) -> _Cut:
        cut = self._with_overlap(self.overlap, image, solve, progress)
        if cut is None:
            solve.reset()
            cut = self._with_overlap(self.large_overlap, image, solve, progress)
            assert cut is not None
        return cut

    def _with_overlap(
        self, overlap: int, image: NDArray[Any], solve: _Solver, progress: Progress | None
    ) -> _Cut | None:
        """None if there is a visible seam that a larger overlap would remove."""
        height, width, planes = image.shape
        out, seams = np.empty_like(image), _Seams(width, planes)
        tiles = list(_tiles(height, width, self.tile, overlap))
        for count, tile in enumerate(tiles):
            return_freed_memory()  # tiles have several sizes, and would leave gaps
            inner = seams.compare(tile, tile.inner(solve(_to_unit(image[tile.rows, tile.columns]))))
            if seams.largest > _VISIBLE and overlap < self.large_overlap:
                return None
            out[tile.core_rows, tile.core_columns] = _from_unit(inner, image.dtype)
            if progress:
                progress(count + 1, len(tiles))
        return _Cut(out, len(tiles), overlap, seams.largest)

    def _prepare(self, problem: Variational) -> tuple[Variational, int, tuple[int, int] | None]:
        """The problem with the border rule of photographs, its smallest image, and by how much x is larger than y."""
        operator = problem.operator
        candidates = [operator]
        if getattr(operator, "boundary", None) in ("zero", "periodic"):
            candidates.insert(0, copy.copy(operator))
            candidates[0].boundary = "symmetric"  # type: ignore[attr-defined]
        for candidate in candidates:
            found = replace(problem, operator=candidate)
            side = smallest_side(found, self.channels)
            if side is None:
                continue
            around = margin(found, self.model.theta, self.channels, side)
            if around is not None or candidate is operator:
                self._refuse_other_measurements(found, side)
                return found, side, around
        return problem, 1, None  # of one size only: its own sentence says which when a picture does not fit

    def _refuse_other_measurements(self, problem: Variational, side: int) -> None:
        reference = next(iter(self.model.theta.values()))
        x = torch.zeros(1, self.channels, 4 * side, 4 * side).to(reference)
        measured = problem.operator.apply(x, prepare(problem, self.model.theta)["operator"], {})
        if measured.shape[:2] != x.shape[:2]:
            name = self.model.recipe.operator.name
            raise BltError(f"operator {name!r} does not measure pictures, so it cannot restore picture files")

    @cached_property
    def overlap(self) -> int:
        """Of tiles, in pixels: what does for photographs."""
        restore = _Solver(self, self.problem).solve
        strips = photographs(self.problem, self.model.theta, self.channels, self.side, restore)
        return measure_overlap(self.problem, self.model.theta, strips).pixels

    @cached_property
    def large_overlap(self) -> int:
        """What does for any picture."""
        strips = extremes(self.model.theta, self.channels, self.side)
        return max(self.overlap, measure_overlap(self.problem, self.model.theta, strips).pixels)

    def _solver(self, sigma: float | None, planes: int) -> _Solver:
        trained = self.model.problem.noise_level
        if planes != self.channels and self.channels != 1 and planes != 1:
            raise BltError(f"the model is for {self.channels} channels, and the picture has {planes}")
        # A gray picture in all channels has the same noise in each: in the direction of gray √C times as much.
        spread = math.sqrt(self.channels) if planes < self.channels else 1.0
        amount = None if sigma is None else sigma * spread
        if amount is None or amount == trained:
            return _Solver(self, self.problem)
        if trained is None:
            noise = self.model.recipe.noise
            how = "on recorded measurements" if noise is None else f"with noise {noise.name!r}"
            raise BltError(f"the model was trained {how}, which has no known level; omit the noise level")
        if not self.problem.data_term.rescales:
            name = self.model.recipe.data_term.name
            raise BltError(
                f"a model with data term {name!r} cannot be carried to another noise level; omit the noise level"
            )
        if trained == 0:
            raise BltError(
                "the model was trained without noise, so it cannot be used at another noise level; omit the noise level"
            )
        base = self.problem.regularizer
        return _Solver(self, replace(self.problem, regularizer=Rescaled(base, amount / trained)))

    def _channel_notes(self, planes: int) -> Iterator[str]:
        if planes < self.channels:
            yield "gray picture, colour model: restored in all channels and averaged"
        elif planes > self.channels:
            yield "colour picture, gray model: each channel restored separately"


class _Solver:
    """One noise level: a tile in [0, 1] to a restored one. Counts what happens."""

    def __init__(self, restorer: Restorer, problem: Variational) -> None:
        self.restorer = restorer
        self.problem = problem
        self.at: dict[tuple[int, ...], VariationalAt] = {}
        self.iterations = 0
        self.reset()

    def reset(self) -> None:
        """Forget what went wrong before; it counts as work all the same."""
        self.unfinished = 0
        self.status: Status | None = None

    def __call__(self, tile: NDArray[Any]) -> NDArray[Any]:
        height, width, planes = tile.shape
        channels, around = self.restorer.channels, self.restorer.margin
        tile, (top, left) = _padded(tile, 1 if around is None else self.restorer.side)
        reference = next(iter(self.restorer.model.theta.values()))
        y = torch.from_numpy(tile).permute(2, 0, 1).to(reference)
        # Samples and channels: the channels of one image, each an image of its own, or the same in all of them.
        y = y.unsqueeze(1) if channels == 1 else y.expand(channels, -1, -1).unsqueeze(0)
        x = self.solve(y)
        x = x[:, 0] if channels == 1 else x[0]
        x = x.mean(0, keepdim=True) if planes < channels else x
        if around is not None:
            top, left = top + around[0] // 2, left + around[1] // 2
            x = x[:, top : top + height, left : left + width]
        return np.ascontiguousarray(x.permute(1, 2, 0).cpu().numpy())

    def solve(self, y: Tensor) -> Tensor:
        """The minimisers for measurements B×C×H×W."""
        model = self.restorer.model
        try:
            shape = self.problem.image_shape(model.theta, y)
            at = self.at.setdefault(shape, self.problem.at(model.theta, shape))
            tol = self.restorer.tol * math.sqrt(math.prod(shape))
            found = solve_cold(model.solver, at.on(y), tol, model.recipe.iteration_limit)
        except ValueError as error:
            raise BltError(str(error)) from error
        self.iterations += int(found.iterations.sum())
        late = [status for status in found.status if status is not Status.CONVERGED]
        self.unfinished += bool(late)
        self.status = late[0] if late else self.status
        return found.x

    def notes(self, tiles: int) -> Iterator[str]:
        if self.status is not None:
            of = f" in {self.unfinished} of {tiles} tiles" if tiles > 1 else ""
            yield f"less accurate than requested{of}: {self.status.value}"


class _Seams:
    """The row and the column just beyond each tile, kept until the neighbour has restored them, too."""

    def __init__(self, width: int, planes: int) -> None:
        self.below = np.full((width, planes), np.nan, np.float32)
        self.right: NDArray[Any] | None = None
        self.largest = 0.0

    def compare(self, tile: _Tile, inner: NDArray[Any]) -> NDArray[Any]:
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
        self.largest = max(self.largest, float(np.abs(difference).max()))


def _seam_notes(seam: float) -> Iterator[str]:
    if seam > _VISIBLE:
        yield (
            f"neighbouring tiles differ by up to {255 * seam:.1f}/255 where they meet;"
            " use a smaller tolerance or larger tiles"
        )


def _tiles(height: int, width: int, side: int, overlap: int) -> Iterator[_Tile]:
    """Tiles from the top left to the bottom right."""
    for rows, core_rows in _intervals(height, side, overlap):
        for columns, core_columns in _intervals(width, side, overlap):
            yield _Tile(rows, columns, core_rows, core_columns)


def _intervals(length: int, side: int, overlap: int) -> Iterator[tuple[slice, slice]]:
    if length <= side:
        yield slice(0, length), slice(0, length)
        return
    core = max(_CORE, side - 2 * overlap)
    count = -(-length // core)
    core = -(-length // count)  # as even as possible, so that the last one is not a sliver
    for first in range(0, length, core):
        last = min(first + core, length)
        yield slice(max(0, first - overlap), min(length, last + overlap)), slice(first, last)


def _padded(tile: NDArray[Any], side: int) -> tuple[NDArray[Any], tuple[int, int]]:
    """The tile mirrored at its borders until it has the smallest side, and where it lies in that."""
    missing = [max(0, side - length) for length in tile.shape[:2]]
    if not any(missing):
        return tile, (0, 0)
    before = [count // 2 for count in missing]
    widths = [(first, count - first) for first, count in zip(before, missing, strict=True)]
    return np.pad(tile, [*widths, (0, 0)], mode="symmetric"), (before[0], before[1])


def _to_unit(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "u":
        return np.asarray(values, dtype=np.float32) / np.float32(np.iinfo(values.dtype).max)
    return np.array(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)


def _from_unit(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind != "u":
        return values.astype(dtype)
    top = np.iinfo(dtype).max
    return (values.clip(0, 1) * top + 0.5).astype(dtype)
