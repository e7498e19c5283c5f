"""Pseudo-Huber loss: large errors count linearly.

    g(x; x*) = Σ_p √(r_p² + δ²) − δ,   r = x − x*,        ∇g = r/√(r² + δ²),   L_g = 1/δ

When to choose it: where a few pixels (edges, defects in the truth) should not dominate training.

Reference: Calatroni, Cao, De los Reyes, Schönlieb & Valkonen, *Bilevel approaches for learning of variational imaging
models*, 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from blt_builtins.upper_losses.targets import target_of
from bltoolbox.plugin import Forward, Sample, Upper, UpperLoss


class HuberLoss(UpperLoss):
    """Smoothed absolute error.

    Args:
        delta: δ, the size of errors above which they count linearly.
    """

    def __init__(self, delta: Annotated[float, Gt(0)] = 0.1) -> None:
        self.delta = delta

    def bind(self, sample: Sample, forward: Forward) -> Upper:
        return _Huber(target_of(sample, "huber"), self.delta)


@dataclass(frozen=True)
class _Huber(Upper):
    target: Tensor
    delta: float

    convex = True
    infimum = 0.0

    @property
    def lipschitz(self) -> float:  # type: ignore[override]
        return 1 / self.delta

    def value(self, x: Tensor) -> Tensor:
        error = (x - self.target).double()
        return ((error.square() + self.delta**2).sqrt() - self.delta).flatten(1).sum(1)

    def gradient(self, x: Tensor) -> Tensor:
        error = x - self.target
        return error / (error.square() + self.delta**2).sqrt()

    def take(self, index: Tensor) -> Upper:
        return _Huber(self.target[index], self.delta)
