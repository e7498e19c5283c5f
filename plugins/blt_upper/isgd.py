"""Inexact stochastic gradient descent, the method of the paper.

    θ_{k+1} = θ_k − α_k z_{v_k}(θ_k),        α_k = α_0 (k+1)^{−a},   ε_k = ε_0 (k+1)^{−b},   δ_k = δ_0 (k+1)^{−b}

z_v is the hypergradient of the sampled objective, the lower level solved to ‖x̃ − x̂‖ ≤ ε_k and the adjoint
system to a residual δ_k. a = 0 is the paper's fixed step, a = ½ its decreasing one; b > ½ makes Σ ε_k² finite
and drives the bias to zero.

When to choose it: large data sets; ahead of full-batch methods from the first epoch on.

Reference: Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning with inexact stochastic gradients*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt

from blt_upper.schedule import descend, power_decay, step_metrics
from bltoolbox.interfaces import Oracle, Theta, UpperOptimizer
from bltoolbox.results import Step


class ISGD(UpperOptimizer):
    """Inexact stochastic gradient descent.

    Args:
        step: α_0.
        step_decay: exponent a of the step; 0 is a fixed step, 0.5 the paper's decreasing one.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser.
        tol_decay: exponent b of the accuracies.
        adjoint_tol: δ_0, residual norm of the adjoint system; the same number as `tol` unless given.
    """

    def __init__(
        self,
        step: Annotated[float, Gt(0)] = 1e-2,
        step_decay: Annotated[float, Ge(0)] = 0.0,
        tol: Annotated[float, Gt(0)] = 0.1,
        tol_decay: Annotated[float, Ge(0)] = 0.0,
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        self.step_size = step
        self.step_decay = step_decay
        self.tol = tol
        self.tol_decay = tol_decay
        self.adjoint_tol = tol if adjoint_tol is None else adjoint_tol

    def init(self, theta: Theta) -> dict[str, Any]:
        return {"k": 0}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        k = state["k"]
        alpha = power_decay(self.step_size, self.step_decay, k)
        tol = power_decay(self.tol, self.tol_decay, k)
        adjoint_tol = power_decay(self.adjoint_tol, self.tol_decay, k)
        result = oracle.hypergradient(theta, tol, adjoint_tol)
        moved = descend(oracle, theta, result.gradient, alpha)
        metrics = step_metrics(alpha, tol, adjoint_tol, result.gradient)
        return Step(moved, {"k": k + 1}, result.value.value, metrics)
