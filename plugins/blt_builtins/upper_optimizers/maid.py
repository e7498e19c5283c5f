"""MAID, the method of adaptive inexact descent, which chooses the accuracy and length of each step.

    1. compute z with an error bound ω at accuracies (ε, δ); while ω > (1−η)‖z‖ tighten (ε, δ) by ρ_a
    2. for α = α_k, ρα_k, ρ²α_k, … (N trials): θ⁺ = Π(θ − αz); accept if  F⁺ − F⁻ ≤ −η² ‖θ⁺ − θ‖²/α
    3. if none is accepted: tighten (ε, δ), N ← N + 1, go to 1; otherwise: lengthen α, loosen (ε, δ), reset N

F⁺ = g(x̃⁺) + ‖∇g(x̃⁺)‖ε⁺ + (L_g/2)ε⁺² lies above f(θ⁺) and F⁻ = g(x̃) − ‖∇g(x̃)‖ε below f(θ), with the
accuracies ε actually achieved. If the strong convexity μ is known, an accepted step is certain to decrease the true f.
Otherwise, as in deblurring, ε = ‖∇h‖/μ̂ with the Ritz value μ̂ that ω also uses, and the step is logged as `estimated`.

When to choose it: no step size to tune and a guaranteed decrease, at the cost of using all data at each step (sampler
`full`).

Reference: Salehi, Mukherjee, Roberts & Ehrhardt, *An adaptively inexact first-order method for bilevel optimization
with application to hyperparameter learning*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Gt
from torch import Tensor

from blt_builtins.upper_optimizers.schedule import (
    TOO_SHORT,
    ZERO,
    Auto,
    Fraction,
    accuracies,
    descend,
    first_step,
    is_lost,
    step_metrics,
)
from bltoolbox.plugin import (
    Accuracy,
    HypergradientResult,
    Oracle,
    Step,
    Theta,
    UpperOptimizer,
    Value,
    theta_norm,
)


class MAID(UpperOptimizer):
    """Adaptive inexact descent with a line search that accounts for errors.

    Args:
        step: α_0, the first step length tried; `auto` predicts a decrease by a quarter of the loss, or moves θ by 5 %.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser; `auto` is 2 % of the
            distance that the lower level moves at θ_0.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as `tol`,
            or 2 % of the right-hand side at θ_0 if `tol` is `auto`.
        eta: η; the relative error of z may be 1 − η, and a step must gain η² of the decrease that z predicts.
        shrink: ρ, the factor by which the line search shortens the step.
        grow: factor by which the step grows after it is accepted.
        tighten: factor by which the accuracies are tightened if they do not suffice.
        loosen: factor by which they are loosened after an accepted step.
        trials: N, the number of step lengths tried before the accuracies are tightened.
    """

    full_batch = True
    needs_bound = True
    handles_floor = True

    def __init__(
        self,
        step: Annotated[float, Gt(0)] | Auto = "auto",
        tol: Annotated[float, Gt(0)] | Auto = "auto",
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
        eta: Fraction = 0.5,
        shrink: Fraction = 0.5,
        grow: Annotated[float, Gt(1)] = 10 / 9,
        tighten: Fraction = 0.5,
        loosen: Annotated[float, Gt(1)] = 1.25,
        trials: Annotated[int, Gt(0)] = 5,
    ) -> None:
        self.step_size = step
        self.tol = tol
        self.adjoint_tol = adjoint_tol
        self.eta = eta
        self.shrink = shrink
        self.grow = grow
        self.tighten = tighten
        self.loosen = loosen
        self.trials = trials

    def init(self, theta: Theta) -> dict[str, Any]:
        return {}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        state, trials, gradients = dict(state), self.trials, 0
        if "tol" not in state:
            state["tol"], state["adjoint_tol"] = accuracies(oracle, theta, self.tol, self.adjoint_tol)
        tol, adjoint_tol = state["tol"], state["adjoint_tol"]
        while True:
            result = oracle.hypergradient(theta, Accuracy(tol), Accuracy(adjoint_tol), bound=True)
            gradients += 1
            if "alpha" not in state:
                state["alpha"] = first_step(self.step_size, theta, result)
            length = theta_norm(result.gradient.values())
            accurate = result.bound is not None and result.bound <= (1 - self.eta) * length
            if accurate:
                found = self._line_search(theta, oracle, state["alpha"], trials, result, tol)
                if found is not None:
                    break
                trials += 1
            if reason := _exhausted(theta, result, length, accurate, state["alpha"] * self.shrink**trials):
                value = result.value
                return Step(dict(theta), state, value.value, finished=reason, penalty=value.penalty)
            tol, adjoint_tol = self.tighten * tol, self.tighten * adjoint_tol
        moved, value, alpha, tried = found
        oracle.accept(value)
        certified = result.value.certified and value.certified
        metrics = step_metrics(alpha, tol, adjoint_tol, result.gradient) | {
            "bound": result.bound or 0.0,
            "attempts": gradients,
            "trials": tried,
            "decrease": result.value.lower - value.upper,
            "decrease_kind": "certified" if certified else "estimated",
            "certified": int(certified),
        }
        after = {
            "alpha": self.grow * alpha,
            "tol": self.loosen * tol,
            "adjoint_tol": self.loosen * adjoint_tol,
        }
        return Step(moved, after, value.value, metrics, penalty=value.penalty)

    def _line_search(
        self, theta: Theta, oracle: Oracle, alpha: float, trials: int, result: HypergradientResult, tol: float
    ) -> tuple[dict[str, Tensor], Value, float, int] | None:
        for trial in range(trials):
            moved = descend(oracle, theta, result.gradient, alpha)
            distance = theta_norm(moved[name] - value for name, value in theta.items())
            value = oracle.value(moved, Accuracy(tol), bound=True)
            if value.upper - result.value.lower <= -(self.eta**2) * distance**2 / alpha:
                return moved, value, alpha, trial + 1
            alpha *= self.shrink
        return None


def _exhausted(
    theta: Theta, result: HypergradientResult, length: float, accurate: bool, alpha: float
) -> str | None:
    """Why tightening the accuracies cannot help any more, or None."""
    if length == 0 and not result.bound:
        return ZERO
    if result.at_floor:
        return "converged-to-precision: the accuracy this step needs is below the floor of the dtype"
    return TOO_SHORT if accurate and is_lost(theta, alpha * length) else None
