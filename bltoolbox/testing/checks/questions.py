"""Problems with a known ∇f on which hypergradients are tested: lower level, loss, minimiser and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Ask, Theta
from bltoolbox.testing.checks.base import NotApplicable, Subject
from bltoolbox.testing.checks.partners import Bench, conditioned, quadratic, smooth
from bltoolbox.testing.limits import DRAWS, ask_at
from bltoolbox.testing.problems import SquaredDistance
from bltoolbox.testing.reference import reference_hypergradient, reference_solve
from bltoolbox.testing.regression import regression, regression_gradient

TIGHT = 1e-10
#: How often tasks are visited, in all, to average a stochastic estimate, and the largest number of copies of a task.
VISITS, COPIES = 100_000, 512
#: How much the blocks of a finite sum differ where estimates from single ones are averaged.
SPREAD = 0.1


@dataclass(frozen=True)
class Question:
    """A problem at its minimiser x, with ∇(Σ w_i f_i)."""

    what: str
    lower: Lower
    upper: Upper
    x: Tensor
    weights: Tensor
    gradient: Theta

    def ask(self, tol: float = TIGHT) -> Ask:
        return ask_at(self.lower, self.upper, self.x, self.weights, tol)

    @property
    def expected(self) -> Tensor:
        return flat(self.gradient)


def flat(parts: Theta) -> Tensor:
    """All parameters as one vector in float64."""
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def some_weights(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(0.5, 1.5, count, dtype=dtype)


def closed_form(bench: Bench) -> tuple[Tensor, dict[str, Tensor]]:
    """x̂ and ∇(Σ w_i g_i) by formula."""
    assert bench.formula is not None
    own, count = bench.own_theta, len(bench.y)
    x = bench.formula.solution(own, bench.y)
    mean = bench.formula.value_gradient(own, bench.y, bench.x_true, some_weights(count))
    return x, {f"regularizer.{name}": count * value for name, value in mean.items()}


def on_quadratic(subject: Subject, condition: float | None = None) -> Question:
    """Images and a quadratic energy, of this condition number if one is given."""
    bench = quadratic(subject) if condition is None else conditioned(subject, condition)
    x, gradient = closed_form(bench)
    what = "a quadratic problem" + ("" if condition is None else f" of condition {condition:g}")
    upper = SquaredDistance(bench.x_true)
    return Question(what, bench.lower(), upper, x, some_weights(len(x)), gradient)


def on_smooth(subject: Subject) -> Question:
    """Images and an energy that is not quadratic."""
    bench = smooth(subject, count=2)
    lower, upper, weights = bench.lower(), SquaredDistance(bench.x_true), some_weights(2)
    x = reference_solve(lower, lower.start(), 1e-12)
    gradient = reference_hypergradient(lower, upper, x, weights)
    return Question("a smooth problem that is not quadratic", lower, upper, x, weights, gradient)


def on_regression(subject: Subject, copies: int = 0) -> Question:
    """A regression, where x is a vector; or the mean over copies of one fold."""
    if wanted := [
        kind for kind in ("regularizer", "operator", "data_term") if subject.cls.requires.get(kind)
    ]:
        raise NotApplicable(f"it requires methods of a {wanted[0]}, and a regression has none")
    lower, upper = regression(3, spread=SPREAD if copies else None)
    weights = some_weights(3)
    if copies:
        index = torch.ones(copies, dtype=torch.long)
        lower = lower.take(index).numbered(torch.arange(copies))
        upper, weights = upper.take(index), torch.full((copies,), 1 / copies, dtype=torch.float64)
    gradient = regression_gradient(lower, upper, weights)
    what = "a regression with x a vector" + (", a finite sum of 4 blocks" if copies else "")
    return Question(what, lower, upper, lower.solution(), weights, gradient)


def _on_blocks(subject: Subject) -> Question:
    """As many copies as the calls of its limit leave time for."""
    limit = subject.cls.limit
    calls = 1 if limit is None else sum(limit.calls_at(k) for k in range(len(limit)))
    return on_regression(subject, min(COPIES, VISITS // (DRAWS * calls)))


def questions(subject: Subject, condition: float | None = None) -> Iterator[Question]:
    """Those that suit a component: one block, and many copies of a finite sum, if it is stochastic."""
    if condition is not None:
        yield on_quadratic(subject, condition)
        return
    suitable = 0
    for make in (
        (on_quadratic, _on_blocks) if subject.cls.stochastic else (on_quadratic, on_smooth, on_regression)
    ):
        try:
            question = make(subject)
        except NotApplicable:
            continue
        suitable += 1
        yield question
    if not suitable:
        raise NotApplicable("no problem with a known hypergradient has what it requires")
