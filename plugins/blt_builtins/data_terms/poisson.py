"""Poisson: the likelihood of photon counts.

    D(t; y) = p Σ_k [t_k + b − y_k log(t_k + b)],   t ≥ 0,        D' = p(1 − y/(t + b)),   D'' = p y/(t + b)²

for measurements y = Poisson(p(Ax + b))/p with peak p and background b > 0: the negative log-likelihood up to a
constant. For t < 0, which has no physical meaning, D continues as its second-order Taylor polynomial at 0,

    D = p Σ_k [b − y_k log b + (1 − y_k/b) t_k + y_k t_k²/(2b²)],   t < 0

so it is twice differentiable and convex everywhere. L = p max y/b² per sample, |D'''| ≤ 2p max y/b³. An entry with
y_k = 0 is linear: the minimiser then needs the constraint `nonnegative`, a coercive regularizer or `strong_convexity`.

The weight y_k/(t + b) does not majorise for small arguments; the global curvature p y_k/b² does, and makes `mm`
correct but slow. With `agd` the certified L is equally pessimistic; `lbfgs` and `newton-cg` need no L.

When to choose it: few photons (fluorescence, emission tomography, low light), where the noise is weaker in dark areas.

References: Bertero, Boccacci, Desiderà & Vicidomini, *Image deblurring with Poisson data*, Inverse Problems 2009;
Hohage & Werner, *Inverse problems with Poisson data*, Inverse Problems 2016.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta


class Poisson(DataTerm):
    """Negative log-likelihood of counts.

    Args:
        peak: p, the counts for a value of 1; must match the noise.
        background: b, the counts where the image is zero, in units of the image; must match the noise.
    """

    def __init__(
        self, peak: Annotated[float, Gt(0)] = 100.0, background: Annotated[float, Gt(0)] = 0.01
    ) -> None:
        self.peak = peak
        self.background = background

    def check_measurements(self, y: Tensor) -> str | None:
        if bool((y < 0).any()):
            return f"counts cannot be negative, but the smallest measurement is {float(y.min()):.3g}; use least-squares"
        return None

    def centre(self, theta: Theta, y: Tensor) -> Tensor:
        return y - self.background

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        p, b = self.peak, self.background
        inside = t.clamp_min(0) + b
        outside = t.clamp_max(0)
        value = inside - y * inside.log() + (1 - y / b) * outside + y * outside.square() / (2 * b**2)
        return p * value.flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        p, b = self.peak, self.background
        return p * (1 - y / (t.clamp_min(0) + b) + y * t.clamp_max(0) / b**2)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.peak * y / (t.clamp_min(0) + self.background).square()

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, Tensor]:
        return 0.0, self.peak / self.background**2 * y.flatten(1).amax(1)

    def third(self, theta: Theta, y: Tensor) -> Tensor:
        return 2 * self.peak / self.background**3 * y.flatten(1).amax(1)

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.peak / self.background**2 * y

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        p, b = self.peak, self.background
        # u ≥ 0: (u + b)² − (t + b − step p)(u + b) − step p y = 0; u < 0: a linear equation.
        middle = t + b - step * p
        root = (middle + torch.sqrt(middle.square() + 4 * step * p * y)) / 2 - b
        below = (t - step * p * (1 - y / b)) / (1 + step * p * y / b**2)
        return torch.where(root >= 0, root, below)
