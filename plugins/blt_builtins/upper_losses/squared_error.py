"""Squared error.

    g(x; x*) = s·‖x − x*‖²,        ∇g = 2s(x − x*),   L_g = 2s

When to choose it: the loss of the paper, and the one that PSNR rewards.

Reference: Kunisch & Pock, *A bilevel optimization approach for parameter learning in variational models*, SIAM J.
Imaging Sci. 2013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from blt_builtins.upper_losses.targets import target_of
from bltoolbox.plugin import Forward, Sample, Upper, UpperLoss, dot


class SquaredError(UpperLoss):
    """The squared distance to the true image.

    Args:
        scale: factor s of the loss; steps and accuracies of the upper level scale with it.
    """

    def __init__(self, scale: Annotated[float, Gt(0)] = 1.0) -> None:
        self.scale = scale

    def bind(self, sample: Sample, forward: Forward) -> Upper:
        return _SquaredDistance(target_of(sample, "squared-error"), self.scale)


@dataclass(frozen=True)
class _SquaredDistance(Upper):
    """s·‖x − x*_i‖², summed in float64."""

    target: Tensor
    scale: float

    convex = True
    infimum = 0.0

    @property
    def lipschitz(self) -> float:  # type: ignore[override]
        return 2 * self.scale

    def value(self, x: Tensor) -> Tensor:
        return self.scale * dot(difference := (x - self.target).double(), difference)

    def gradient(self, x: Tensor) -> Tensor:
        return 2 * self.scale * (x - self.target)

    def take(self, index: Tensor) -> Upper:
        return _SquaredDistance(self.target[index], self.scale)
