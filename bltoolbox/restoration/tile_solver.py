"""Restores one tile of a picture, or a picture that is not cut, at one noise level.

How accurate a result must be depends on who looks at it: rounding to 8 bits is an error of 1.1e-3 by itself (root mean
square), and what is left of the noise is a fraction of σ. Unless the user asks for a distance to the exact minimiser, a
solve ends at a residual at which photographs of the training set were within 0.01 dB of it: docs/apply.md has the
figures. That is an estimate. Where h is strongly convex, the distance that follows from the residual is certified, and
several times larger.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Rows, Status
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.errors import BltError
from bltoolbox.restoration.evaluation import solve_until
from bltoolbox.restoration.overlap import Geometry
from bltoolbox.restoration.roles import Operator
from bltoolbox.restoration.variational import Variational, VariationalAt

if TYPE_CHECKING:
    from bltoolbox.restoration.model import Model

#: Root mean square residuals at the end, as parts of σ and at most. For 16 bits and floats: a fortieth of a step of 8
#: bits.
_FINE, _FINEST = 1e-3, 1e-4
#: For 8 bits, and at most the error of rounding. Chosen on training crops of 256² (tests/benchmarks/stopping.py).
_COARSE, _ROUNDING = 7.5e-3, 1e-3
#: The same for solvers with another one for quick solves: what is left of its residual is less smooth.
_COARSE_QUICK, _ROUNDING_QUICK = 2e-2, 3e-3
#: Errors of few pixels average out less, and cost little to avoid: of crops of 96², one was 0.045 dB away.
_FEW = 256**2
#: Nothing smaller is asked for by default, since float32 would hardly reach it.
_LEAST = 2e-5

#: The part of a solve that is done.
Report = Callable[[float], None]


def default_residual(dtype: np.dtype[Any], sigma: float | None, pixels: int, quick: bool) -> float:
    """At the end of a solve, for ``pixels`` results of ``dtype`` and noise ``sigma``."""
    if not sigma:
        return _FINEST
    if dtype != np.uint8 or pixels < _FEW:
        return max(_LEAST, min(_FINEST, _FINE * sigma))
    part, most = (_COARSE_QUICK, _ROUNDING_QUICK) if quick else (_COARSE, _ROUNDING)
    return max(_LEAST, min(most, part * sigma))


class TileSolver:
    """One noise level: a tile in [0, 1] to a restored one. Counts what happens.

    Args:
        model: θ, the solver and the iteration limit.
        problem: the lower level at this noise level.
        side: the smallest side that its components accept.
        around: how large x is, given y.
        tol: root mean square distance to the exact minimiser; by default a residual is chosen for 8 bits or more.
        dtype: of the results.
        sigma: the noise level.
    """

    def __init__(
        self,
        model: Model,
        problem: Variational,
        side: int,
        around: Geometry | None,
        tol: float | None = None,
        dtype: np.dtype[Any] | None = None,
        sigma: float | None = None,
    ) -> None:
        self.model = model
        self.problem = problem
        self.side = side
        self.around = around
        self.tol = tol
        self.dtype = np.dtype(np.float32) if dtype is None else dtype
        self.sigma = sigma
        self.at: dict[tuple[int, ...], VariationalAt] = {}
        self.iterations = 0
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget what went wrong before; it counts as work all the same."""
        self.unfinished = 0
        self.status: Status | None = None
        #: The certified root mean square distance to the minimiser, the largest of all tiles; NaN where there is none.
        self.distance = 0.0

    def __call__(
        self, tile: NDArray[Any], operator: Operator | None = None, report: Report | None = None
    ) -> NDArray[Any]:
        """``operator`` is that of the tile, where it is another one than that of the picture."""
        height, width, planes = tile.shape
        channels, around = self.model.channels, self.around
        # What differs from place to place cannot be mirrored along.
        fixed = around is None or around.positional
        tile, (top, left) = _padded(tile, 1 if fixed else self.side)
        reference = next(iter(self.model.theta.values()))
        y = torch.from_numpy(tile).permute(2, 0, 1).to(reference)
        # Samples and channels: the channels of one image, each an image of its own, or the same in all of them.
        y = y.unsqueeze(1) if channels == 1 else y.expand(channels, -1, -1).unsqueeze(0)
        if sentence := self.problem.data_term.check_measurements(y):
            raise BltError(sentence)
        x = self.solve(y, operator, report)
        x = x[:, 0] if channels == 1 else x[0]
        x = x.mean(0, keepdim=True) if planes < channels else x
        if around is not None:
            scale, (rows, columns) = around.scale, around.margin
            top, left = scale * top + rows // 2, scale * left + columns // 2
            x = x[:, top : top + scale * height, left : left + scale * width]
        return np.ascontiguousarray(x.permute(1, 2, 0).cpu().numpy())

    def solve(self, y: Tensor, operator: Operator | None = None, report: Report | None = None) -> Tensor:
        """The minimisers for measurements B×C×H×W."""
        model = self.model
        problem = self.problem if operator is None else replace(self.problem, operator=operator)
        try:
            shape = problem.image_shape(model.theta, y)
            if (sentence := model.check_size(shape)) is not None:
                raise BltError(sentence)
            at = problem.at(model.theta, shape)
            if operator is None:
                at = self.at.setdefault(shape, at)
            lower = at.on(y)
            unit = math.sqrt(math.prod(shape))
            solver = model.solver.quick()
            if self.tol is None:
                quick = solver is not model.solver
                each = default_residual(self.dtype, self.sigma, math.prod(shape[-2:]), quick)
                residual = torch.full_like(lower.mu_on_host, unit * each)
            else:
                residual = lower.gradient_tol(unit * self.tol)
            watched = _Watched(solver, float(residual.min()), report, trusted=self.tol is None)
            solution = solve_until(watched, lower, residual, model.recipe.iteration_limit)
        except ValueError as error:
            raise BltError(str(error)) from error
        late = [status for status in solution.status if status is not Status.CONVERGED]
        with self.lock:  # several tiles may be solved at once
            self.iterations += int(solution.iterations.sum())
            self.unfinished += bool(late)
            self.status = late[0] if late else self.status
            # NaN is the maximum of anything and NaN.
            self.distance = float(np.maximum(self.distance, np.max(solution.distance.numpy()) / unit))
        return lower.view(solution.x)

    def notes(self, tiles: int) -> Iterator[str]:
        if self.status is not None:
            of = f" in {self.unfinished} of {tiles} tiles" if tiles > 1 else ""
            yield f"less accurate than requested{of}: {self.status.value}"


class _Watched(LowerSolver):
    """A solver that reports how far its residual has come on the way to the goal, on a logarithmic scale.

    If it is ``trusted``, the loop does not compute a residual again: rounding does not matter to an estimate.
    """

    def __init__(self, base: LowerSolver, goal: float, report: Report | None, trusted: bool) -> None:
        self.base = base
        self.exact_residual = base.exact_residual or trusted  # type: ignore[misc]
        self.goal = max(goal, 1e-300)
        self.report = report
        self.way = 0.0
        self.steps = 0

    def persists(self, lower: Lower) -> Rows:
        return self.base.persists(lower)

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> Any:
        return self.base.init(lower, x0, kept)

    def step(self, lower: Lower, state: Any) -> Any:
        # A device is not made to wait in every iteration.
        if self.report is not None and (lower.mu.device.type == "cpu" or self.steps % 8 == 0):
            left = float(state.residual.max()) / self.goal
            left = math.log(left) if 1 < left < math.inf else 0.0
            self.way = max(self.way, left)
            self.report(1 - left / self.way if self.way else 0.0)
        self.steps += 1
        return self.base.step(lower, state)

    def outcome(self, state: Any) -> Any:
        return self.base.outcome(state)


def _padded(tile: NDArray[Any], side: int) -> tuple[NDArray[Any], tuple[int, int]]:
    """The tile mirrored at its borders until it has the smallest side, and where it lies in that."""
    missing = [max(0, side - length) for length in tile.shape[:2]]
    if not any(missing):
        return tile, (0, 0)
    before = [count // 2 for count in missing]
    widths = [(first, count - first) for first, count in zip(before, missing, strict=True)]
    return np.pad(tile, [*widths, (0, 0)], mode="symmetric"), (before[0], before[1])
