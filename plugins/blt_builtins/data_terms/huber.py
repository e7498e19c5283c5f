"""Pseudo-Huber: quadratic for small misfits, linear for large ones.

    D(t; y) = Σ_k √(r_k² + δ²) − δ,   r = t − y,        D' = r/√(r² + δ²),   D'' = δ²/√(r² + δ²)³ ≤ 1/δ

An outlier pulls at the reconstruction with a force of at most 1, however large it is. The half-quadratic weight
1/√(r² + δ²) makes `mm` as suitable as for least squares. |D'''| ≤ 0.8587/δ², at r = δ/2.

When to choose it: salt-and-pepper noise, dead pixels, or an operator that is inaccurate in a few places. Choose δ near
the noise level of the other entries. The regularizer's weight has another scale than with least squares.

References: Huber, *Robust estimation of a location parameter*, Ann. Math. Stat. 1964; Charbonnier, Blanc-Féraud, Aubert
& Barlaud, *Deterministic edge-preserving regularization in computed imaging*, IEEE TIP 1997.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta


class Huber(DataTerm):
    """Smoothed absolute misfit.

    Args:
        delta: δ, the misfit above which entries count linearly.
    """

    def __init__(self, delta: Annotated[float, Gt(0)] = 0.01) -> None:
        self.delta = delta

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return (self._length(t - y) - self.delta).flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - y
        return misfit / self._length(misfit)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.delta**2 / self._length(t - y).pow(3)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, float]:
        return 0.0, 1 / self.delta

    def third(self, theta: Theta, y: Tensor) -> float:
        return 48 / 5**2.5 / self.delta**2

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 1 / self._length(t - y)

    def _length(self, misfit: Tensor) -> Tensor:
        return (misfit.square() + self.delta**2).sqrt()
