"""Implicit differentiation with any linear solver: what `cg-ift`, `minres` and `neumann` share.

    ∇²h(x̃) q = ∇g(x̃)   until ‖∇g(x̃) − ∇²h(x̃) q‖ ≤ δ,        z = −∂_θ⟨∇_x h(x̃, θ), q⟩

Sampling weights enter z, never the linear system.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import LinearMethod, solve_linear
from bltoolbox.bilevel.problem import LowerLevel, UpperLoss
from bltoolbox.bilevel.records import Estimate
from bltoolbox.errors import NumericalError


def implicit_estimate(
    method: LinearMethod,
    lower: LowerLevel,
    upper: UpperLoss,
    x: Tensor,
    weights: Tensor,
    tol: Tensor,
    warm: Tensor | None,
    limit: int,
    truncates: bool = False,
) -> Estimate:
    """z by ``method``, from the adjoint ``warm``, with at most ``limit`` iterations for a sample.

    Reaching the limit is an error unless the method ``truncates`` by design.
    """
    rhs = upper.gradient(x)
    start = torch.zeros_like(rhs) if warm is None else warm
    with torch.no_grad():
        q, residual, iterations = solve_linear(method, lower.linearize(x), rhs, start, tol, limit)
    short = (residual > tol) & (iterations >= limit)
    if not truncates and bool(short.any()):
        raise NumericalError(
            f"the adjoint systems of {int(short.sum())} samples reached the limit of {limit} iterations, with a"
            f" residual of up to {float(residual[short].max()):.2g}; raise hypergradient.iteration_limit, loosen the"
            " tolerance, or set strong_convexity if the system is nearly singular"
        )
    gradient = {name: -part for name, part in lower.mixed(x, q, weights).items()}
    return Estimate(gradient, q, residual, iterations)


def certified_lipschitz(lower: LowerLevel, caller: str) -> Tensor:
    """L, one a sample; a sentence when a component knows none."""
    if lower.lipschitz is not None:
        return lower.lipschitz
    prior = lower.regularizer.lipschitz(lower.at.regularizer_theta, lower.shape)
    lacking = type(lower.regularizer if prior is None else lower.operator).__name__
    raise NumericalError(
        f"{caller} takes steps of length 1/L, but {lacking} knows no Lipschitz constant; use cg-ift, which needs none"
    )
