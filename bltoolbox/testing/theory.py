"""Both sides of the convergence theorem of inexact stochastic gradient descent, from measured runs.

From runs of θ ← θ − αz with ‖∇f(θ_t)‖², f(θ_t), V(θ_t) and ‖z − ∇f_v‖² at every step, all against exact gradients:

* L is the larger of ‖∇f(θ_{t+1}) − ∇f(θ_t)‖/‖d‖ and 2(f(θ_{t+1}) − f(θ_t) − ⟨∇f(θ_t), d⟩)/‖d‖², d = θ_{t+1} − θ_t,
  over all steps of all runs: with the second, the descent lemma holds at each of them, which is where the proof uses L;
* f_inf is the smallest f of all runs;
* A and C are the pair with the smallest bound among those that hold at all points;
* E‖e‖² and E‖∇f‖² are means over runs with other draws.

These are measured where the runs went, not proved for all θ, so the bound is *estimated*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bltoolbox.testing.convergence_bound import (
    ExpectedSmoothness,
    Terms,
    order_of,
    sampling_factor,
    tightest,
)


@dataclass(frozen=True)
class Setting:
    """One curve: the step in units of 1/(4L), the batch size, and ε_t = accuracy·(t + 1)^(−decay), relative to the
    scales of the problem."""

    step: float
    batch: int
    accuracy: float
    decay: float = 0.0

    def at(self, t: int) -> float:
        return self.accuracy * (t + 1) ** -self.decay


@dataclass(frozen=True)
class Trajectory:
    """One run: ‖∇f‖², f and V before every step, ‖e‖² of every step, and the smallest L that fits its steps."""

    squares: tuple[float, ...]
    values: tuple[float, ...]
    variances: tuple[float, ...]
    errors: tuple[float, ...]
    lipschitz: float


@dataclass(frozen=True)
class Curve:
    """Both sides of the theorem for one setting."""

    setting: Setting
    #: α.
    step: float
    runs: int
    #: min_{t<T} E‖∇f(θ_t)‖² and its bound, for T = 1, 2, …
    left: tuple[float, ...]
    right: tuple[float, ...]
    #: The part of the bound that comes from inexact solutions, for the same T.
    floor: tuple[float, ...]
    #: The bound at the last T, term by term.
    terms: Terms
    #: E‖e‖², its largest value over the steps.
    error: float
    slope: float
    offset: float
    #: Whether α ≤ 1/(4LB), without which the theorem says nothing.
    applies: bool

    @property
    def holds(self) -> bool:
        return all(left <= right for left, right in zip(self.left, self.right, strict=True))

    @property
    def looseness(self) -> float:
        """Bound over measurement at the last T."""
        return self.right[-1] / self.left[-1]


@dataclass(frozen=True)
class Theory:
    """All settings on one recipe."""

    recipe: str
    tasks: int
    steps: int
    lipschitz: float
    gap: float
    curves: tuple[Curve, ...]

    @property
    def error_order(self) -> float | None:
        """p in E‖e‖² ∝ ε^p, over the fixed accuracies with full batches."""
        fixed = [c for c in self.curves if c.setting.batch == self.tasks and not c.setting.decay]
        return order_of([c.setting.accuracy for c in fixed], [c.error for c in fixed])

    @property
    def holds(self) -> bool:
        return all(curve.holds for curve in self.curves if curve.applies)

    def to_json(self) -> dict[str, Any]:
        curves = [
            dataclasses.asdict(curve)
            | {"holds": curve.holds, "looseness": curve.looseness, "constants": _constants(curve)}
            for curve in self.curves
        ]
        return dataclasses.asdict(self) | {
            "curves": curves,
            "error_order": self.error_order,
            "holds": self.holds,
        }


def _constants(curve: Curve) -> dict[str, float]:
    """c₂ to c₅."""
    return {
        "c2": 4.0,
        "c3": 2 * curve.slope,
        "c4": 4 * (curve.offset + curve.error),
        "c5": 2 * curve.error,
    }


def default_settings(tasks: int) -> tuple[Setting, ...]:
    """Three steps, three batch sizes, and with full batches three accuracies and a square-summable schedule."""
    some = max(1, tasks // 4)
    steps = [Setting(step, some, 0.03) for step in (1.0, 0.25, 1 / 16)]
    batches = [Setting(1.0, 1, 0.03)] if some > 1 else []
    accuracies = [Setting(1.0, tasks, accuracy) for accuracy in (0.1, 0.03, 0.01)]
    return (*steps, *batches, *accuracies, Setting(1.0, tasks, 0.1, decay=1.0))


def evaluate(
    name: str, tasks: int, steps: int, results: Sequence[tuple[Setting, float, list[Trajectory]]]
) -> Theory:
    runs = [run for _, _, runs in results for run in runs]
    lipschitz = max(run.lipschitz for run in runs)
    least = min(min(run.values) for run in runs)
    gap = runs[0].values[0] - least
    points = [(value - least, v) for run in runs for value, v in zip(run.values, run.variances, strict=False)]
    curves = [
        _curve(setting, step, trajectories, points, lipschitz, gap, sampling_factor(tasks, setting.batch))
        for setting, step, trajectories in results
    ]
    return Theory(name, tasks, steps, lipschitz, gap, tuple(curves))


def _curve(
    setting: Setting,
    step: float,
    runs: Sequence[Trajectory],
    points: Sequence[tuple[float, float]],
    lipschitz: float,
    gap: float,
    factor: float,
) -> Curve:
    squares, errors = _mean([run.squares for run in runs]), _mean([run.errors for run in runs])
    constants: ExpectedSmoothness = tightest(points, factor, lipschitz, step, gap, len(squares))
    largest = max(errors)
    terms = [
        constants.scheduled(step, gap, errors[:count])
        if setting.decay
        else constants.fixed(step, gap, largest, count)
        for count in range(1, len(errors) + 1)
    ]
    left = tuple(min(squares[:count]) for count in range(1, len(squares) + 1))
    return Curve(
        setting=setting,
        step=step,
        runs=len(runs),
        left=left,
        right=tuple(term.total for term in terms),
        floor=tuple(term.error for term in terms),
        terms=terms[-1],
        error=largest,
        slope=constants.slope,
        offset=constants.offset,
        applies=step <= constants.longest_step(),
    )


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
