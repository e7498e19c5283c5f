"""Inexact Adam: the hypergradient and accuracies of ISGD, with a separate step scale for each parameter.

    m ← β₁m + (1−β₁)z,   v ← β₂v + (1−β₂)z²,        θ⁺ = Π(θ − α_k m̂/(√v̂ + ϵ)),   m̂ = m/(1−β₁ᵗ),  v̂ = v/(1−β₂ᵗ)
    α_k = α_0 max(1, (k+1)/K)^{−a},   ε_k = ε_0 (k+1)^{−b},   δ_k = δ_0 (k+1)^{−b}

z = z_{v_k}(θ_k) is the hypergradient of the sampled objective, with the lower level solved to ‖x̃ − x̂‖ ≤ ε_k and the
adjoint system to a residual δ_k; t counts the non-zero z. Kernels, log-weights and smoothing have gradients of very
different sizes, which the division balances.

If all of z is zero, as for an empty batch, θ does not move, since it would drift on momentum through uninformative
draws, and m, v and t do not change, since they would shrink later z. Only the schedules advance.

When to choose it: regularizers with parameters of different kinds (`foe`), mini-batches, and little time to tune the
step. Unlike ISGD, it has no convergence theory for inexact z; `step_decay: 0.5` reduces oscillations at the end. With
many parameters (`adaptive`), keep the step for most of the run and then let it fall fast: `step_hold: 1000` and
`step_decay: 2` leave a quarter after 2000 steps.

References: Kingma & Ba, *Adam: a method for stochastic optimization*, ICLR 2015; Salehi, Mukherjee, Roberts &
Ehrhardt, *Bilevel learning with inexact stochastic gradients*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from blt_builtins.upper_optimizers.schedule import Auto, descend, power_decay, sampled_gradient, step_metrics
from bltoolbox.plugin import Oracle, Step, Theta, UpperOptimizer

Momentum = Annotated[float, Ge(0), Lt(1)]


class IAdam(UpperOptimizer):
    """Inexact Adam.

    Args:
        step: α_0; about the distance that a parameter moves in one step.
        step_decay: exponent a of the step; 0 is a fixed step.
        step_hold: K, the number of steps before the step decays.
        beta1: β₁, the decay of the mean of z.
        beta2: β₂, the decay of the mean of its square.
        epsilon: ϵ, the size below which a gradient counts as zero, times `loss_scale`.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser; `auto` is 2 % of the
            distance that the lower level moves at θ_0.
        tol_decay: exponent b of the accuracies.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as `tol`,
            or 2 % of the right-hand side at θ_0 if `tol` is `auto`.
    """

    def __init__(
        self,
        step: Annotated[float, Gt(0)] = 1e-2,
        step_decay: Annotated[float, Ge(0)] = 0.0,
        step_hold: Annotated[int, Ge(1)] = 1,
        beta1: Momentum = 0.9,
        beta2: Momentum = 0.999,
        epsilon: Annotated[float, Gt(0)] = 1e-8,
        tol: Annotated[float, Gt(0)] | Auto = 0.1,
        tol_decay: Annotated[float, Ge(0)] = 0.0,
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        self.step_size = step
        self.step_decay = step_decay
        self.step_hold = step_hold
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self.tol = tol
        self.tol_decay = tol_decay
        self.adjoint_tol = adjoint_tol

    def init(self, theta: Theta) -> dict[str, Any]:
        zeros = {f"{moment}/{name}": torch.zeros_like(v) for moment in "mv" for name, v in theta.items()}
        return {"k": 0, "t": 0, "shrunk": 1.0} | zeros

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        return dict(state) | {"shrunk": state["shrunk"] * factor}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        sampled = sampled_gradient(oracle, theta, state, self.tol, self.adjoint_tol, self.tol_decay)
        result, value, k = sampled.result, sampled.result.value, state["k"]
        alpha = state["shrunk"] * power_decay(self.step_size, self.step_decay, k, self.step_hold)
        metrics = step_metrics(alpha, sampled.tol, sampled.adjoint_tol, result.gradient)
        after = sampled.state | {"k": k + 1}
        if metrics["gradient_norm"] == 0:
            return Step(dict(theta), after, value.value, metrics, penalty=value.penalty)
        after |= self._moments(result.gradient, state)
        direction = self._direction(theta, after, self.epsilon * result.loss_scale)
        moved = descend(oracle, theta, direction, alpha)
        return Step(moved, after, value.value, metrics, penalty=value.penalty)

    def _moments(self, z: Theta, state: Mapping[str, Any]) -> dict[str, Any]:
        after: dict[str, Any] = {"t": state["t"] + 1}
        for name, entry in z.items():
            after[f"m/{name}"] = torch.lerp(entry, state[f"m/{name}"], self.beta1)
            after[f"v/{name}"] = torch.lerp(entry.square(), state[f"v/{name}"], self.beta2)
        return after

    def _direction(self, theta: Theta, state: Mapping[str, Any], epsilon: float) -> dict[str, Tensor]:
        first, second = 1 - self.beta1 ** state["t"], 1 - self.beta2 ** state["t"]
        return {
            name: state[f"m/{name}"] / first / ((state[f"v/{name}"] / second).sqrt() + epsilon)
            for name in theta
        }
