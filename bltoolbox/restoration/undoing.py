"""The operator undone, but for its noise: a linear estimate of the image for networks that read the measurements.

    u = argmin_x ½‖Ax − y‖² + (λ/2)‖∇x‖² = (AᵀA + λ∇ᵀ∇)⁻¹ Aᵀy

by cosines, which diagonalise ∇ᵀ∇ at mirrored borders and, at least in the interior, AᵀA. Unlike y, u looks alike for
all kernels of a blur, so a network that was trained with one of them can be used with others. Differentiable in y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import Constant
from bltoolbox.restoration.cosines import cosines

#: The smallest eigenvalue of AᵀA + λ∇ᵀ∇ that is inverted, relative to the largest.
_FLOOR = 1e-6


@dataclass(frozen=True)
class Undoing:
    """(AᵀA + λ∇ᵀ∇)⁻¹ for the eigenvalues of AᵀA by frequency, (H, W)."""

    symbol: Constant
    weight: float

    def apply(self, right: Tensor) -> Tensor:
        """u for images Aᵀy (B, C, H, W)."""
        height, width = right.shape[2:]
        plan = cosines(height, width, right.device)
        total = self.symbol.like(right) + self.weight * _differences(height, width).to(right)
        factor = torch.maximum(total, _FLOOR * total.max()).reciprocal()
        return plan.inverse(plan.transform(right) * plan.arrange(factor[None, None]))


def _differences(height: int, width: int) -> Tensor:
    """The eigenvalues of ∇ᵀ∇."""
    rows, columns = (
        2 - 2 * torch.cos(math.pi / length * torch.arange(length, dtype=torch.float64))
        for length in (height, width)
    )
    return rows.unsqueeze(1) + columns
