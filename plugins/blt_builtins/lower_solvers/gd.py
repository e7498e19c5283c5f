"""Gradient descent with a certified step.

    x_{k+1} = P_C(x_k − ∇h(x_k)/L)

The error shrinks by a factor of 1 − μ/L per iteration, and h and ‖∇h‖ decrease monotonically. L is the certified bound
of the components; if one of them knows none, each sample tries the curvature along its last step (Barzilai & Borwein),

    L = ⟨Δ∇h, Δx⟩/‖Δx‖²,   doubled until   ⟨∇h(x⁺) − ∇h(x), x⁺ − x⟩ ≤ L‖x⁺ − x‖²

which for convex h proves h(x⁺) ≤ h(x) from gradients alone. The gradient at an accepted trial is reused in the next
iteration: a step that is accepted at once costs one gradient, like a certified one.

When to choose it: as a reference and the simplest example of a solver, or where momentum or curvature estimates fail.
`agd` needs about the square root of the number of iterations at the same cost each, and handles the same constraints.

References: Nesterov, *Lectures on convex optimization*, 2018, section 2.1.5; Barzilai & Borwein, *Two-point step size
gradient methods*, IMA J. Numer. Anal. 1988.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blt_builtins.lower_solvers.gradient_step import backtrack, first_lipschitz, gradient_step
from bltoolbox.plugin import Lower, LowerSolver, Rows


@dataclass(frozen=True)
class GDState:
    """``lipschitz`` is the certified L, or the one that the next iteration tries first."""

    x: Tensor
    residual: Tensor
    gradient: Tensor
    lipschitz: Tensor


class GradientDescent(LowerSolver):
    """Projected gradient descent with a certified or backtracked step."""

    exact_residual = True
    handles_constraint = True

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> GDState:
        x0 = lower.project(x0)
        gradient = lower.gradient(x0)
        return GDState(x0, lower.residual(x0, gradient), gradient, first_lipschitz(lower))

    def step(self, lower: Lower, state: GDState) -> GDState:
        if not lower.bounded:
            return self._backtrack(lower, state)
        x = gradient_step(lower, state.x, state.gradient, state.lipschitz)
        gradient = lower.gradient(x)
        return GDState(x, lower.residual(x, gradient), gradient, state.lipschitz)

    def _backtrack(self, lower: Lower, state: GDState) -> GDState:
        moved = backtrack(lower, state.x, state.gradient, state.lipschitz)
        # A zero step, or one whose curvature is lost to rounding, gives no estimate for the next.
        seen = (moved.length > 0) & (moved.rise > 0)
        curvature = torch.where(seen, moved.rise / torch.where(seen, moved.length, 1.0), moved.lipschitz)
        residual = lower.residual(moved.x, moved.gradient)
        return GDState(moved.x, residual, moved.gradient, torch.maximum(curvature, lower.mu))
