"""Primal–dual hybrid gradient for regularizers that need not be differentiable.

    h(x) = max_p ⟨Kx, p⟩ + G(x) − F*(p)

    x⁺ = prox_{τG}(x − τKᵀp),        θ = 1/√(1 + 2γτ),  τ⁺ = θτ,  σ_k = 1/(n τ⁺‖K_k‖²)
    x̄  = x⁺ + θ(x⁺ − x),             p_k⁺ = prox_{σ_k F_k*}(p_k + σ_k K_k x̄),   blocks k = 0, …, n − 1

Only proximal maps are needed: F is the potential of the regularizer on Kx = Cx, and G the data term where A is the
identity (elsewhere the data term is a second block with K = A), together with the constraint. An iteration costs one K
and one Kᵀ, as much as a gradient. Each block has its own σ, since the norms of filters and operator may differ by
orders of magnitude.

γ is half the strong convexity of G, and the error falls like 1/k (for total variation, half of it was faster than all
of it or a tenth). Steps shrink only while the dual changes more than the primal variable, in common units. Where G is
not known to be strongly convex they are balanced instead: longer or shorter by a factor that tends to 1, according to
which of the two changes more. They start at τ = 1/s, s the mean curvature of the data term at the start.

The residual is √(2μ·gap), a certified bound of μ‖x − x̂‖, with the duality gap of ``bltoolbox.bilevel.saddle``. Where
neither the data term nor `strong_convexity` makes h strongly convex, as in most deblurring problems, it bounds nothing:
there it is √(‖r‖² + 2sc), r = Kᵀp + ∇G(x) and c = F(Kx) + F*(p) − ⟨Kx, p⟩, which vanishes only at a solution.

The dual p is kept from one solve to the next: a start from x alone saves nothing, one from both saves most iterations.

When to choose it: for `tv-nonsmooth` and `foe-nonsmooth`, with hypergradient `piggyback`. For smooth regularizers `mm`
and `lbfgs` reach tight tolerances in far fewer iterations.

References: Chambolle & Pock, *A first-order primal-dual algorithm for convex problems with applications to imaging*,
JMIV 2011, algorithms 1 and 2; Goldstein, Li, Yuan, Esser & Baraniuk, *Adaptive primal-dual splitting methods*, 2013.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from blt_builtins.lower_solvers.primal_dual import Pace, dual_step, duals_of, examples, saddle_of, two
from bltoolbox.plugin import Lower, LowerSolver, NumericalError, Rows, expand, optimality


@dataclass(frozen=True)
class PDHGState(Pace):
    """x and the blocks of p, of t = Kx, and back = Kᵀp; the second block is None where there is only one."""

    x: Tensor
    residual: Tensor
    dual0: Tensor
    dual1: Tensor | None
    image0: Tensor
    image1: Tensor | None
    back: Tensor
    #: ρ of the duality gap, and the unit that replaces μ where it is not known to be positive.
    rho: Tensor
    scale: Tensor


class PDHG(LowerSolver):
    """Primal–dual hybrid gradient with steps for each block, accelerated where the data term is strongly convex."""

    requires: ClassVar = {
        "regularizer": (
            "analyse",
            "synthesise",
            "analysis_norm",
            "potential_sum",
            "conjugate",
            "prox_potential",
        ),
        "data_term": ("prox",),
    }
    exact_residual = True
    handles_constraint = True
    handles_nonsmooth = True
    by_gap = True

    def persists(self, lower: Lower) -> Rows:
        return examples(lower, "dual")

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> PDHGState:
        saddle = saddle_of(lower)
        x = lower.project(x0)
        t, scale, rho = saddle.forward(x), saddle.scale(x), saddle.gap_convexity
        if bool(((lower.mu > 0) & ~(rho > 0)).any()):
            raise NumericalError(
                "pdhg bounds its error by the strong convexity of the data term, which is not known to be positive; set"
                " strong_convexity in the recipe, or use lbfgs"
            )
        pace = Pace.begin(saddle, 1 / scale)
        # One dual step makes p admissible, whatever θ it was computed with, and leaves a solution as it is.
        p = dual_step(saddle, duals_of(kept, t, "dual"), t, pace.sigma)
        back = saddle.adjoint(p)
        lower.counter.gradients += len(x)
        residual = optimality(lower.mu, rho, scale, saddle.slack(x, t, p, back))
        return PDHGState(**vars(pace), x=x, residual=residual, **two("dual", p), **two("image", t),
                         back=back, rho=rho, scale=scale)  # fmt: skip

    def step(self, lower: Lower, state: PDHGState) -> PDHGState:
        saddle = saddle_of(lower)
        x = saddle.prox(torch.addcmul(state.x, expand(-state.tau, state.x), state.back), state.tau)
        theta, pace = state.shrunk()
        t, before = saddle.forward(x), state.blocks("image")
        ahead = tuple(
            torch.addcmul(new, expand(theta, new), new - old) for new, old in zip(t, before, strict=True)
        )
        p = dual_step(saddle, state.blocks("dual"), ahead, pace.sigma)
        pace = pace.balanced(state.tau, x - state.x, p, state.blocks("dual"))[0]
        back = saddle.adjoint(p)
        lower.counter.gradients += len(x)
        residual = optimality(lower.mu, state.rho, state.scale, saddle.slack(x, t, p, back))
        return replace(pace, x=x, residual=residual, **two("dual", p), **two("image", t), back=back)
