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

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.lower_solvers.pdhg import PDHG, PDHGState
from blt_builtins.lower_solvers.primal_dual import Pace, duals_of, examples, iterate, saddle_of, two
from bltoolbox.plugin import (
    Accuracy,
    Ask,
    Blocks,
    Estimate,
    HypergradientEstimator,
    Lower,
    NumericalError,
    Rows,
    Upper,
    dot,
    expand,
    gradients_of,
)


@dataclass(frozen=True)
class Adjoint(Pace):
    """X and P with KX and KᵀP, at a saddle point (x, p) with Kx and Kᵀp; slope is ∇g(x)."""

    residual: Tensor
    X: Tensor
    P0: Tensor
    P1: Tensor | None
    KX0: Tensor
    KX1: Tensor | None
    KtP: Tensor
    x: Tensor
    p0: Tensor
    p1: Tensor | None
    t0: Tensor
    t1: Tensor | None
    back: Tensor
    slope: Tensor


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
            adjoint, more = iterate(_advance, ask.lower, _begin(ask, state), ask.tol, limit)
        late = torch.maximum(state.residual, adjoint.residual) > ask.tol
        if isinstance(ask.effort, Accuracy) and bool(late.any()):
            worst = float(torch.maximum(state.residual, adjoint.residual)[late].max())
            raise NumericalError(
                f"piggyback reached the limit of {limit} iterations for {int(late.sum())} samples, with a residual of"
                f" up to {worst:.2g}; raise hypergradient.iteration_limit or loosen the tolerance"
            )
        gradient = _gradient(ask.lower, adjoint, ask.weights)
        for name, entry in ask.upper.theta_gradient(state.x, ask.weights).items():
            gradient[name] = gradient[name] + entry
        blocks = two("P", adjoint.blocks("P")) | two("dual", state.blocks("dual"))
        memory = {"X": adjoint.X} | {name: entry for name, entry in blocks.items() if entry is not None}
        return Estimate(gradient, adjoint.residual, counts + more, memory=memory)


def _begin(ask: Ask, state: PDHGState) -> Adjoint:
    saddle, t = saddle_of(ask.lower), state.blocks("image")
    X = ask.memory["X"] if "X" in ask.memory else torch.zeros_like(state.x)
    P = duals_of(ask.memory, t, "P")
    pace = Pace.begin(saddle, 1 / state.scale)
    return Adjoint(
        **vars(pace),
        residual=torch.full_like(pace.tau, torch.inf),
        X=X, **two("P", P), **two("KX", saddle.forward(X)), KtP=saddle.adjoint(P),
        x=state.x, **two("p", state.blocks("dual")), **two("t", t), back=state.back,
        slope=ask.upper.gradient(state.x),
    )  # fmt: skip


def _advance(lower: Lower, state: Adjoint) -> Adjoint:
    """One iteration, X before P as in `pdhg`."""
    saddle, tau = saddle_of(lower), state.tau
    lower.counter.hessian_products += len(tau)

    def derivative_of_prox(at: Tensor, direction: Tensor) -> Tensor:
        with torch.enable_grad():
            at = at.requires_grad_()
            return torch.autograd.grad(saddle.prox(at, tau), at, direction)[0]

    Y = state.X - expand(tau, state.X) * (state.KtP + state.slope)
    X = derivative_of_prox(state.x - expand(tau, state.x) * state.back, Y)
    theta, pace = state.shrunk()
    KX = saddle.forward(X)
    ahead = tuple(
        new + expand(theta, new) * (new - old) for new, old in zip(KX, state.blocks("KX"), strict=True)
    )
    sigma = pace.sigma
    before = state.blocks("P")
    W = _moved(before, ahead, sigma)
    with torch.enable_grad():
        at = tuple(block.requires_grad_() for block in _moved(state.blocks("p"), state.blocks("t"), sigma))
        P = torch.autograd.grad(saddle.prox_dual(at, sigma), at, W)
    pace, residual = pace.balanced(tau, X - state.X, P, before)
    return replace(pace, residual=residual, X=X, **two("P", P), **two("KX", KX), KtP=saddle.adjoint(P))


def _moved(p: Blocks, t: Blocks, sigma: Blocks) -> Blocks:
    """p + σt."""
    return tuple(
        torch.addcmul(dual, expand(step, image), image) for dual, step, image in zip(p, sigma, t, strict=True)
    )


def _gradient(lower: Lower, state: Adjoint, weights: Tensor) -> dict[str, Tensor]:
    """Σ_i weights_i z_i without ∂_θg."""
    lower.counter.mixed_products += len(weights)
    tau, sigma = state.tau, state.sigma
    p, t, P, KX = (state.blocks(name) for name in ("p", "t", "P", "KX"))
    Y = state.X - expand(tau, state.X) * (state.KtP + state.slope)
    u = state.x - expand(tau, state.x) * state.back
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in lower.theta.items()}
        saddle = saddle_of(lower.at_theta(leaves))
        pairs = [*zip(saddle.forward(state.X), p, strict=True), *zip(saddle.forward(state.x), P, strict=True)]
        total = torch.stack([dot(a, b) for a, b in pairs]).sum(0)
        near = saddle.prox_dual(_moved(p, t, sigma), sigma)
        for W, block, step in zip(_moved(P, KX, sigma), near, sigma, strict=True):
            total = total + dot(W, block) / step
        total = total - dot(Y, saddle.prox(u, tau)) / tau
        return gradients_of((weights * total).sum(), leaves)
