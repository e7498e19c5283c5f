"""Gradient descent with a certified step.

    x_{k+1} = P_C(x_k − ∇h(x_k)/L)

The error shrinks by 1 − μ/L per iteration, h decreases monotonically, and so does ‖∇h‖. L is the components'
certified bound; where one of them knows none, each sample tries the curvature it met along its last step (Barzilai &
Borwein),

    L = ⟨Δ∇h, Δx⟩/‖Δx‖²,   doubled until   ⟨∇h(x⁺) − ∇h(x), x⁺ − x⟩ ≤ L‖x⁺ − x‖²

which, h being convex, proves h(x⁺) ≤ h(x) from gradients alone. The gradient of an accepted trial is the next
iteration's: a step that is not too long costs one gradient, like a certified one.

When to choose it: as the yardstick and the simplest model of a solver, or where momentum or curvature misbehave.
`agd` needs the square root of its iterations at the same price each, and has the same constraint on x.

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
    """Projected gradient descent, certified or backtracked step."""

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
        # No step, or one along which rounding hides the curvature, says nothing about the next.
        seen = (moved.length > 0) & (moved.rise > 0)
        curvature = torch.where(seen, moved.rise / torch.where(seen, moved.length, 1.0), moved.lipschitz)
        residual = lower.residual(moved.x, moved.gradient)
        return GDState(moved.x, residual, moved.gradient, torch.maximum(curvature, lower.mu))
