"""How wrong a hypergradient can be.

With ε the distance of x̃ to the minimiser, δ the residual norm of the adjoint system and μ the strong convexity,

    τ = ‖q‖ + δ/μ,   κ = (ε/μ)(L_g + L_H τ),   ‖z_i − ∇f_i‖ ≤ ω_i = ‖B‖(δ/μ + κ) + L_B ε(τ + κ)

B = ∂²_{xθ}h(x̃), L_H and L_B the Lipschitz constants of ∇²h and of B in x. Here the constants are *estimated*:
L_H and L_B by the change of ∇²h q and Bᵀq between the start x₀ of the solve and x̃, ‖B‖ by a few power
iterations from q.

Reference: Ehrhardt & Roberts, *Analyzing inexact hypergradients for bilevel learning*, IMA J. Appl. Math. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.problem import LowerLevel, UpperLoss
from bltoolbox.tensors import dot, expand, norm

POWER_ITERATIONS = 3


@dataclass(frozen=True)
class BoundEstimate:
    """ω and the constants it used, per sample; a constant that could not be estimated is NaN."""

    omega: Tensor
    hessian_lipschitz: Tensor
    mixed_lipschitz: Tensor


@torch.no_grad()
def estimate_bound(
    lower: LowerLevel,
    upper: UpperLoss,
    x: Tensor,
    start: Tensor,
    q: Tensor,
    residual: Tensor,
    delta: Tensor,
    known: tuple[Tensor, Tensor],
) -> BoundEstimate:
    """ω of each sample. ``residual`` is ‖∇h(x̃)‖, ``delta`` the adjoint residual; ``known`` holds the last L_H and L_B,
    which are kept where x̃ = x₀ says nothing."""
    hessian = lower.linearize(x)
    product = hessian.hvp(q)
    size = norm(q)
    travelled = norm(x - start) * size
    moved = travelled > 0
    safe = torch.where(moved, travelled, 1.0)
    change = norm(lower.linearize(start).hvp(q) - product)
    hessian_lipschitz = torch.where(moved, change / safe, known[0])
    change = norm(_mixed(lower, start, q) - _mixed(lower, x, q))
    mixed_lipschitz = torch.where(moved, change / safe, known[1])

    mu = torch.where(lower.mu > 0, lower.mu, _rayleigh(q, product))
    epsilon = torch.where(lower.mu > 0, residual / mu, residual)
    mixed_norm = _mixed_norm(lower, x, q)
    tau = size + delta / mu
    kappa = epsilon / mu * (upper.lipschitz + hessian_lipschitz.nan_to_num() * tau)
    omega = mixed_norm * (delta / mu + kappa) + mixed_lipschitz.nan_to_num() * epsilon * (tau + kappa)
    return BoundEstimate(omega, hessian_lipschitz, mixed_lipschitz)


def _mixed_norm(lower: LowerLevel, x: Tensor, q: Tensor) -> Tensor:
    """‖B‖ of each sample by power iteration on B Bᵀ, started at q, the direction that matters most."""
    v = q / expand(norm(q).clamp_min(torch.finfo(q.dtype).tiny), q)
    estimate = torch.zeros_like(lower.mu)
    for _ in range(POWER_ITERATIONS):
        with torch.enable_grad():
            v = v.detach().requires_grad_()
            rows = _mixed(lower, x, v)
            estimate = norm(rows.detach())
            # Bᵀv is linear in v, so the derivative of ½‖Bᵀv‖² is B Bᵀ v.
            (image,) = torch.autograd.grad(0.5 * rows.square().sum(), v)
        v = image / expand(norm(image).clamp_min(torch.finfo(q.dtype).tiny), image)
    return estimate


def _rayleigh(q: Tensor, product: Tensor) -> Tensor:
    """⟨q, Hq⟩/⟨q, q⟩, an over-estimate of μ where none is known."""
    return dot(q, product) / dot(q, q).clamp_min(torch.finfo(q.dtype).tiny)


def _mixed(lower: LowerLevel, x: Tensor, q: Tensor) -> Tensor:
    """Bᵀq, one row a sample, within what a linear constraint leaves free.

    z is projected before its norm is taken; without the same projection here the means of the kernels, which cannot
    move, would dominate ‖B‖.
    """
    parts = lower.mixed_each(x, q)
    project = lower.at.problem.project_gradient
    rows = (project({name: part[i] for name, part in parts.items()}) for i in range(len(x)))
    return torch.stack([torch.cat([part.flatten() for part in row.values()]) for row in rows])
