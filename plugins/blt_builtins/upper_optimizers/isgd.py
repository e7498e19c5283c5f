"""Inexact stochastic gradient descent, the method of the paper.

    θ_{k+1} = θ_k − α_k z_{v_k}(θ_k),        α_k = α_0 (k+1)^{−a},   ε_k = ε_0 (k+1)^{−b},   δ_k = δ_0 (k+1)^{−b}

z_v is the hypergradient of the sampled objective, with the lower level solved to ‖x̃ − x̂‖ ≤ ε_k and the adjoint
system to a residual δ_k. a = 0 is the paper's fixed step, a = ½ its decreasing one; b > ½ makes Σ ε_k² finite
and drives the bias to zero.

When to choose it: large data sets, where it is ahead of full-batch methods from the first epoch.

Reference: Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning with inexact stochastic gradients*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from blt_builtins.upper_optimizers.lengths import safe_first_step
from blt_builtins.upper_optimizers.schedule import Auto, descend, power_decay, sampled_gradient, step_metrics
from bltoolbox.plugin import Oracle, Step, Theta, UpperOptimizer


class ISGD(UpperOptimizer):
    """Inexact stochastic gradient descent.

    Args:
        step: α_0; `auto` finds it by a line search on the first batch.
        step_decay: exponent a of the step; 0 is a fixed step, 0.5 the paper's decreasing one.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser; `auto` is 2 % of the
            distance that the lower level moves at θ_0.
        tol_decay: exponent b of the accuracies.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as `tol`,
            or 2 % of the right-hand side at θ_0 if `tol` is `auto`.
    """

    def __init__(
        self,
        step: Annotated[float, Gt(0)] | Auto = 1e-2,
        step_decay: Annotated[float, Ge(0)] = 0.0,
        tol: Annotated[float, Gt(0)] | Auto = 0.1,
        tol_decay: Annotated[float, Ge(0)] = 0.0,
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        self.step_size = step
        self.step_decay = step_decay
        self.tol = tol
        self.tol_decay = tol_decay
        self.adjoint_tol = adjoint_tol

    def init(self, theta: Theta) -> dict[str, Any]:
        return {"k": 0, "shrunk": 1.0}

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        return dict(state) | {"shrunk": state["shrunk"] * factor}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        sampled = sampled_gradient(oracle, theta, state, self.tol, self.adjoint_tol, self.tol_decay)
        result, after, k = sampled.result, sampled.state, state["k"]
        if "step" not in after:
            after["step"] = safe_first_step(self.step_size, theta, oracle, result, sampled.tol)
        alpha = after["shrunk"] * power_decay(after["step"], self.step_decay, k)
        moved = descend(oracle, theta, result.gradient, alpha)
        metrics = step_metrics(alpha, sampled.tol, sampled.adjoint_tol, result.gradient)
        after |= {"k": k + 1}
        return Step(moved, after, result.value.value, metrics, penalty=result.value.penalty)
