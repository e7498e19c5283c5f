"""Hypergradient by the implicit function theorem, its linear system solved by conjugate gradients.

    ∇²h(x̃) q = ∇g(x̃)   until ‖∇g(x̃) − ∇²h(x̃) q‖ ≤ δ,        z = −∂_θ⟨∇_x h(x̃, θ), q⟩

Every sample has its own scalars, its own stopping and its own warm start; sampling weights enter z, never the
linear system. The residual that is returned is recomputed from q: if the recursion of CG had drifted, it starts
again from there.

When to choose it: the default. Needs a positive definite Hessian, and says so when it meets none.

References: Pedregosa, *Hyperparameter optimization with approximate gradient*, ICML 2016; Ehrhardt & Roberts,
*Analyzing inexact hypergradients for bilevel learning*, IMA J. Appl. Math. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.errors import NumericalError
from bltoolbox.interfaces import HypergradientEstimator
from bltoolbox.problem import Linearization, LowerLevel, UpperLoss
from bltoolbox.results import Estimate
from bltoolbox.tensors import dot, expand, norm, take


class CGIFT(HypergradientEstimator):
    """Implicit differentiation with conjugate gradients.

    Args:
        iteration_limit: most CG iterations for a sample.
    """

    def __init__(self, iteration_limit: Annotated[int, Gt(0)] = 500) -> None:
        self.iteration_limit = iteration_limit

    def estimate(
        self,
        lower: LowerLevel,
        upper: UpperLoss,
        x: Tensor,
        weights: Tensor,
        tol: Tensor,
        warm: Tensor | None,
    ) -> Estimate:
        rhs = upper.gradient(x)
        start = torch.zeros_like(rhs) if warm is None else warm
        with torch.no_grad():
            q, residual, iterations = conjugate_gradients(
                lower.linearize(x), rhs, start, tol, self.iteration_limit
            )
        gradient = {name: -part for name, part in lower.mixed(x, q, weights).items()}
        return Estimate(gradient, q, residual, iterations)


@dataclass(frozen=True)
class _CGState:
    active: Tensor
    rhs: Tensor
    tol: Tensor
    q: Tensor
    r: Tensor
    p: Tensor
    rr: Tensor


def conjugate_gradients(
    system: Linearization, rhs: Tensor, start: Tensor, tol: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve H q = rhs a sample to ‖rhs − Hq‖ ≤ tol: q, the recomputed residual norm and the iterations."""
    q, iterations = start.clone(), torch.zeros(len(rhs), dtype=torch.long, device=rhs.device)
    residual = torch.empty_like(tol)
    order = torch.arange(len(rhs), device=rhs.device)
    previous = torch.full_like(tol, float("inf"))
    while len(order):
        part = system if len(order) == len(rhs) else system.take(order)
        left = limit - iterations[order]
        found, count = _sweep(part, rhs[order], q[order], tol[order], left)
        q[order] = found
        iterations[order] += count
        true = norm(rhs[order] - part.hvp(found))
        residual[order] = true
        # Once more from the recomputed residual, unless it is met, the limit is, or the last sweep gained nothing.
        again = (true > tol[order]) & (iterations[order] < limit) & (true < 0.5 * previous)
        previous, order = true[again], order[again]
    return q, residual, iterations


def _sweep(
    system: Linearization, rhs: Tensor, start: Tensor, tol: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """CG from ``start`` until its recursive residual meets ``tol`` or ``limit`` iterations are spent."""
    out, iterations = start.clone(), torch.zeros_like(limit)
    r = rhs - system.hvp(start) if bool((start != 0).any()) else rhs.clone()
    state = _CGState(torch.arange(len(rhs), device=rhs.device), rhs, tol, start, r, r, dot(r, r))
    while True:
        running = (state.rr.sqrt() > state.tol) & (iterations[state.active] < limit[state.active])
        if not bool(running.all()):
            done = torch.nonzero(~running).flatten()
            out[state.active[done]] = state.q[done]
            keep = torch.nonzero(running).flatten()
            if not len(keep):
                return out, iterations
            state, system = take(state, keep), system.take(keep)
        state = _iterate(system, state)
        iterations[state.active] += 1


def _iterate(system: Linearization, state: _CGState) -> _CGState:
    product = system.hvp(state.p)
    curvature = dot(state.p, product)
    if not bool((curvature > 0).all()):
        raise NumericalError(
            "cg-ift met a direction of non-positive curvature: the lower-level energy is not strongly convex there;"
            " set strong_convexity in the recipe or use a convex regularizer"
        )
    alpha = state.rr / curvature
    q = torch.addcmul(state.q, expand(alpha, state.p), state.p)
    r = torch.addcmul(state.r, expand(-alpha, product), product)
    rr = dot(r, r)
    p = torch.addcmul(r, expand(rr / state.rr, state.p), state.p)
    return replace(state, q=q, r=r, p=p, rr=rr)
