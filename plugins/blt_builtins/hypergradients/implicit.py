"""Implicit differentiation with any linear solver: what `cg-ift`, `minres` and `neumann` share.

    ∇²h(x̃) q = ∇g(x̃)   until ‖∇g(x̃) − ∇²h(x̃) q‖ ≤ δ,        z = −∂_θ⟨∇_x h(x̃, θ), q⟩

Sampling weights enter z, not the linear system.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.plugin import (
    Accuracy,
    Ask,
    Estimate,
    HypergradientEstimator,
    LinearMethod,
    Lower,
    NumericalError,
    Rows,
    Upper,
    solve_linear,
)


class ImplicitEstimator(HypergradientEstimator):
    """Keeps the adjoint q of each task as the start of its next linear system."""

    simultaneous = True

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        return {"adjoint": torch.empty((0, *lower.shape), dtype=lower.mu.dtype, device=lower.mu.device)}


def implicit_estimate(method: LinearMethod, ask: Ask, most: int, truncates: bool = False) -> Estimate:
    """z by ``method``, with at most ``most`` iterations per sample.

    Reaching this limit is an error if a tolerance was requested, unless the method ``truncates`` by design. Where
    iterates are updated together, z is formed from the q of the previous call, and the new q is only kept.
    """
    lower, x, tol = ask.lower, ask.solution, ask.tol_on_host
    rhs = ask.upper.gradient(x)
    start, limit = ask.memory.get("adjoint"), ask.limit(most)
    start = torch.zeros_like(rhs) if start is None else start
    with torch.no_grad():
        q, residual, iterations = solve_linear(method, lower.linearize(x), rhs, start, tol, limit)
    short = (residual > tol) & (iterations >= limit)
    if isinstance(ask.effort, Accuracy) and not truncates and bool(short.any()):
        raise NumericalError(
            f"the adjoint systems of {int(short.sum())} samples reached the limit of {limit} iterations, with a"
            f" residual of up to {float(residual[short].max()):.2g}; raise hypergradient.iteration_limit, loosen the"
            " tolerance, or set strong_convexity if the system is nearly singular"
        )
    used = start if ask.together else q
    return Estimate(implicit_gradient(ask, used), residual, iterations, adjoint=used, memory={"adjoint": q})


def implicit_gradient(ask: Ask, q: Tensor) -> dict[str, Tensor]:
    """z = ∂_θ g − ∂_θ⟨∇_x h(x̃, θ), q⟩, weighted."""
    x = ask.solution
    gradient = ask.lower.mixed(x, -q, ask.weights)
    for name, entry in ask.upper.theta_gradient(x, ask.weights).items():
        gradient[name] = gradient[name] + entry
    return gradient


def certified_lipschitz(lower: Lower, caller: str) -> Tensor:
    """L, one per sample; an error if it is unknown."""
    if lower.bounded:
        return lower.lipschitz
    raise NumericalError(
        f"{caller} takes steps of length 1/L, but the Lipschitz constant L of this problem is unknown;"
        " use cg-ift, which needs none"
    )
