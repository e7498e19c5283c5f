"""Student's t: outliers have almost no influence.

    D(t; y) = ½κ² Σ_k log(1 + r_k²/κ²),   r = t − y,        D' = r/(1 + r²/κ²),
    D'' = (1 − r²/κ²)/(1 + r²/κ²)² ∈ [−⅛, 1],   |D'''| ≤ 1.457/κ

Beyond r = κ the pull of an entry decreases towards zero: a gross outlier is ignored, whereas with `huber` it still
pulls with a constant force. The price is convexity: there may be several minimisers, and which one is found depends on
the start. The half-quadratic weight 1/(1 + r²/κ²) still majorises, so `mm` is monotone. Error bounds that need
convexity are refused or labelled estimated.

When to choose it: a few grossly wrong measurements among good ones, and a good start.

References: Lange, Little & Taylor, *Robust statistical modeling using the t distribution*, JASA 1989; Aravkin,
Friedlander, Herrmann & van Leeuwen, *Robust inversion, dimensionality reduction, and randomized sampling*, Math. Prog.
2012.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta


class StudentT(DataTerm):
    """Logarithmic misfit.

    Args:
        kappa: κ, the misfit above which the pull of an entry decreases.
    """

    convex: ClassVar[bool] = False

    def __init__(self, kappa: Annotated[float, Gt(0)] = 0.1) -> None:
        self.kappa = kappa

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * self.kappa**2 * torch.log1p(self._squared(t, y)).flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return (t - y) / (1 + self._squared(t, y))

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        squared = self._squared(t, y)
        return (1 - squared) / (1 + squared).square()

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, float]:
        return -0.125, 1.0

    def third(self, theta: Theta, y: Tensor) -> float:
        # |D'''| = |2s(s² − 3)|/(κ(1 + s²)³) with s = r/κ, largest at s² = 3 − 2√2.
        return 1.4572 / self.kappa

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 1 / (1 + self._squared(t, y))

    def _squared(self, t: Tensor, y: Tensor) -> Tensor:
        return ((t - y) / self.kappa).square()
