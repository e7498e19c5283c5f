"""Limited-memory BFGS, every sample with its own history.

    x_{k+1} = x_k − α_k B_k ∇h(x_k),        B_k = inverse Hessian built from the last m pairs
    s_j = x_{j+1} − x_j,   y_j = ∇h(x_{j+1}) − ∇h(x_j),   from the scaled identity (⟨s,y⟩/⟨y,y⟩) I

B_k∇h comes from the two-loop recursion, α_k from a line search per sample, which tries 1 first and nearly always
accepts it. A pair of non-positive curvature (up to rounding) is stored with weight zero, which leaves the B of that
sample unchanged; so all histories have the same shape, and no sample depends on its batch. An iteration costs a
gradient, an energy and m pairs of inner products; no Lipschitz constant is needed.

When to choose it: tight tolerances with any smooth regularizer, in particular one without majorant weights (with them,
`mm` is as fast and needs less memory) or with expensive Hessian products (otherwise use `newton-cg` for the tightest
tolerances). Constraints on x are not supported.

References: Nocedal, *Updating quasi-Newton matrices with limited storage*, Math. Comp. 1980; Liu & Nocedal, *On the
limited memory BFGS method for large scale optimization*, Math. Prog. 1989.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.lower_solvers.line_search import Point, line_search
from blt_builtins.lower_solvers.secants import flat, image
from bltoolbox.plugin import Lower, LowerSolver, Rows, dot, expand, norm


@dataclass(frozen=True)
class LBFGSState:
    """x with energy and gradient; the pairs as rows of (B, m, N), newest last, with 1/⟨s,y⟩ (or 0) and the
    scaling."""

    x: Tensor
    residual: Tensor
    gradient: Tensor
    energy: Tensor
    s: Tensor
    y: Tensor
    rho: Tensor
    scale: Tensor


class LBFGS(LowerSolver):
    """Limited-memory BFGS.

    Args:
        memory: number m of pairs stored for each sample; a pair is two images.
    """

    exact_residual = True

    def __init__(self, memory: Annotated[int, Gt(0)] = 10) -> None:
        self.memory = memory

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> LBFGSState:
        point = Point.at(lower, x0)
        scale = 1 / lower.lipschitz if lower.bounded else torch.ones_like(lower.mu)
        none = flat(x0).new_zeros(len(x0), 0, flat(x0).shape[1])
        residual = norm(point.gradient)
        return LBFGSState(x0, residual, point.gradient, point.energy, none, none, none[:, :, 0], scale)

    def step(self, lower: Lower, state: LBFGSState) -> LBFGSState:
        direction = self._direction(state)
        point, moved = line_search(lower, Point(state.x, state.gradient, state.energy), direction)
        s, y = flat(point.x - state.x), flat(point.gradient - state.gradient)
        sy, yy = dot(s, y), dot(y, y)
        curved = sy > torch.finfo(s.dtype).eps ** 0.5 * norm(s) * norm(y)
        rho = torch.where(curved, 1 / torch.where(curved, sy, 1.0), 0.0)
        return LBFGSState(
            point.x,
            norm(point.gradient),
            point.gradient,
            point.energy,
            self._append(state.s, s),
            self._append(state.y, y),
            # If no step along a direction is accepted, the history that produced it is discarded.
            self._append(state.rho, rho) * moved.unsqueeze(1),
            torch.where(curved, sy / torch.where(curved, yy, 1.0), state.scale),
        )

    def _append(self, history: Tensor, row: Tensor) -> Tensor:
        return torch.cat([history, row.unsqueeze(1)], dim=1)[:, -self.memory :]

    def outcome(self, state: LBFGSState) -> LBFGSState:
        """With pairs of weight zero before the first, so that all histories have m of them."""
        missing = self.memory - state.s.shape[1]
        s, y = (torch.nn.functional.pad(rows, (0, 0, missing, 0)) for rows in (state.s, state.y))
        return replace(state, s=s, y=y, rho=torch.nn.functional.pad(state.rho, (missing, 0)))

    def inverse(self, state: LBFGSState, v: Tensor) -> Tensor:
        return image(_product(state, flat(v)), state.x)

    def _direction(self, state: LBFGSState) -> Tensor:
        """−B∇h, or the scaled −∇h where rounding makes that no descent direction."""
        gradient = flat(state.gradient)
        q = _product(state, gradient)
        downhill = dot(q, gradient) > 0
        q = torch.where(expand(downhill, q), q, gradient * state.scale.unsqueeze(1))
        return -image(q, state.x)


def _product(state: LBFGSState, v: Tensor) -> Tensor:
    """B v by the two-loop recursion, for v as rows."""
    q, coefficients = v, []
    for j in reversed(range(state.s.shape[1])):
        coefficients.append(state.rho[:, j] * dot(state.s[:, j], q))
        q = torch.addcmul(q, coefficients[-1].unsqueeze(1), state.y[:, j], value=-1)
    q = q * state.scale.unsqueeze(1)
    for j, coefficient in enumerate(reversed(coefficients)):
        beta = state.rho[:, j] * dot(state.y[:, j], q)
        q = torch.addcmul(q, (coefficient - beta).unsqueeze(1), state.s[:, j])
    return q
