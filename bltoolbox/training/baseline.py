"""A reference to beat: a regularizer with one or two parameters, tuned on the training data.

Only the regularizer is tuned. Where operator or data term have parameters, too, these stay what one would choose
without learning (``Parametric.standard_params``), so the comparison also shows what learning them is worth.

Derivative-free on purpose: coordinate-wise golden-section search uses nothing of the method it is compared with. The
search can be stopped at any iteration, and then keeps the best parameters it has tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, BudgetExhausted, NumericalError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import evaluate
from bltoolbox.restoration.theta import join, split
from bltoolbox.restoration.variational import Variational
from bltoolbox.runs.metric import Metric

#: Training images to tune on, half-width of the first search interval (in the parameter, usually a logarithm),
#: and its final width.
_IMAGES, _RADIUS, _WIDTH = 16, 2.0, 0.05
#: How often the interval may move to where the metric is better, since a data term may ask for another magnitude,
#: and the relative gain for which it does.
_MOVES, _WORTHWHILE = 4, 0.005
_SWEEPS = 2
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Tuned:
    """The best θ of ``trials`` and their cost; ``complete`` unless the search was stopped."""

    theta: dict[str, Tensor]
    trials: int
    iterations: int
    complete: bool


def tune(
    problem: Variational,
    theta: Theta,
    samples: Samples,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int,
    limit: int,
    metric: Metric,
    ranks: Ranks = ALONE,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """θ with the best mean of ``metric`` on the first training images, as far as the search got before ``stop``."""
    best = {name: value.clone() for name, value in theta.items()}
    tuned = join(regularizer=split(theta, "regularizer"))
    if sum(value.numel() for value in tuned.values()) > 2:
        raise BltError("a baseline must be a regularizer with at most two parameters, such as tv")
    options: dict[str, Any] = {"tol": tol, "chunk": chunk, "limit": limit, "ranks": ranks}
    search = _Search(problem, samples, _Stoppable(solver, stop), metric, options)
    radius = _RADIUS
    try:
        for _ in range(_SWEEPS):
            for name in tuned:
                loss = partial(search.loss, best, name)
                value = search_around(loss, float(best[name]), radius)
                best[name] = best[name].new_full(best[name].shape, value)
            radius /= 4
    except BudgetExhausted:
        return Tuned(search.best or best, search.trials, search.iterations, complete=False)
    return Tuned(best, search.trials, search.iterations, complete=True)


class _Search:
    """Try parameters and keep the best."""

    def __init__(
        self,
        problem: Variational,
        samples: Samples,
        solver: _Stoppable,
        metric: Metric,
        options: dict[str, Any],
    ) -> None:
        self.problem, self.samples, self.solver = problem, samples, solver
        self.sign = -1.0 if metric.higher else 1.0
        self.options = options | {"metrics": (metric.name,)}
        self.trials = self.iterations = 0
        self.least = math.inf
        self.best: dict[str, Tensor] | None = None

    def loss(self, theta: Theta, name: str, value: float) -> float:
        """The mean of the metric with one parameter of θ changed, negated if more is better; infinite if it fails."""
        self.solver.check()
        trial = dict(theta) | {name: theta[name].new_full(theta[name].shape, value)}
        positions = range(min(_IMAGES, len(self.samples)))
        try:
            restored = evaluate(
                self.problem, trial, self.samples, self.solver, positions=positions, **self.options
            )
        except NumericalError:
            return math.inf
        self.trials += 1
        self.iterations += restored.iterations
        mean = restored.mean()
        if mean is None:
            raise BltError("a baseline cannot be tuned without true images")
        loss = self.sign * mean
        if loss < self.least:
            self.least, self.best = loss, trial
        return loss


class _Stoppable(LowerSolver):
    """A solver that stops in the iteration in which ``stop`` becomes true."""

    def __init__(self, solver: LowerSolver, stop: Callable[[], bool]) -> None:
        self.solver, self.stop = solver, stop
        self.exact_residual = solver.exact_residual  # type: ignore[misc]

    def check(self) -> None:
        if self.stop():
            raise BudgetExhausted("the budget is spent")

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> Any:
        return self.solver.init(lower, x0, kept)

    def step(self, lower: Lower, state: Any) -> Any:
        self.check()
        return self.solver.step(lower, state)


def search_around(function: Callable[[float], float], centre: float, radius: float) -> float:
    """The minimiser of a unimodal function near ``centre``, which first moves to where the function is less."""
    least = function(centre)
    for side in (radius, -radius):
        for _ in range(_MOVES):
            value = function(centre + side)
            if not value < least - _WORTHWHILE * abs(least):
                break
            centre, least = centre + side, value
    return golden_section(function, centre - radius, centre + radius, _WIDTH)


def golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """The minimiser of a unimodal function on [low, high], to within ``width``."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return left if at_left <= at_right else right
