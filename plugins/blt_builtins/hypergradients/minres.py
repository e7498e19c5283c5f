"""Hypergradient by the implicit function theorem, with the linear system solved by MINRES.

    ∇²h(x̃) q = ∇g(x̃),   q_k = argmin ‖∇g − ∇²h q‖ over q_0 + span{r_0, ∇²h r_0, …, (∇²h)^{k−1} r_0}

Lanczos vectors v_k with ∇²h V_k = V_{k+1} T_k; the QR factors of the tridiagonal T_k are updated by one rotation per
iteration, so an iteration costs one Hessian product and a few vector operations, whatever k. The residual decreases
monotonically, even if the Hessian is indefinite, where conjugate gradients break down: with a non-convex regularizer, z
is then the derivative of the stationary point x̃, whether or not it is a minimiser. Every sample has its own scalars,
stopping criterion and warm start; the returned residual is recomputed from q.

When to choose it: regularizers that are not convex, or an x̃ so inaccurate that the Hessian may be indefinite. For a
positive definite Hessian it reaches δ no later than `cg-ift`, with a few more vector operations.

Reference: Paige & Saunders, *Solution of sparse indefinite systems of linear equations*, SIAM J. Numer. Anal. 1975.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.implicit import ImplicitEstimator, implicit_estimate
from bltoolbox.plugin import Ask, Estimate, System, dot, expand, initial_residual, norm


class MINRES(ImplicitEstimator):
    """Implicit differentiation with minimal residuals.

    Args:
        iteration_limit: maximum number of MINRES iterations per sample.
    """

    def __init__(self, iteration_limit: Annotated[int, Gt(0)] = 500) -> None:
        self.iteration_limit = iteration_limit

    def estimate(self, ask: Ask) -> Estimate:
        return implicit_estimate(MinimalResiduals(), ask, self.iteration_limit)


@dataclass(frozen=True)
class MinresState:
    """Lanczos vectors v, the directions w = V R⁻¹, the last two rotations (c, s), and η with |η| = ‖b − Hq‖."""

    q: Tensor
    tol: Tensor
    residual: Tensor
    eta: Tensor
    v: Tensor
    v_last: Tensor
    beta: Tensor
    w: Tensor
    w_last: Tensor
    c: Tensor
    s: Tensor
    c_last: Tensor
    s_last: Tensor


class MinimalResiduals:
    """MINRES for a symmetric H, definite or not."""

    def init(self, system: System, rhs: Tensor, start: Tensor, tol: Tensor) -> MinresState:
        r = initial_residual(system, rhs, start)
        beta, none = norm(r), torch.zeros_like(r)
        unit, zero = torch.ones_like(beta), torch.zeros_like(beta)
        return MinresState(
            start, tol, beta, beta, _scaled(r, beta), none, zero, none, none, unit, zero, unit, zero
        )

    def step(self, system: System, state: MinresState) -> MinresState:
        image = system.hvp(state.v) - expand(state.beta, state.v) * state.v_last
        alpha = dot(image, state.v)
        image = torch.addcmul(image, expand(-alpha, image), state.v)
        beta = norm(image)
        # The new column of T under the last two rotations, and the rotation that eliminates its subdiagonal entry.
        diagonal = state.c * alpha - state.c_last * state.s * state.beta
        above = state.s * alpha + state.c_last * state.c * state.beta
        far_above = state.s_last * state.beta
        pivot = torch.hypot(diagonal, beta)
        c, s = _ratio(diagonal, pivot), _ratio(beta, pivot)
        w = state.v - expand(above, image) * state.w - expand(far_above, image) * state.w_last
        w = _scaled(w, pivot)
        # An exhausted Krylov space (β = 0, q exact) gives a zero vector: no further iteration changes q.
        return replace(
            state,
            q=torch.addcmul(state.q, expand(c * state.eta, w), w),
            residual=(s * state.eta).abs(),
            eta=-s * state.eta,
            v=_scaled(image, beta),
            v_last=state.v,
            beta=beta,
            w=w,
            w_last=state.w,
            c=c,
            s=s,
            c_last=state.c,
            s_last=state.s,
        )


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a/b, and 0 where b is 0."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def _scaled(v: Tensor, length: Tensor) -> Tensor:
    """v/length, and 0 where the length is 0."""
    return v * expand(_ratio(torch.ones_like(length), length), v)
