"""Hypergradient by the derivative of the primal–dual iteration, for regularizers that need not be differentiable.

    P⁺ = Dprox_{σF*}(p + σKx)[P + σKX̄],        X⁺ = Dprox_{τG}(x − τKᵀp)[X − τ(KᵀP + ∇g(x))]

at a saddle point (x, p) of ⟨Kx, p⟩ + G(x) − F*(p): the iteration of `pdhg` itself, differentiated, with ∇g as its
source and the same steps. Its limit satisfies D²G X + KᵀP = −∇g and KX = D²F* P wherever these derivatives exist, and

    z = ∂_θ[⟨K_θX, p⟩ + ⟨K_θx, P⟩ + ⟨P + σKX, prox_{σF*_θ}(p + σKx)⟩/σ − ⟨Y, prox_{τG_θ}(x − τKᵀp)⟩/τ] + ∂_θg

with Y = X − τ(KᵀP + ∇g) and all but θ held fixed, in one backward pass. (Where neither F* nor G depends on θ, the first
two terms are all.) Derivatives of proximal maps are symmetric, so they come from autograd.

Each call first brings (x̃, p) to a saddle point, by `pdhg` from the p of the last call, to a residual of at most the
tolerance; x̃ alone determines no p. p, X and P are kept for each sample. The reported residual is that of the two
equations above, √(‖ΔX‖²/τ² + Σ_k ‖ΔP_k‖²/(σ_kτ)) of the last iteration, in units of ∇g.

It is right where x̂ is differentiable in θ: no component of Kx̂ is zero with its p̂ on the border of its ball (pixels
that are about to join or leave a flat region). That is so for almost all data; near such points z is one of the
derivatives on the two sides. Where F is smooth, z is the hypergradient of `cg-ift`. There is no error bound.

When to choose it: `tv-nonsmooth`, `foe-nonsmooth`. For smooth regularizers `cg-ift` needs a fraction of the iterations.

References: Bogensperger, Chambolle & Pock, *Convergence of a piggyback-style method for the differentiation of
solutions of standard saddle-point problems*, SIAM J. Math. Data Sci. 2022; Chambolle & Pock, *Learning consistent
discretizations of the total variation*, SIAM J. Imaging Sci. 2021.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from blt_builtins.hypergradients.primal_dual_adjoint import adjoint_gradient, advance_adjoint, begin_adjoint
from blt_builtins.lower_solvers.pdhg import PDHG
from blt_builtins.lower_solvers.primal_dual import examples, iterate, two
from bltoolbox.plugin import (
    Accuracy,
    Ask,
    Estimate,
    HypergradientEstimator,
    Lower,
    NumericalError,
    Rows,
    Upper,
)


class Piggyback(HypergradientEstimator):
    """The derivative of the primal–dual iteration.

    Args:
        iteration_limit: maximum number of iterations per sample, of the adjoint and of the saddle point each.
    """

    requires: ClassVar = PDHG.requires
    gives_adjoint = False
    handles_nonsmooth = True

    def __init__(self, iteration_limit: Annotated[int, Gt(0)] = 5000) -> None:
        self.iteration_limit = iteration_limit

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        x = lower.mu.new_empty((0, *lower.shape))
        return {"X": x, **examples(lower, "P"), **examples(lower, "dual")}

    def estimate(self, ask: Ask) -> Estimate:
        limit = ask.limit(self.iteration_limit)
        with torch.no_grad():
            solver = PDHG()
            state = solver.init(ask.lower, ask.solution, ask.memory)
            state, counts = iterate(solver.step, ask.lower, state, ask.tol, limit)
            adjoint, more = iterate(advance_adjoint, ask.lower, begin_adjoint(ask, state), ask.tol, limit)
        late = torch.maximum(state.residual, adjoint.residual) > ask.tol
        if isinstance(ask.effort, Accuracy) and bool(late.any()):
            worst = float(torch.maximum(state.residual, adjoint.residual)[late].max())
            raise NumericalError(
                f"piggyback reached the limit of {limit} iterations for {int(late.sum())} samples, with a residual of"
                f" up to {worst:.2g}; raise hypergradient.iteration_limit or loosen the tolerance"
            )
        gradient = adjoint_gradient(ask.lower, adjoint, ask.weights)
        for name, entry in ask.upper.theta_gradient(state.x, ask.weights).items():
            gradient[name] = gradient[name] + entry
        blocks = two("P", adjoint.blocks("P")) | two("dual", state.blocks("dual"))
        memory = {"X": adjoint.X} | {name: entry for name, entry in blocks.items() if entry is not None}
        return Estimate(gradient, adjoint.residual, counts + more, memory=memory)
