"""BOME: one step on x and θ together, along the loss and along the value function of the lower level.

    x^T = T gradient steps on h from x,   q(x, θ) = h(x, θ) − h(x^T, θ),   ∇q = (∇_x h(x), ∂_θ h(x) − ∂_θ h(x^T))
    λ = max(0, η − ⟨∇g, ∇q⟩/‖∇q‖²),   λ = 0 if ∇q = 0,   ∇g = (∇_x g, ∂_θ g)
    x ← P_C(x − ξ(∇_x g + λ∇_x h)),   z = ∂_θ g(x, θ) + λ (∂_θ h(x, θ) − ∂_θ h(x^T, θ))

with x^T held fixed in ∇q. λ is the smallest one for which the step decreases q at the rate η‖∇q‖², so that x is drawn
towards the minimiser while the loss decreases as far as that allows. There is one λ for each task; with several tasks
the paper would have one for all, which couples them. θ ← θ − αz is left to the optimizer. The effort it requests for
the lower level is T if it is a number of iterations; the one for the linear system is ignored, as there is none.

At a fixed θ, the iteration on x ends at the minimiser of h + g/λ with λ = η(1 + ‖∇_x g‖²/‖z‖²) if T is large, where z
is that of `f2sa`: its bias vanishes for η → ∞.

When to choose it: first-order derivatives only, and steps as cheap as possible: T gradients and two derivatives in θ.
x lags behind θ, so that a fixed α leaves an error in proportion to it: let it decay. Use it with `isgd`, `iadam` or
`single-loop`; a line search compares values that z does not yet predict. `f2sa` is the better estimate of ∇f.

Reference: Liu, Ye, Wright, Stone & Liu, *BOME! Bilevel optimization made easy: a simple first-order approach*, NeurIPS
2022.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.finite_sum import StepLength, count_of, each, unmeasured
from bltoolbox.plugin import (
    Ask,
    BiasLimit,
    Estimate,
    HypergradientEstimator,
    NumericalError,
    Rows,
    dot,
    expand,
)


class BOME(HypergradientEstimator):
    """A joint step on x and θ that lowers the loss and the value function.

    Args:
        control: η, the rate at which q decreases, relative to ‖∇q‖²; the paper uses 0.5.
        step: ξ, the length of the step on x; `auto` is 1/(L_g + max(λ, η)L).
        lower_steps: number T of gradient steps behind x^T, unless the optimizer requests a number.
        lower_step: the length of these steps; `auto` is 1/L.
    """

    gives_adjoint = False
    exact = False
    moves_x = True
    needs_memory = True
    limit = BiasLimit({"control": (0.5, 3.0, 30.0), "lower_steps": (10, 20, 50)}, calls=(20, 40, 160))

    def __init__(
        self,
        control: Annotated[float, Gt(0)] = 0.5,
        step: StepLength = "auto",
        lower_steps: Annotated[int, Gt(0)] = 10,
        lower_step: StepLength = "auto",
    ) -> None:
        self.control = control
        self.step = step
        self.lower_steps = lower_steps
        self.lower_step = lower_step

    def estimate(self, ask: Ask) -> Estimate:
        lower, upper, x = ask.lower, ask.upper, ask.solution
        steps = count_of(ask.lower_effort, self.lower_steps)
        slope, gradient = upper.gradient(x), lower.gradient(x)
        end = self._descend(ask, gradient, steps)
        here, there = lower.theta_gradient_each(x), lower.theta_gradient_each(end)
        direct = upper.theta_gradient_each(x)
        # The two derivatives nearly cancel where x is near the minimiser.
        change = {name: entry.double() - there[name].double() for name, entry in here.items()}
        multiplier = self._multiplier(slope, gradient, direct, change)
        rows = {name: expand(multiplier, entry) * entry for name, entry in change.items()}
        for name, entry in direct.items():
            rows[name] = rows[name] + entry.double()
        moved = slope + expand(multiplier.to(x), x) * gradient
        step = expand(self._step(ask, multiplier.to(x)), x)
        z = {name: torch.tensordot(ask.weights.double(), entry, dims=1) for name, entry in rows.items()}
        return Estimate(
            {name: entry.to(lower.theta[name]) for name, entry in z.items()},
            unmeasured(lower),
            each(lower, 0),
            x=lower.project(x - step * moved),
            lower_iterations=each(lower, steps + 1),
        )

    def _descend(self, ask: Ask, gradient: Tensor, steps: int) -> Tensor:
        """x^T; the first of its gradients is that at x."""
        lower, x = ask.lower, ask.solution
        length = torch.full_like(lower.mu, self.lower_step) if self.lower_step != "auto" else 1 / _bound(ask)
        for k in range(steps):
            slope = gradient if k == 0 else lower.gradient(x)
            x = lower.project(x - expand(length, x) * slope)
        return x

    def _multiplier(self, slope: Tensor, gradient: Tensor, direct: Rows, change: Rows) -> Tensor:
        """λ of each task, in float64."""
        size, product = (dot(gradient.double(), v.double()) for v in (gradient, slope))
        for name, entry in change.items():
            size = size + entry.reshape(len(entry), -1).square().sum(1)
            if name in direct:
                product = product + (entry * direct[name]).reshape(len(entry), -1).sum(1)
        # At a minimiser ∇q is zero up to rounding, and only the loss counts, which moves x away from it.
        least = (_ROUNDING * torch.finfo(slope.dtype).eps) ** 2 * dot(slope.double(), slope.double())
        curved = size > least
        quotient = product / torch.where(curved, size, 1.0)
        return torch.where(curved, (self.control - quotient).clamp_min(0), 0.0)

    def _step(self, ask: Ask, multiplier: Tensor) -> Tensor:
        if self.step != "auto":
            return torch.full_like(multiplier, self.step)
        lipschitz = ask.upper.lipschitz
        if lipschitz is None:
            raise NumericalError(_UNKNOWN.format("of the loss", "step"))
        steep = multiplier.clamp_min(self.control) * _bound(ask)
        return 1 / (torch.as_tensor(lipschitz).to(multiplier) + steep)


#: ‖∇q‖/‖∇g‖ in units of the precision below which ∇q counts as zero.
_ROUNDING = 1e3
_UNKNOWN = "bome takes steps of length 1/L, but the Lipschitz constant {} is unknown; set hypergradient.{}"


def _bound(ask: Ask) -> Tensor:
    if not ask.lower.bounded:
        raise NumericalError(_UNKNOWN.format("of the lower level", "step and hypergradient.lower_step"))
    return ask.lower.lipschitz
