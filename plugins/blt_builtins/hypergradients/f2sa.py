"""F2SA: the hypergradient of a penalty on the value function, from gradients alone.

    x ≈ argmin h,   x_λ ≈ argmin h + g/λ,        z = ∂_θ g(x_λ, θ) + λ (∂_θ h(x_λ, θ) − ∂_θ h(x, θ))

z is the gradient of min_x [g + λ(h − min h)], and differs from ∇f by O(1/λ). It is also a difference quotient:
x_λ moves by −(∇²h)⁻¹∇g/λ, so that z tends to ∂_θ g − ∂_θ⟨∇_x h, q⟩ with ∇²h q = ∇g, and neither a Hessian nor a mixed
derivative is needed. With ``difference: central`` it is

    x_± ≈ argmin h ± g/λ,        z = ∂_θ g(x, θ) + (λ/2)(∂_θ h(x_+, θ) − ∂_θ h(x_−, θ))

whose error is O(1/λ²), for one more solve; λμ must exceed L_g, or h − g/λ is not convex. In call k, λ = sλ_0 (k+1)^c
with s the scale of the loss.

All solves use the lower-level solver of the recipe. An error of ε in x enters z multiplied by λ, so all of them,
including that of x, are continued to ε = δ/(2λ), with δ the tolerance of the linear system that z replaces;
λ(‖∇h(x)‖ + ‖∇h(x_λ) + ∇g(x_λ)/λ‖) is reported as its residual. If a number of iterations is requested, that many are
taken from the last x_λ, as in the paper. The x_λ are kept for each sample.

When to choose it: where Hessian products or mixed derivatives are expensive or not available. Otherwise `cg-ift` gives
more for the same cost. In float32, λ beyond about 1000 loses the difference in rounding.

References: Kwon, Kwon, Wright & Nowak, *A fully first-order method for stochastic bilevel optimization*, ICML 2023;
Chen, Ma & Zhang, *Near-optimal nonconvex-strongly-convex bilevel optimization with fully first-order oracles*, 2023.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from bltoolbox.plugin import (
    Accuracy,
    Ask,
    BiasLimit,
    Effort,
    Estimate,
    HypergradientEstimator,
    Lower,
    NumericalError,
    Rows,
    Solution,
    Upper,
)


class F2SA(HypergradientEstimator):
    """A difference of ∂_θ h between minimisers of h and of h + g/λ.

    Args:
        penalty: λ_0, in units of h over g; the bias is about L_g/(λμ), its square for central differences.
        growth: exponent c of λ from call to call; 0 for a fixed λ.
        difference: `forward` is the method of the paper; `central` is more accurate by one order, and costs
            half as much again.
    """

    gives_adjoint = False
    exact = False
    limit = BiasLimit({"penalty": (10.0, 100.0, 1000.0)}, order=1)

    def __init__(
        self,
        penalty: Annotated[float, Gt(0)] = 10.0,
        growth: Annotated[float, Ge(0)] = 1 / 3,
        difference: Literal["forward", "central"] = "forward",
    ) -> None:
        self.penalty = penalty
        self.growth = growth
        self.difference = difference
        self.central = difference == "central"

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        x = torch.empty((0, *lower.shape), dtype=lower.mu.dtype, device=lower.mu.device)
        return {"above": x, "below": x} if self.central else {"above": x}

    def estimate(self, ask: Ask) -> Estimate:
        penalty = self.penalty * (ask.call + 1) ** self.growth * ask.upper.scale
        effort = ask.effort
        if isinstance(effort, Accuracy):
            effort = Accuracy(effort.tol / (2 * penalty))
        above = _minimise(ask, 1 / penalty, "above", effort)
        if self.central:
            below, factor = _minimise(ask, -1 / penalty, "below", effort), penalty / 2
            x = at = ask.solution
        else:
            below, factor = _untilted(ask, effort), penalty
            x, at = below.x, above.x
        # The two derivatives nearly cancel, so that their difference is multiplied and added to in float64.
        z = {name: factor * entry.double() for name, entry in _difference(ask, above.x, below.x).items()}
        for name, entry in ask.upper.theta_gradient(at, ask.weights).items():
            z[name] = z[name] + entry.double()
        memory = {"above": above.x} | ({"below": below.x} if self.central else {})
        return Estimate(
            {name: entry.to(ask.lower.theta[name]) for name, entry in z.items()},
            factor * (above.residual + below.residual),
            torch.zeros_like(above.iterations),
            memory=memory,
            x=x,
        )


def _minimise(ask: Ask, weight: float, name: str, effort: Effort) -> Solution:
    """The minimiser of h + weight·g, from that of the last call; from x for new tasks, whose rows are zero."""
    assert ask.minimise is not None
    tilted = ask.lower.tilted(ask.upper, weight)
    if bool(((ask.lower.mu > 0) & (tilted.mu <= 0)).any()):
        raise NumericalError(
            "f2sa with central differences needs an h − g/λ that is convex, λμ > L_g; raise hypergradient.penalty or"
            " use difference: forward"
        )
    last = ask.memory.get(name)
    if last is None:
        return ask.minimise(tilted, ask.solution, effort)
    new = (last == 0).flatten(1).all(1).view(-1, *(1,) * (last.ndim - 1))
    return ask.minimise(tilted, torch.where(new, ask.solution, last), effort)


def _untilted(ask: Ask, effort: Effort) -> Solution:
    """x as it is after a number of iterations, or continued to an accuracy."""
    assert ask.minimise is not None
    if isinstance(effort, Accuracy):
        return ask.minimise(ask.lower, ask.solution, effort)
    zero = torch.zeros(len(ask.solution), dtype=torch.long, device=ask.solution.device)
    return Solution(ask.solution, ask.lower.residual(ask.solution), ask.lower.mu, zero, ())


def _difference(ask: Ask, above: Tensor, below: Tensor) -> dict[str, Tensor]:
    first, second = (ask.lower.theta_gradient(x, ask.weights) for x in (above, below))
    return {name: entry.double() - second[name].double() for name, entry in first.items()}
