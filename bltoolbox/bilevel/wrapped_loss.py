"""Losses around another loss, which add how it depends on x or on θ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Bound


@dataclass(frozen=True)
class WrappedLoss(Upper):
    """What is known of ``upper`` holds for the loss around it."""

    upper: Upper

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return self.upper.convex

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.upper.scale

    @property
    def lipschitz(self) -> Bound:  # type: ignore[override]
        return self.upper.lipschitz

    @property
    def infimum(self) -> float:  # type: ignore[override]
        return self.upper.infimum


@dataclass(frozen=True)
class Viewed(WrappedLoss):
    """The loss of a lower level whose variable contains more than what is judged, such as auxiliary variables.

        G(x) = g(V x),        ∇G = Vᵀ ∇g(V x)

    V is the ``view`` of the lower level and Vᵀ its ``embed``; ‖V‖ ≤ 1. A problem wraps its loss where it makes the
    pair (Lower, Upper), so that the oracle, estimators and error bounds see two functions of the same x.
    """

    lower: Lower

    @property
    def depends_on_theta(self) -> bool:
        return self.upper.depends_on_theta

    def value(self, x: Tensor) -> Tensor:
        return self.upper.value(self.lower.view(x))

    def gradient(self, x: Tensor) -> Tensor:
        return self.lower.embed(self.upper.gradient(self.lower.view(x)))

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return self.upper.theta_gradient(self.lower.view(x), weights)

    def take(self, index: Tensor) -> Viewed:
        return Viewed(self.upper.take(index), self.lower.take(index))
