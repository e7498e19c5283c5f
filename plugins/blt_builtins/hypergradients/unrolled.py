"""Hypergradient by reverse mode through K gradient steps.

    x_{k+1} = P_C(x_k − ∇h(x_k, θ)/L),  k < K,  x_0 = x̃ given;        z = ∂_θ g(x_K), x_0 held fixed

Backwards from p_K = ∇g(x_K), where D_k selects the pixels that P_C did not clip in step k,

    u = D_k p_{k+1},        z ← z − ∂_θ⟨∇h(x_k, θ), u⟩/L,        p_k = u − ∇²h(x_k) u/L

by analytic Hessian products: only the K iterates are stored, and no graph is recorded. ‖p_0‖, the neglected sensitivity
to the start, is the residual: at a minimiser it is that of a Neumann series of K terms, ‖p_0‖ ≤ (1 − μ/L)^K ‖∇g‖. In
the backward pass, a sample stops when its ‖p_k‖ is at most δ. Steps forward and backward both count as iterations.

When to choose it: to differentiate the algorithm rather than the minimiser, because x̃ is far from converged or the
Hessian is not definite. Otherwise `cg-ift` is more accurate at a fraction of the cost. It has no adjoint, hence no
error bound.

References: Maclaurin, Duvenaud & Adams, *Gradient-based hyperparameter optimization through reversible learning*, ICML
2015; Shaban et al., *Truncated back-propagation for bilevel optimization*, AISTATS 2019.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.implicit import certified_lipschitz
from bltoolbox.plugin import Ask, BiasLimit, Estimate, HypergradientEstimator, Lower, expand, norm


class Unrolled(HypergradientEstimator):
    """Reverse mode through gradient steps.

    Args:
        steps: number K of gradient steps.
    """

    gives_adjoint = False
    limit = BiasLimit({"steps": (5, 20, 80)})

    def __init__(self, steps: Annotated[int, Gt(0)] = 50) -> None:
        self.steps = steps

    def estimate(self, ask: Ask) -> Estimate:
        with torch.no_grad():
            return unroll(ask, ask.tol, certified_lipschitz(ask.lower, "unrolled"), ask.limit(self.steps))


def unroll(ask: Ask, tol: Tensor, lipschitz: Tensor, steps: int) -> Estimate:
    """z through ``steps`` gradient steps from the solution."""
    lower, x, weights = ask.lower, ask.solution, ask.weights
    points, inside = _forward(lower, x, lipschitz, steps)
    p = ask.upper.gradient(points[-1])
    residual, iterations = norm(p), torch.full_like(tol, steps, dtype=torch.long)
    z = {name: torch.zeros_like(value) for name, value in lower.theta.items()}
    for name, entry in ask.upper.theta_gradient(points[-1], weights).items():
        z[name] += entry
    order = torch.arange(len(x), device=x.device)
    for k in reversed(range(steps)):
        if not bool((running := residual[order] > tol[order]).all()):
            order, p = order[running], p[running]
            lower = lower.take(torch.nonzero(running).flatten())
        if not len(order):
            break
        u, p = _backward(lower, points[k][order], p * inside[k][order], lipschitz[order])
        for name, entry in lower.mixed(points[k][order], u, weights[order]).items():
            z[name] -= entry
        residual[order] = norm(p)
        iterations[order] += 1
    return Estimate(z, residual, iterations)


def _forward(lower: Lower, x: Tensor, lipschitz: Tensor, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """x_0, …, x_K, and for each step the pixels that the projection did not change."""
    points, inside = [lower.project(x)], []
    for _ in range(steps):
        free = points[-1] - lower.gradient(points[-1]) / expand(lipschitz, x)
        points.append(lower.project(free))
        inside.append(points[-1] == free)
    return points, inside


def _backward(lower: Lower, x: Tensor, u: Tensor, lipschitz: Tensor) -> tuple[Tensor, Tensor]:
    """u/L and p = u − ∇²h(x) u/L.

    With a constraint, ∇²h acts only on the free pixels of x_k. The support of u lies there, and D_{k−1} would remove
    the entries of ∇²h u on the other pixels, which x_k = P_C(…) holds at a bound.
    """
    system = lower.linearize(x)
    if system.free is not None:
        u = u * system.free
    scaled = u / expand(lipschitz, u)
    return scaled, u - system.hvp(scaled)
