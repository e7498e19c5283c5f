"""The adjoint iteration of `piggyback`, and the hypergradient at its limit; the equations are there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blt_builtins.lower_solvers.pdhg import PDHGState
from blt_builtins.lower_solvers.primal_dual import Pace, duals_of, saddle_of, two
from bltoolbox.plugin import Ask, Blocks, Lower, dot, expand, gradients_of


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


def begin_adjoint(ask: Ask, state: PDHGState) -> Adjoint:
    """X and P of the last call, or zero, at a saddle point."""
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


def advance_adjoint(lower: Lower, state: Adjoint) -> Adjoint:
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


def adjoint_gradient(lower: Lower, state: Adjoint, weights: Tensor) -> dict[str, Tensor]:
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
