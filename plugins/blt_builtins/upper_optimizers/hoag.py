"""HOAG: gradient descent on increasingly accurate hypergradients, with a step adapted to the observed decrease.

    ε_k = ε_0 q^k  (geometric),   ε_0/(k+1)²  (quadratic)   or   ε_0/(k+1)³  (cubic),        δ_k likewise
    θ⁺ = Π(θ_k − α z_k),   accepted if

    F⁺ ≤ F_k + (E_k + E⁺) + s ε_k‖θ⁺ − θ_k‖ − ½‖θ⁺ − θ_k‖²/α

Here F_k = g(x̃_k), F⁺ = g(x̃⁺) at ε_{k+1}, and E = ‖∇g(x̃)‖ε + (L_g/2)ε² with the accuracies achieved (estimated where
no strong convexity is known): E is the error that an inexact value can hide, and s ε_k‖θ⁺ − θ_k‖ the error that an
inexact z can hide, where s is the `loss_scale`. After an accepted step the next one is longer; a rejected step is
retried shorter. The ε_k are summable, and so are the increases that may go unnoticed. (`maid` reverses the inequality:
it accepts only steps that are certain to decrease f, and chooses ε itself.) The paper uses constants instead of E,
which the oracle knows.

Once the lower level has reached the floor of the dtype, the sequence stops shrinking.

When to choose it: few parameters, all data at each step (sampler `full`), and a hypergradient without error bounds
(`unrolled`, `one-step`). With error bounds, use `maid`, which needs no sequence of accuracies.

Reference: Pedregosa, *Hyperparameter optimization with approximate gradient*, ICML 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Gt
from torch import Tensor

from blt_builtins.upper_optimizers.ends import TOO_SHORT, ZERO, is_lost
from blt_builtins.upper_optimizers.schedule import Fraction, descend, power_decay, step_metrics
from bltoolbox.plugin import (
    Accuracy,
    HypergradientResult,
    Oracle,
    Status,
    Step,
    Theta,
    UpperOptimizer,
    Value,
    theta_norm,
)

_POWERS = {"quadratic": 2.0, "cubic": 3.0}


class HOAG(UpperOptimizer):
    """Descent on approximate hypergradients with summable errors and an adaptive step.

    Args:
        step: α_0, the first step length tried.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as
            `tol`.
        decay: how the accuracies tighten from step to step.
        ratio: q of the geometric decay.
        grow: factor by which the step grows after it is accepted.
        shrink: factor by which a rejected step is shortened.
        trials: step lengths tried before θ is left unchanged until the accuracies are tighter.
    """

    full_batch = True
    handles_floor = True

    def __init__(
        self,
        step: Annotated[float, Gt(0)] = 1e-2,
        tol: Annotated[float, Gt(0)] = 0.1,
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
        decay: Literal["geometric", "quadratic", "cubic"] = "geometric",
        ratio: Fraction = 0.9,
        grow: Annotated[float, Gt(1)] = 1.05,
        shrink: Fraction = 0.5,
        trials: Annotated[int, Gt(0)] = 10,
    ) -> None:
        self.step_size = step
        self.tol = tol
        self.adjoint_tol = tol if adjoint_tol is None else adjoint_tol
        self.decay = decay
        self.ratio = ratio
        self.grow = grow
        self.shrink = shrink
        self.trials = trials

    def init(self, theta: Theta) -> dict[str, Any]:
        return {"k": 0, "alpha": self.step_size}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        k, alpha = state["k"], state["alpha"]
        tol, adjoint_tol = self._accuracy(self.tol, k), self._accuracy(self.adjoint_tol, k)
        result = oracle.hypergradient(theta, Accuracy(tol), Accuracy(adjoint_tol))
        metrics = step_metrics(alpha, tol, adjoint_tol, result.gradient)
        if reason := _exhausted(theta, result, alpha):
            return Step(
                dict(theta),
                dict(state),
                result.value.value,
                metrics,
                finished=reason,
                penalty=result.value.penalty,
            )
        before = result.value if result.value.certified else oracle.value(theta, Accuracy(tol), bound=True)
        # Below the floor of the dtype, a tighter tolerance is expensive and gains nothing.
        k = k if _at_floor(result) else k + 1
        next_tol = self._accuracy(self.tol, k)
        for trial in range(self.trials):
            moved = descend(oracle, theta, result.gradient, alpha)
            value = oracle.value(moved, Accuracy(next_tol), bound=True)
            if _decreased(theta, moved, before, value, tol * result.loss_scale, alpha):
                oracle.accept(value)
                metrics |= {"step_size": alpha, "trials": trial + 1}
                after = {"k": k, "alpha": self.grow * alpha}
                return Step(moved, after, value.value, metrics, penalty=value.penalty)
            alpha *= self.shrink
        metrics |= {"step_size": 0.0, "trials": self.trials}
        after = {"k": k, "alpha": alpha}
        return Step(dict(theta), after, result.value.value, metrics, penalty=result.value.penalty)

    def _accuracy(self, first: float, k: int) -> float:
        if self.decay == "geometric":
            return float(first * self.ratio**k)
        return power_decay(first, _POWERS[self.decay], k)


def _decreased(
    theta: Theta, moved: Mapping[str, Tensor], before: Value, after: Value, error: float, alpha: float
) -> bool:
    """Whether the decrease suffices, up to what the tolerances can hide; ``error`` is that of z."""
    distance = theta_norm(moved[name] - value for name, value in theta.items())
    # If h is not convex, the errors of values are unknown: then the decrease itself must be observed.
    allowances = [value.upper - value.value for value in (before, after) if math.isfinite(value.upper)]
    hidden = sum(allowances) + error * distance
    return after.value <= before.value + hidden - 0.5 * distance**2 / alpha


def _at_floor(result: HypergradientResult) -> bool:
    """Whether the lower level could not reach its tolerance; the bias of an estimator does not count."""
    return Status.STALLED.name.lower() in result.value.short


def _exhausted(theta: Theta, result: HypergradientResult, alpha: float) -> str | None:
    """Why no further step can help, or None."""
    length = theta_norm(result.gradient.values())
    if length == 0 and _at_floor(result):
        return ZERO
    return TOO_SHORT if length > 0 and is_lost(theta, alpha * length) else None
