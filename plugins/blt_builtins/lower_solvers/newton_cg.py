"""Inexact Newton: the Hessian system is solved by conjugate gradients, more accurately as the iterates converge.

    ‖∇²h(x_k) d + ∇h(x_k)‖ ≤ η_k ‖∇h(x_k)‖,   η_k = min(½, (‖∇h(x_k)‖/‖∇h(x_0)‖)^p),        x_{k+1} = x_k + α_k d

Every sample has its own CG scalars, stopping criterion and step length, of which 1 is tried first. Near the minimiser
the residual converges with order 1 + p: p = ½ costs the fewest products, p = 1 converges quadratically.

The loop counts outer iterations, but each costs a gradient, an energy and several Hessian products (each as expensive
as a gradient): compare seconds, not iterations, with first-order methods.

When to choose it: very tight tolerances, ill-conditioned energies, reference solutions. Needs a positive definite
Hessian; stops with a message otherwise. Constraints on x are not supported.

References: Dembo, Eisenstat & Steihaug, *Inexact Newton methods*, SIAM J. Numer. Anal. 1982; Nocedal &
Wright, *Numerical optimization*, 2006, section 7.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from blt_builtins.lower_solvers.line_search import Point, line_search
from bltoolbox.plugin import ConjugateGradients, Lower, LowerSolver, Rows, norm, sweep


@dataclass(frozen=True)
class NewtonState:
    """x with energy and gradient; ``first`` is ‖∇h(x_0)‖."""

    x: Tensor
    residual: Tensor
    gradient: Tensor
    energy: Tensor
    first: Tensor


class NewtonCG(LowerSolver):
    """Inexact Newton with conjugate gradients and a line search.

    Args:
        forcing: exponent p; the order of convergence is 1 + p.
        cg_limit: maximum number of CG iterations per outer iteration; fewer give a shorter descent direction.
    """

    exact_residual = True

    def __init__(
        self,
        forcing: Annotated[float, Gt(0), Le(1)] = 0.5,
        cg_limit: Annotated[int, Gt(0)] = 200,
    ) -> None:
        self.forcing = forcing
        self.cg_limit = cg_limit

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> NewtonState:
        point = Point.at(lower, x0)
        residual = norm(point.gradient)
        return NewtonState(x0, residual, point.gradient, point.energy, residual)

    def step(self, lower: Lower, state: NewtonState) -> NewtonState:
        point, _ = line_search(
            lower, Point(state.x, state.gradient, state.energy), self._direction(lower, state)
        )
        return NewtonState(point.x, norm(point.gradient), point.gradient, point.energy, state.first)

    def _direction(self, lower: Lower, state: NewtonState) -> Tensor:
        """From zero, every iterate of CG is a descent direction; its recursive residual is accurate enough here."""
        progress = state.residual / torch.where(state.first > 0, state.first, 1.0)
        tol = progress.pow(self.forcing).clamp_max(0.5) * state.residual
        limit = torch.full((len(tol),), self.cg_limit)
        start = torch.zeros_like(state.x)
        method = ConjugateGradients("newton-cg")
        direction, _ = sweep(method, lower.linearize(state.x), -state.gradient, start, tol, limit)
        return direction
