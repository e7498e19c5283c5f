"""Hypergradient by the derivative of a single gradient step.

    x⁺ = P_C(x̃ − ∇h(x̃, θ)/L)  with x̃ held fixed,        z = ∂_θ g(x⁺) = −(1/L) ∂_θ⟨∇h(x̃, θ), D ∇g(x⁺)⟩

where D selects the pixels that P_C did not clip. No linear system is solved: instead of q = (∇²h)⁻¹∇g it uses ∇g/L, the
first term of the Neumann series. So z is biased, by B(∇²h)⁻¹(I − ∇²h/L)∇g at a minimiser (B = ∂²_{θx}h):

    ‖z − ∇f_i‖ ≤ (1 − μ/L) ‖B‖ ‖∇g‖/μ

The relative bias is about 1 − μ/L: small only if h is well conditioned, and otherwise close to 1, with z too short by a
factor of L/μ in the flat directions. No tolerance makes it smaller. The reported residual, ‖(I − ∇²h/L)∇g‖, shows it;
its Hessian product and the step count as one iteration each.

When to choose it: many cheap steps with a well-conditioned lower level, with an optimizer that tolerates a wrong length
(`iadam`). `neumann` with a few terms interpolates between it and `cg-ift`.

Reference: Bolte, Pauwels & Vaiter, *One-step differentiation of iterative algorithms*, NeurIPS 2023.
"""

from __future__ import annotations

import torch

from blt_builtins.hypergradients.implicit import certified_lipschitz
from blt_builtins.hypergradients.unrolled import unroll
from bltoolbox.plugin import Ask, BiasLimit, Estimate, HypergradientEstimator


class OneStep(HypergradientEstimator):
    """The derivative of one gradient step: cheap and biased."""

    gives_adjoint = False
    exact = False
    limit = BiasLimit(condition=(2.0, 1.2, 1.0))

    def estimate(self, ask: Ask) -> Estimate:
        # With a tolerance of zero, the step is always taken.
        with torch.no_grad():
            return unroll(ask, torch.zeros_like(ask.tol), certified_lipschitz(ask.lower, "one-step"), steps=1)
