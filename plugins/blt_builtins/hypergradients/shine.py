"""SHINE: the inverse Hessian that the lower-level solver has built, reused for the adjoint.

    q = W ∇g(x̃),        z = ∂_θ g − ∂_θ⟨∇_x h(x̃, θ), q⟩

W is the quasi-Newton approximation of (∇²h)⁻¹ from the solve for x̃; W∇g takes a few inner products. With
``refinement``, q is the start of as many iterations of conjugate gradients on ∇²h q = ∇g, which end early at the
tolerance; the error then vanishes as their number grows. The residual ‖∇g − ∇²h q‖ is measured at the cost of one
Hessian product, so that error bounds and logs are those of `cg-ift`.

W captures the curvature only along the steps that the solver took; its error does not vanish with the
tolerance of the lower level. From warm starts a solve takes few steps and W remains close to a multiple of the
identity.

When to choose it: with `lbfgs`, cold starts or tight tolerances, and Hessian products that are expensive; a refinement
of 3 to 10 repairs most of its bias. Otherwise `cg-ift`, whose own warm start is better than W∇g.

Reference: Ramzi, Mannel, Bai, Starck, Ciuciu & Moreau, *SHINE: sharing the inverse estimate from the forward pass for
bi-level optimization and implicit models*, ICLR 2022.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from blt_builtins.hypergradients.implicit import implicit_gradient
from bltoolbox.plugin import (
    Ask,
    BiasLimit,
    BltError,
    ConjugateGradients,
    Estimate,
    HypergradientEstimator,
    norm,
    solve_linear,
)


class SHINE(HypergradientEstimator):
    """The solver's own inverse Hessian, optionally refined by conjugate gradients.

    Args:
        refinement: maximum number of CG iterations per sample, unless the optimizer requests a number; 0 for none.
    """

    requires: ClassVar = {"lower_solver": ("inverse",)}
    exact = False
    limit = BiasLimit({"refinement": (2, 8, 32)})

    def __init__(self, refinement: Annotated[int, Ge(0)] = 0) -> None:
        self.refinement = refinement

    def estimate(self, ask: Ask) -> Estimate:
        if ask.inverse is None:
            raise BltError("shine needs the inverse Hessian of a lower-level solver; use lower_solver lbfgs")
        rhs, system = ask.upper.gradient(ask.solution), ask.lower.linearize(ask.solution)
        limit = ask.limit(self.refinement)
        q = ask.inverse(rhs)
        if system.free is not None:
            # On entries held by a constraint the system is the identity, which W does not know.
            q = torch.where(system.free, q, rhs)
        if limit:
            method = ConjugateGradients("shine")
            with torch.no_grad():
                q, residual, iterations = solve_linear(method, system, rhs, q, ask.tol, limit)
        else:
            residual = norm(rhs - system.hvp(q))
            iterations = torch.zeros(len(rhs), dtype=torch.long, device=rhs.device)
        return Estimate(implicit_gradient(ask, q), residual, iterations, adjoint=q)
