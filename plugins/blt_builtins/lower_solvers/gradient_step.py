"""The gradient step that solvers share: its length from a Lipschitz constant, certified or found by backtracking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.plugin import Lower, dot, expand

_DOUBLINGS = 60


@dataclass(frozen=True)
class Moved:
    """x⁺ with its gradient and the L that it took; ``rise`` is ⟨∇h(x⁺) − ∇h(x), x⁺ − x⟩, ``length`` ‖x⁺ − x‖²."""

    x: Tensor
    gradient: Tensor
    lipschitz: Tensor
    length: Tensor
    rise: Tensor


def first_lipschitz(lower: Lower) -> Tensor:
    """The certified L of each sample, or where backtracking begins."""
    return lower.lipschitz if lower.bounded else torch.ones_like(lower.mu)


def gradient_step(lower: Lower, x: Tensor, gradient: Tensor, lipschitz: Tensor) -> Tensor:
    """x⁺ = Π(x − ∇h(x)/L)."""
    return lower.project(torch.addcdiv(x, gradient, expand(lipschitz, x), value=-1))


def backtrack(lower: Lower, x: Tensor, gradient: Tensor, lipschitz: Tensor) -> Moved:
    """A step with the smallest L in a doubling sequence for which ⟨∇h(x⁺) − ∇h(x), x⁺ − x⟩ ≤ L‖x⁺ − x‖².

    It compares gradients, not energies, since the difference of two energies is lost to rounding near the minimiser.
    """
    for _ in range(_DOUBLINGS):
        moved = gradient_step(lower, x, gradient, lipschitz)
        there, step = lower.gradient(moved), moved - x
        length, rise = dot(step, step), dot(there - gradient, step)
        # A curvature equal to L up to rounding is accepted; the loop detects NaN.
        steep = rise > (1 + 1e-4) * lipschitz * length
        if not bool(steep.any()):
            break
        lipschitz = torch.where(steep, torch.maximum(2 * lipschitz, rise / length), lipschitz)
    return Moved(moved, there, lipschitz, length, rise)
