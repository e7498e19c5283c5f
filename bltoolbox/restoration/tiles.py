"""Pictures of any size through a trained model, in bounded memory.

A picture that is larger than a tile is cut into tiles that overlap, each is restored by itself, and its middle is
kept. The influence of what is cut away decays exponentially; the overlap is measured (``overlap.py``) so that less
than 1e-4 of it remains in a photograph. Neighbouring tiles fade into each other and are compared where they meet, so
the size of a seam is known: if it could be visible, the picture is restarted with an overlap that suffices for any
picture.

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
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from bltoolbox.bilevel.memory import return_freed_memory
from bltoolbox.errors import BltError
from bltoolbox.restoration.cuts import VISIBLE, Canvas, Seams, Tile, fade_length, seam_notes, tiles
from bltoolbox.restoration.metrics import UNIT, values_in
from bltoolbox.restoration.noise_choice import NoiseChoice, choose_noise
from bltoolbox.restoration.overlap import (
    COARSE_LEVEL,
    LEVEL,
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
from bltoolbox.restoration.tile_solver import TileSolver
from bltoolbox.restoration.tile_threads import in_order, tiles_at_once
from bltoolbox.restoration.variational import Variational

if TYPE_CHECKING:
    from bltoolbox.restoration.model import Model

#: Side of the tiles, overlap included; pictures of no more pixels are restored as a whole.
TILE = 768
#: What is kept of a tile has at least this side.
_CORE = 64

#: The part of a picture that is done, and what is being done.
Progress = Callable[[float, str], None]
_RESTORING = "restoring"


@dataclass(frozen=True)
class Report:
    """What was done to a picture."""

    noise: float | None
    #: Whether the noise level was estimated from the picture.
    estimated: bool
    tiles: int
    overlap: int
    #: The largest jump from pixel to pixel where tiles meet, in the mean along a border, for values in [0, 1].
    seam: float
    iterations: int
    #: The root mean square distance to the exact minimiser that is certified, of each tile; None where none is.
    distance: float | None
    notes: tuple[str, ...]


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
            known); by default what can be seen decides, which depends on the noise and the bits of results.
        tile: side of the tiles.
        estimates: whether the noise level is estimated where none is given, and compared with an estimate where one
            is; otherwise it is the model's own.
    """

    def __init__(
        self, model: Model, *, tol: float | None = None, tile: int | None = None, estimates: bool = False
    ) -> None:
        if model.range != UNIT:
            raise BltError(
                f"the model is for images with {values_in(model.range)}, but pictures have values from 0 to 1; use"
                " Model.solve on arrays of measurements"
            )
        self.model = model
        self.tol = tol
        self.tile = TILE if tile is None else tile
        self.estimates = estimates
        if tol is not None and not 0 < tol < math.inf:
            raise BltError(f"tol {tol:g} is not a positive number")
        if self.tile < 1:
            raise BltError(f"tile {self.tile} is not a positive number of pixels")
        self.channels = model.channels
        self.positional = is_positional(model.problem.operator, self.channels)
        try:
            self.problem, self.side, self.around = self._prepare(model.problem.restoring)
        except KeyError as error:
            raise self._lacks(str(error)) from error
        self.cuts = model.problem.data_term.uniform and model.problem.regularizer.uniform

    def noise(self, image: NDArray[Any], noise: float | str | None = None) -> NoiseChoice:
        """The noise level that a picture is restored for; the model's own is None where its noise has no level."""
        problem = self.model.problem
        # Missing pixels and enlarged ones say little about noise.
        local = self.around is not None and self.around.scale == 1
        known = bool(problem.noise_level) or problem.regularizer.offers("at_noise")
        estimable = known and problem.data_term.rescales and local and self.estimates
        return choose_noise(image, noise, problem.noise_level, estimable)

    def run(
        self, image: NDArray[Any], noise: float | str | None = None, progress: Progress | None = None
    ) -> tuple[NDArray[Any], Report]:
        """Restore an image H×W×C of uint8, uint16, or floats for [0, 1]; the result is of the same kind."""
        choice = self.noise(image, noise)
        height, width, planes = image.shape
        around = self._geometry(height, width)
        solve = self._solver(choice.sigma, planes, around, image.dtype)
        if around is None or not self.cuts or around.scale**2 * height * width <= self.tile**2:
            report = _Shares(progress, 1).of(0)
            cut = _Cut(_from_unit(solve(_to_unit(image), report=report), image.dtype))
        else:
            cut = self._in_tiles(image, solve, around, progress)
        if progress:
            progress(1.0, _RESTORING)
        notes = (
            *choice.notes,
            *self._channel_notes(planes),
            *solve.notes(cut.tiles),
            *seam_notes(cut.seam),
        )
        distance = None if math.isnan(solve.distance) else solve.distance
        facts = cut.tiles, cut.overlap, cut.seam, solve.iterations, distance
        return cut.out, Report(choice.sigma, choice.estimated, *facts, notes)

    def _geometry(self, height: int, width: int) -> Geometry | None:
        """That of a picture, if it can be cut."""
        if not self.positional:
            return self.around
        if height * width <= self.tile**2:
            return None
        return geometry(self.problem, self.model.theta, self.channels, self.side, (height, width))

    def _in_tiles(
        self, image: NDArray[Any], solve: TileSolver, around: Geometry, progress: Progress | None
    ) -> _Cut:
        if progress:
            progress(0.0, "measuring how far a pixel reaches")
        overlap = MOST if around.positional else self._overlap_for(image.dtype)
        cut = self._with_overlap(overlap, image, solve, around, progress)
        if cut is None:
            solve.reset()
            cut = self._with_overlap(self.large_overlap, image, solve, around, progress)
            assert cut is not None
        return cut

    def _with_overlap(
        self,
        overlap: int,
        image: NDArray[Any],
        solve: TileSolver,
        around: Geometry,
        progress: Progress | None,
    ) -> _Cut | None:
        """None if there is a visible seam that a larger overlap would remove."""
        height, width, planes = image.shape
        scale = around.scale
        out = np.empty((scale * height, scale * width, planes), image.dtype)
        beyond = -(-overlap // scale)
        parts = list(tiles(height, width, max(1, self.tile // scale), beyond, max(1, _CORE // scale)))
        fade = fade_length([tile.times(scale) for tile in parts], scale * beyond)
        seams = Seams(scale * width, planes, fade)

        def write(first: int, rows: NDArray[Any]) -> None:
            out[first : first + len(rows)] = _from_unit(rows, image.dtype)

        canvas = Canvas(scale * height, scale * width, planes, fade, write)
        restored = partial(self._restored_tile, image, solve, around, parts)
        results = self._results(restored, len(parts), progress)
        with contextlib.closing(results):
            for tile, result in zip(parts, results, strict=True):
                larger = tile.times(scale)
                seams.compare(larger, result)
                # No overlap is larger than MOST; what is needed for any picture is measured only if it matters.
                if seams.largest > VISIBLE and overlap < MOST and overlap < self.large_overlap:
                    return None
                canvas.add(larger, result)
        canvas.finish()
        return _Cut(out, len(parts), scale * beyond, seams.largest)

    def _restored_tile(
        self,
        image: NDArray[Any],
        solve: TileSolver,
        around: Geometry,
        parts: Sequence[Tile],
        number: int,
        report: Callable[[float], None] | None,
    ) -> NDArray[Any]:
        return_freed_memory()  # tiles have several sizes, and would leave gaps
        tile, operator = parts[number], None
        if around.positional:
            shape = (self.channels, *image.shape[:2])
            operator = self.problem.operator.crop(tile.rows, tile.columns, shape)
        return solve(_to_unit(image[tile.rows, tile.columns]), operator, report)

    def _results(
        self,
        restored: Callable[[int, Callable[[float], None] | None], NDArray[Any]],
        count: int,
        progress: Progress | None,
    ) -> Generator[NDArray[Any], None, None]:
        """Of tiles in their order, of which several are restored at once on a CPU."""
        shares = _Shares(progress, count)
        if tiles_at_once(count, next(iter(self.model.theta.values())).device) > 1:
            yield from in_order(restored, count, shares.report)
            return
        for number in range(count):
            yield restored(number, shares.of(number))

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
        return self._measured_overlap(LEVEL)

    @cached_property
    def coarse_overlap(self) -> int:
        """What does for results of 8 bits."""
        return self._measured_overlap(COARSE_LEVEL)

    def _overlap_for(self, dtype: np.dtype[Any]) -> int:
        return self.coarse_overlap if dtype == np.uint8 else self.overlap

    def _measured_overlap(self, level: float) -> int:
        around = self.around or Geometry()
        size = strip_size(self.channels, self.side, around)
        restore = self._tile_solver(self.problem, around).solve
        strips = photographs(self.problem, self.model.theta, size, restore)
        return measure_overlap(self.problem, self.model.theta, strips, around, level).pixels

    @cached_property
    def large_overlap(self) -> int:
        """What does for any picture."""
        around = self.around or Geometry()
        strips = extremes(self.model.theta, strip_size(self.channels, self.side, around))
        return max(self.overlap, measure_overlap(self.problem, self.model.theta, strips, around).pixels)

    def _tile_solver(self, problem: Variational, around: Geometry | None, *facts: Any) -> TileSolver:
        return TileSolver(self.model, problem, self.side, around, self.tol, *facts)

    def _solver(
        self, sigma: float | None, planes: int, around: Geometry | None, dtype: np.dtype[Any]
    ) -> TileSolver:
        trained = self.model.problem.noise_level
        if planes != self.channels and self.channels != 1 and planes != 1:
            raise BltError(f"the model is for {self.channels} channels, and the picture has {planes}")
        # A gray picture in all channels has the same noise in each: in the direction of gray √C times as much.
        spread = math.sqrt(self.channels) if planes < self.channels else 1.0
        amount = None if sigma is None else sigma * spread
        rescales = self.problem.data_term.rescales
        base = self.problem.regularizer
        if amount is not None and base.offers("at_noise"):
            known = replace(self.problem, regularizer=base.at_noise(amount))
            return self._tile_solver(known, around, dtype, sigma)
        if amount is None or amount == trained or (sigma == trained and not rescales):
            return self._tile_solver(self.problem, around, dtype, sigma)
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
        rescaled = replace(self.problem, regularizer=Rescaled(base, amount / trained))
        return self._tile_solver(rescaled, around, dtype, sigma)

    def _channel_notes(self, planes: int) -> Iterator[str]:
        if planes < self.channels:
            yield "gray picture, colour model: restored in all channels and averaged"
        elif planes > self.channels:
            yield "colour picture, gray model: each channel restored separately"


class _Shares:
    """Reports how much of a picture is done, given how much of each of its tiles is."""

    def __init__(self, progress: Progress | None, tiles: int) -> None:
        self.progress = progress
        self.parts = [0.0] * tiles
        self.lock = threading.Lock()

    def of(self, tile: int) -> Callable[[float], None] | None:
        """What a tile reports to."""
        return None if self.progress is None else partial(self.report, tile)

    def report(self, tile: int, part: float) -> None:
        if self.progress is None:
            return
        count = len(self.parts)
        with self.lock:
            self.parts[tile] = max(self.parts[tile], part)
            phase = _RESTORING if count == 1 else f"tile {tile + 1} of {count}"
            self.progress(sum(self.parts) / count, phase)


def _to_unit(values: NDArray[Any]) -> NDArray[Any]:
    if values.dtype.kind == "u":
        return np.asarray(values, dtype=np.float32) / np.float32(np.iinfo(values.dtype).max)
    return np.array(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)


def _from_unit(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind != "u":
        return values.astype(dtype)
    top = np.iinfo(dtype).max
    return (values.clip(0, 1) * top + 0.5).astype(dtype)
