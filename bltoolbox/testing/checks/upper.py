"""Properties of upper-level optimizers, on an oracle whose f is quadratic and whose answers have errors
within the tolerance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Accuracy, Effort, HypergradientResult, Scales, Step, Theta, Value
from bltoolbox.bilevel.roles import UpperOptimizer
from bltoolbox.errors import BudgetExhausted
from bltoolbox.testing.checks.base import Subject, Untouched, fail, holds, normal, require, require_like, same
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.sampler import reload

KIND = "upper_optimizer"
STEPS = 60
#: Errors of the oracle relative to the requested tolerances.
ERROR = 0.01


@dataclass
class QuadraticOracle:
    """f(θ) = ½ Σ c (θ − θ*)², c between 1 and 2; z and its bound have the errors that the tolerances allow."""

    target: dict[str, Tensor]
    inexact: bool = True
    #: Calls before the budget is spent.
    budget: float = math.inf
    low: float = -math.inf
    calls: int = 0
    asked: list[float] = field(default_factory=list)
    #: The part of f that is reported as its penalty.
    share: float | None = None
    #: The penalties reported, by the value that they are a part of.
    penalties: dict[float, float | None] = field(default_factory=dict)

    def exact(self, theta: Theta) -> float:
        parts = [_curvature(t) * (theta[name].double() - t).square() for name, t in self.target.items()]
        return 0.5 * float(sum(summand.sum() for summand in parts))

    def _spend(self, theta: Theta, *tolerances: float) -> None:
        self.calls += 1
        self.asked += tolerances
        for tol in tolerances:
            good = isinstance(tol, float | int) and 0 < tol < math.inf
            require(
                good, f"it asked the oracle for the tolerance {tol!r}; a tolerance must be a positive number"
            )
        require(
            set(theta) == set(self.target),
            f"it called the oracle with θ of the names {sorted(theta)} instead of {sorted(self.target)}",
        )
        if self.calls > self.budget:
            raise BudgetExhausted("the budget is spent")

    def value(
        self,
        theta: Theta,
        effort: Effort,
        *,
        bound: bool = False,
        towards: Value | None = None,
        fraction: float = 1.0,
    ) -> Value:
        tol = _tolerance(effort)
        self._spend(theta, tol)
        value, slack = self.exact(theta), ERROR * tol**2 if self.inexact else 0.0
        penalty = None if self.share is None else self.share * value
        self.penalties[value] = penalty
        return Value(value, max(value - slack, 0.0), value + slack, True, tol, 1.0, penalty=penalty)

    def hypergradient(
        self, theta: Theta, effort: Effort, adjoint: Effort, *, bound: bool = False, together: bool = False
    ) -> HypergradientResult:
        tol, adjoint_tol = _tolerance(effort), _tolerance(adjoint)
        self._spend(theta, tol, adjoint_tol)
        self.calls -= 1
        error = ERROR * (tol + adjoint_tol) if self.inexact else 0.0
        count = sum(value.numel() for value in self.target.values())
        z = {
            name: (_curvature(t) * (theta[name].double() - t) + error / math.sqrt(count)).to(theta[name])
            for name, t in self.target.items()
        }
        kind = "certified" if bound else None
        floor = max(tol, adjoint_tol) < 1e-12
        return HypergradientResult(
            z, self.value(theta, effort), adjoint_tol, 1.0, error if bound else None, kind, floor
        )

    def scales(self, theta: Theta) -> Scales:
        self._spend(theta)
        return Scales(1.0, 1.0)

    def accept(self, value: Value) -> None:
        require(isinstance(value, Value), "accept must be called with the Value of a trial")

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return {name: value.clamp_min(self.low) for name, value in theta.items()}


def _tolerance(effort: Effort) -> float:
    """The tolerance of an effort; of a number of steps, each halves the error."""
    return effort.tol if isinstance(effort, Accuracy) else 0.5**effort.count


def _curvature(target: Tensor) -> Tensor:
    return torch.linspace(1, 2, target.numel(), dtype=torch.float64).view(target.shape)


def _problem(
    dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> tuple[dict[str, Tensor], QuadraticOracle]:
    kernels, weight = normal(2, 3, seed=1 + 10 * seed), normal(1, seed=2 + 10 * seed)
    target = {"regularizer.kernels": kernels, "regularizer.log_weight": weight}
    theta = {
        name: (value + 1.0 + 0.1 * normal(*value.shape, seed=3)).to(dtype) for name, value in target.items()
    }
    return theta, QuadraticOracle(target, **options)


def _run(optimizer: UpperOptimizer, theta: Theta, oracle: QuadraticOracle, steps: int) -> tuple[Theta, Any]:
    state: Mapping[str, Any] = optimizer.init(theta)
    for _ in range(steps):
        step = optimizer.step(theta, oracle, state)
        theta, state = step.theta, step.state
        if step.finished:
            break
    return theta, state


@holds(KIND, "descends on a quadratic")
def descends(subject: Subject) -> None:
    theta, oracle = _problem()
    before = oracle.exact(theta)
    after = oracle.exact(_run(subject(), theta, oracle, STEPS)[0])
    require(
        after < before,
        f"after {STEPS} steps from f = {before:.4g} on a quadratic with curvatures 1 … 2, f is {after:.4g};"
        " check its sign and whether the default step is too long",
    )


@holds(KIND, "a step returns θ, a loss and metrics")
def record(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        theta, oracle = _problem(dtype)
        optimizer = subject()
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        require(isinstance(step, Step), f"step must return a Step, not a {type(step).__name__}")
        require(
            set(step.theta) == set(theta),
            f"the new θ has the names {sorted(step.theta)}, not {sorted(theta)}",
        )
        for name, value in theta.items():
            require_like(step.theta[name], value, f"θ[{name!r}] after a step in {str(dtype)[6:]}")
        loss = isinstance(step.loss, float) and math.isfinite(step.loss)
        require(loss, f"the loss of a step must be a finite float, got {step.loss!r}")
        for name, entry in step.metrics.items():
            plain = isinstance(entry, float | int | str)
            require(
                plain, f"metric {name!r} must be a number or text, not a {type(entry).__name__}; use float(…)"
            )


@holds(KIND, "reports the penalty of its loss")
def penalty(subject: Subject) -> None:
    for share in (None, 0.1):
        theta, oracle = _problem(share=share)
        optimizer = subject()
        state: Mapping[str, Any] = optimizer.init(theta)
        current: Theta = theta
        for _ in range(4):
            step = optimizer.step(current, oracle, state)
            expected = oracle.penalties.get(step.loss)
            require(
                step.loss not in oracle.penalties or step.penalty == expected,
                f"the loss {step.loss:.6g} of a step contains the penalty {expected}, but Step.penalty is"
                f" {step.penalty}; pass penalty=value.penalty of the value that is the loss",
            )
            current, state = step.theta, step.state


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    ends = []
    for _ in range(2):
        theta, oracle = _problem()
        ends.append(dict(_run(subject(), theta, oracle, 8)[0]))
    require(same(*ends), "two runs from the same θ with the same oracle ended at different θ")


@holds(KIND, "θ and state are left untouched")
def untouched(subject: Subject) -> None:
    theta, oracle = _problem()
    optimizer = subject()
    guard = Untouched(theta=theta)
    state: Mapping[str, Any] = optimizer.init(theta)
    guard.verify("init")
    current: Theta = theta
    for _ in range(4):
        guard = Untouched(theta=current, state=state)
        step = optimizer.step(current, oracle, state)
        guard.verify("step")
        current, state = step.theta, step.state


@holds(KIND, "the state survives saving, and steps continue as before")
def restorable(subject: Subject) -> None:
    theta, oracle = _problem()
    moved, state = _run(subject(), theta, oracle, 4)
    restored = reload(dict(state))
    first, second = (subject().step(moved, _problem()[1], start) for start in (state, restored))
    require(
        same(dict(first.theta), dict(second.theta)),
        "a step from a state that was saved and loaded differs from the original step; whatever evolves must be in the"
        " state, not in self",
    )


@stateless(KIND)
def use(subject: Subject, optimizer: UpperOptimizer, problem: int) -> Iterator[tuple[str, Any]]:
    theta: Theta
    theta, oracle = _problem(seed=problem)
    state: Mapping[str, Any] = optimizer.init(theta)
    for k in range(5):
        step = optimizer.step(theta, oracle, state)
        theta, state = step.theta, step.state
        yield f"θ after {k + 1} steps", dict(theta)
        yield f"the loss of step {k + 1}", step.loss


@holds(KIND, "lets BudgetExhausted propagate")
def budget(subject: Subject) -> None:
    for calls in (0, 1):
        theta, oracle = _problem(budget=calls)
        optimizer = subject()
        state = optimizer.init(theta)
        current: Theta = theta
        try:
            for _ in range(3):
                step = optimizer.step(current, oracle, state)
                current, state = step.theta, step.state
        except BudgetExhausted:
            continue
        except Exception as error:
            fail(
                f"when the oracle raised BudgetExhausted, step raised {type(error).__name__};"
                " let the exception propagate"
            )
        if oracle.calls > calls:
            fail(
                "when the oracle raised BudgetExhausted, step continued; let the exception propagate,"
                " and the core then ends the run"
            )


@holds(KIND, "θ stays admissible")
def admissible(subject: Subject) -> None:
    theta, oracle = _problem(low=0.9)
    theta = oracle.project(theta)
    moved, _ = _run(subject(), theta, oracle, 20)
    lowest = min(float(value.min()) for value in moved.values())
    require(
        lowest >= 0.9,
        f"with θ ≥ 0.9 as the admissible set, θ fell to {lowest:.4g}; pass the new θ through oracle.project",
    )


@holds(KIND, "a zero hypergradient leaves θ in place")
def stationary(subject: Subject) -> None:
    _, oracle = _problem(inexact=False)
    theta = {name: value.clone() for name, value in oracle.target.items()}
    moved, _ = _run(subject(), theta, oracle, 3)
    for name, value in moved.items():
        where = f"where the hypergradient is zero, θ[{name!r}]"
        require(bool(torch.isfinite(value).all()), f"{where} became NaN or infinite")
        distance = float((value - theta[name]).abs().max())
        require(distance <= 1e-6, f"{where} moved by {distance:.3g}")
