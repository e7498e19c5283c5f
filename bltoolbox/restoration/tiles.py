"""Pictures of any size through a trained model, in bounded memory.

A picture that is larger than a tile is cut into tiles that overlap, each is restored by itself, and its middle is
kept. The influence of what is cut away decays exponentially; the overlap is measured (``overlap.py``) so that less
than 1e-4 of it remains in a photograph. Neighbouring tiles are compared where they meet, so the size of a seam is
known: if it could be visible, the picture is restarted with an overlap that suffices for any picture.

Where the operator reduces the picture, tiles are cut from what was measured, and the result is that many times larger.
Where it differs from place to place, as a mask does, each tile has its part of it, and the largest overlap: how far a
pixel reaches depends on the holes around it.

Pictures smaller than the components can handle are extended by mirroring. An operator that takes a picture to be
periodic or black beyond its border, which no photograph is, is given the `symmetric` rule instead: it would ring.
Where the data term or the regularizer treats places differently, a picture is restored as a whole.
"""

from __future__ import annotations

import contextlib
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
from bltoolbox.restoration.overlap import (
    MOST,
    Geometry,
    depends_on_size,
    extremes,
    geometry,
    is_positional,
    measure_overlap,
    photographs,
    smallest_side,
    strip_size,
)
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import Operator
from bltoolbox.restoration.theta import prepare
from bltoolbox.restoration.variational import Variational, VariationalAt

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

    def times(self, scale: int) -> _Tile:
        """The same part of a picture that is larger."""
        parts = (self.rows, self.columns, self.core_rows, self.core_columns)
        return _Tile(*(slice(scale * span.start, scale * span.stop) for span in parts))

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
        self.positional = is_positional(model.problem.operator, self.channels)
        try:
            self.problem, self.side, self.around = self._prepare(model.problem.restoring)
        except KeyError as error:
            raise self._lacks(str(error)) from error
        self.cuts = model.problem.data_term.uniform and model.problem.regularizer.uniform

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
        around = self._geometry(height, width)
        solve = self._solver(sigma, planes, around)
        if around is None or not self.cuts or around.scale**2 * height * width <= self.tile**2:
            cut = _Cut(_from_unit(solve(_to_unit(image)), image.dtype))
            if progress:
                progress(1, 1)
        else:
            cut = self._in_tiles(image, solve, around, progress)
        notes = (*self._channel_notes(planes), *solve.notes(cut.tiles), *_seam_notes(cut.seam))
        return cut.out, Report(sigma, estimated, cut.tiles, cut.overlap, cut.seam, solve.iterations, notes)

    def _geometry(self, height: int, width: int) -> Geometry | None:
        """That of a picture, if it can be cut."""
        if not self.positional:
            return self.around
        if height * width <= self.tile**2:
            return None
        return geometry(self.problem, self.model.theta, self.channels, self.side, (height, width))

    def _in_tiles(
        self, image: NDArray[Any], solve: _Solver, around: Geometry, progress: Progress | None
    ) -> _Cut:
        if around.positional:
            cut = self._with_overlap(MOST, image, solve, around, progress)
        else:
            cut = self._with_overlap(self.overlap, image, solve, around, progress)
        if cut is None:
            solve.reset()
            cut = self._with_overlap(self.large_overlap, image, solve, around, progress)
            assert cut is not None
        return cut

    def _with_overlap(
        self, overlap: int, image: NDArray[Any], solve: _Solver, around: Geometry, progress: Progress | None
    ) -> _Cut | None:
        """None if there is a visible seam that a larger overlap would remove."""
        height, width, planes = image.shape
        scale = around.scale
        out = np.empty((scale * height, scale * width, planes), image.dtype)
        seams, beyond = _Seams(scale * width, planes), -(-overlap // scale)
        tiles = list(_tiles(height, width, max(1, self.tile // scale), beyond, max(1, _CORE // scale)))
        for count, tile in enumerate(tiles):
            return_freed_memory()  # tiles have several sizes, and would leave gaps
            larger, operator = tile.times(scale), None
            if around.positional:
                shape = (self.channels, height, width)
                operator = self.problem.operator.crop(tile.rows, tile.columns, shape)
            result = solve(_to_unit(image[tile.rows, tile.columns]), operator)
            inner = seams.compare(larger, larger.inner(result))
            # No overlap is larger than MOST; what is needed for any picture is measured only if it matters.
            if seams.largest > _VISIBLE and overlap < MOST and overlap < self.large_overlap:
                return None
            out[larger.core_rows, larger.core_columns] = _from_unit(inner, image.dtype)
            if progress:
                progress(count + 1, len(tiles))
        return _Cut(out, len(tiles), scale * beyond, seams.largest)

    def _prepare(self, problem: Variational) -> tuple[Variational, int, Geometry | None]:
        """The problem with the border rule of photographs, its smallest image, and how large x is, given y."""
        operator = problem.operator
        self._refuse_context(operator)
        if self.positional:
            side = smallest_side(problem, self.channels, positional=True) or 1
            with contextlib.suppress(ValueError):  # a mask of another size
                self._refuse_other_measurements(problem, side)
            return problem, side, None
        candidates = [operator]
        if getattr(operator, "boundary", None) in ("zero", "periodic"):
            candidates.insert(0, copy.copy(operator))
            candidates[0].boundary = "symmetric"  # type: ignore[attr-defined]
        for candidate in candidates:
            local = replace(problem, operator=candidate)
            smallest = smallest_side(local, self.channels)
            if smallest is None:
                continue
            if depends_on_size(local, self.channels, smallest):
                return problem, 1, None
            around = geometry(local, self.model.theta, self.channels, smallest)
            if around is not None or candidate is operator:
                self._refuse_other_measurements(local, smallest)
                return local, smallest, around
        return problem, 1, None  # of one size only: its own sentence says which when a picture does not fit

    def _refuse_context(self, operator: Operator) -> None:
        needed: list[str] = []
        with contextlib.suppress(ValueError):  # of one size only, and not of this one
            needed = sorted(operator.example_contexts((self.channels, 16, 16), 1)[0])
        if needed:
            raise self._lacks(" and ".join(map(repr, needed)))

    def _lacks(self, context: str) -> BltError:
        """What the operator would have to be told about a picture."""
        return BltError(
            f"operator {self.model.recipe.operator.name!r} needs {context} of each measurement, so it cannot restore"
            " pictures; use Model.solve(y, context=…)"
        )

    def _refuse_other_measurements(self, problem: Variational, side: int) -> None:
        reference = next(iter(self.model.theta.values()))
        x = torch.zeros(1, self.channels, 4 * side, 4 * side).to(reference)
        measured = problem.operator.apply(x, prepare(problem, self.model.theta)["operator"], {})
        if measured.shape[:2] != x.shape[:2]:
            name = self.model.recipe.operator.name
            raise BltError(f"operator {name!r} does not measure pictures, so it cannot restore picture files")

    @cached_property
    def overlap(self) -> int:
        """Of tiles, in pixels of the result: what does for photographs."""
        around = self.around or Geometry()
        size = strip_size(self.channels, self.side, around)
        restore = _Solver(self, self.problem, around).solve
        strips = photographs(self.problem, self.model.theta, size, restore)
        return measure_overlap(self.problem, self.model.theta, strips, around).pixels

    @cached_property
    def large_overlap(self) -> int:
        """What does for any picture."""
        around = self.around or Geometry()
        strips = extremes(self.model.theta, strip_size(self.channels, self.side, around))
        return max(self.overlap, measure_overlap(self.problem, self.model.theta, strips, around).pixels)

    def _solver(self, sigma: float | None, planes: int, around: Geometry | None) -> _Solver:
        trained = self.model.problem.noise_level
        if planes != self.channels and self.channels != 1 and planes != 1:
            raise BltError(f"the model is for {self.channels} channels, and the picture has {planes}")
        # A gray picture in all channels has the same noise in each: in the direction of gray √C times as much.
        spread = math.sqrt(self.channels) if planes < self.channels else 1.0
        amount = None if sigma is None else sigma * spread
        rescales = self.problem.data_term.rescales
        if amount is None or amount == trained or (sigma == trained and not rescales):
            return _Solver(self, self.problem, around)
        if trained is None:
            noise = self.model.recipe.noise
            how = "on recorded measurements" if noise is None else f"with noise {noise.name!r}"
            raise BltError(f"the model was trained {how}, which has no known level; omit the noise level")
        if not rescales:
            name = self.model.recipe.data_term.name
            raise BltError(
                f"a model with data term {name!r} cannot be carried to another noise level; omit the noise level"
            )
        if trained == 0:
            raise BltError(
                "the model was trained without noise, so it cannot be used at another noise level; omit the noise level"
            )
        base = self.problem.regularizer
        rescaled = replace(self.problem, regularizer=Rescaled(base, amount / trained))
        return _Solver(self, rescaled, around)

    def _channel_notes(self, planes: int) -> Iterator[str]:
        if planes < self.channels:
            yield "gray picture, colour model: restored in all channels and averaged"
        elif planes > self.channels:
            yield "colour picture, gray model: each channel restored separately"


class _Solver:
    """One noise level: a tile in [0, 1] to a restored one. Counts what happens."""

    def __init__(self, restorer: Restorer, problem: Variational, around: Geometry | None) -> None:
        self.restorer = restorer
        self.problem = problem
        self.around = around
        self.at: dict[tuple[int, ...], VariationalAt] = {}
        self.iterations = 0
        self.reset()

    def reset(self) -> None:
        """Forget what went wrong before; it counts as work all the same."""
        self.unfinished = 0
        self.status: Status | None = None

    def __call__(self, tile: NDArray[Any], operator: Operator | None = None) -> NDArray[Any]:
        """``operator`` is that of the tile, where it is another one than that of the picture."""
        height, width, planes = tile.shape
        channels, around = self.restorer.channels, self.around
        # What differs from place to place cannot be mirrored along.
        fixed = around is None or around.positional
        tile, (top, left) = _padded(tile, 1 if fixed else self.restorer.side)
        reference = next(iter(self.restorer.model.theta.values()))
        y = torch.from_numpy(tile).permute(2, 0, 1).to(reference)
        # Samples and channels: the channels of one image, each an image of its own, or the same in all of them.
        y = y.unsqueeze(1) if channels == 1 else y.expand(channels, -1, -1).unsqueeze(0)
        if sentence := self.problem.data_term.check_measurements(y):
            raise BltError(sentence)
        x = self.solve(y, operator)
        x = x[:, 0] if channels == 1 else x[0]
        x = x.mean(0, keepdim=True) if planes < channels else x
        if around is not None:
            scale, (rows, columns) = around.scale, around.margin
            top, left = scale * top + rows // 2, scale * left + columns // 2
            x = x[:, top : top + scale * height, left : left + scale * width]
        return np.ascontiguousarray(x.permute(1, 2, 0).cpu().numpy())

    def solve(self, y: Tensor, operator: Operator | None = None) -> Tensor:
        """The minimisers for measurements B×C×H×W."""
        model = self.restorer.model
        problem = self.problem if operator is None else replace(self.problem, operator=operator)
        try:
            shape = problem.image_shape(model.theta, y)
            if (sentence := model.check_size(shape)) is not None:
                raise BltError(sentence)
            at = problem.at(model.theta, shape)
            if operator is None:
                at = self.at.setdefault(shape, at)
            tol = self.restorer.tol * math.sqrt(math.prod(shape))
            lower = at.on(y)
            solution = solve_cold(model.solver, lower, tol, model.recipe.iteration_limit)
        except ValueError as error:
            raise BltError(str(error)) from error
        self.iterations += int(solution.iterations.sum())
        late = [status for status in solution.status if status is not Status.CONVERGED]
        self.unfinished += bool(late)
        self.status = late[0] if late else self.status
        return lower.view(solution.x)

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


def _tiles(height: int, width: int, side: int, overlap: int, least: int) -> Iterator[_Tile]:
    """Tiles from the top left to the bottom right; at least ``least`` rows and columns are kept of each."""
    for rows, core_rows in _intervals(height, side, overlap, least):
        for columns, core_columns in _intervals(width, side, overlap, least):
            yield _Tile(rows, columns, core_rows, core_columns)


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
