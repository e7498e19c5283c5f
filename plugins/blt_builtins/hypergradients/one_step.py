"""Hypergradient by the derivative of one gradient step only.

    x⁺ = P_C(x̃ − ∇h(x̃, θ)/L)  with x̃ held fixed,        z = ∂_θ g(x⁺) = −(1/L) ∂_θ⟨∇h(x̃, θ), D ∇g(x⁺)⟩

D the pixels that P_C did not clip. No linear system: in place of q = (∇²h)⁻¹∇g it uses ∇g/L, the first term of its
Neumann series. So z is biased, by B(∇²h)⁻¹(I − ∇²h/L)∇g at a minimiser (B = ∂²_{θx}h):

    ‖z − ∇f_i‖ ≤ (1 − μ/L) ‖B‖ ‖∇g‖/μ

relative to what it estimates about 1 − μ/L: small only when h is well conditioned, close to 1 (and z then too short by
L/μ in the flat directions) when it is not. No tolerance makes it smaller. The residual reported, ‖(I − ∇²h/L)∇g‖, shows
it; its Hessian product and the step count as an iteration each.

When to choose it: many cheap steps with a well-conditioned lower level, with an optimizer that forgives a wrong length
(`iadam`). `neumann` with a few terms interpolates between it and `cg-ift`.

Reference: Bolte, Pauwels & Vaiter, *One-step differentiation of iterative algorithms*, NeurIPS 2023.
"""

from __future__ import annotations

import torch

from blt_builtins.hypergradients.implicit import certified_lipschitz
from blt_builtins.hypergradients.unrolled import unroll
from bltoolbox.plugin import Ask, Estimate, HypergradientEstimator


class OneStep(HypergradientEstimator):
    """The derivative of one gradient step: cheap and biased."""

    gives_adjoint = False
    exact = False

    def estimate(self, ask: Ask) -> Estimate:
        # A tolerance of zero: one step is never too many.
        with torch.no_grad():
            return unroll(ask, torch.zeros_like(ask.tol), certified_lipschitz(ask.lower, "one-step"), steps=1)
