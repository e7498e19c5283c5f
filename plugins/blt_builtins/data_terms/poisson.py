"""Poisson: the likelihood of photon counts.

    D(t; y) = p Σ_k [t_k + b − y_k log(t_k + b)],   t ≥ 0,        D' = p(1 − y/(t + b)),   D'' = p y/(t + b)²

for measurements y = Poisson(p(Ax + b))/p with peak p and background b > 0: the negative log-likelihood up to a
constant. For t < 0, which has no physical meaning, D continues as its second-order Taylor polynomial at 0 and a term ψ,

    D = Σ_k p[b − y_k log b + (1 − y_k/b) t_k + y_k t_k²/(2b²)] + ψ(t_k),   t < 0
    ψ'' = min(−t/b, 1)/b²                                                  the curvature of one count, where t ≤ −b

so it is twice differentiable and convex everywhere. Without ψ an entry without counts, y_k = 0, would be linear,
and where many of them are adjacent, the energy with a weak regularizer would have no minimum: dark areas would
decrease without bound. With it D grows in both directions, and dark areas end slightly below zero, or at zero with
the constraint `nonnegative`. L = (p max y + 1)/b² per sample, |D'''| ≤ max(2p max y, 1)/b³.

The weight y_k/(t + b) does not majorise for small arguments; the global curvature (p y_k + 1)/b² does, and makes `mm`
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
        inside, outside = t.clamp_min(0) + b, t.clamp_max(0)
        value = inside - y * inside.log() + (1 - y / b) * outside + y * outside.square() / (2 * b**2)
        below, near = self._below(t)
        barrier = (near.pow(3) / (3 * b) + below * (below - near)) / (2 * b**2)
        return (p * value + barrier).flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        p, b = self.peak, self.background
        below, near = self._below(t)
        barrier = (near.square() / (2 * b) + below - near) / b**2
        return p * (1 - y / (t.clamp_min(0) + b) - y * below / b**2) - barrier

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        b = self.background
        return self.peak * y / (t.clamp_min(0) + b).square() + self._below(t)[1] / b**3

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, Tensor]:
        return 0.0, (self.peak * y.flatten(1).amax(1) + 1) / self.background**2

    def third(self, theta: Theta, y: Tensor) -> Tensor:
        # One bound for t > 0, the other for t < 0.
        return (2 * self.peak * y.flatten(1).amax(1)).clamp_min(1) / self.background**3

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return (self.peak * y + 1) / self.background**2

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        p, b = self.peak, self.background
        # u ≥ 0: (u + b)² − (t + b − step p)(u + b) − step p y = 0
        middle = t + b - step * p
        root = (middle + torch.sqrt(middle.square() + 4 * step * p * y)) / 2 - b
        # −b ≤ u < 0, with n = −u: (step/2b³) n² + slope n − pull = 0; u < −b: a linear equation.
        slope, pull = 1 + step * p * y / b**2, (step * p * (1 - y / b) - t).clamp_min(0)
        near = 2 * pull / (slope + torch.sqrt(slope.square() + 2 * step * pull / b**3))
        far = (pull + step / (2 * b)) / (slope + step / b**2)
        return torch.where(root >= 0, root, -torch.where(near <= b, near, far))

    def _below(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """How far t is below zero, and at most b of that."""
        below = (-t).clamp_min(0)
        return below, below.clamp_max(self.background)
