"""Structural similarity as a loss.

    g(x; x*) = 1 − SSIM(x, x*),        SSIM = mean over pixels and channels of
    (2μ_x μ_* + c₁)(2σ_x* + c₂) / ((μ_x² + μ_*² + c₁)(σ_x² + σ_*² + c₂))

with means, variances and covariances in an 11×11 Gaussian window (σ = 1.5) where it fits, c₁ = (0.01 R)²,
c₂ = (0.03 R)² for values of range R: the same SSIM as the reported metric. The loss is not convex, and no Lipschitz
constant of its gradient is known, so bounds on values are estimated.

When to choose it: where texture and contrast matter more than the squared error. Values are means, not sums, of
about 0.1, so accuracies and steps differ from those of `squared-error` by orders of magnitude; set them to `auto`.

Reference: Wang, Bovik, Sheikh & Simoncelli, *Image quality assessment: from error visibility to structural similarity*,
IEEE TIP 2004.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.upper_losses.targets import target_of
from bltoolbox.plugin import Forward, Sample, Upper, UpperLoss

_SIZE, _SIGMA = 11, 1.5


class SSIMLoss(UpperLoss):
    """One minus the structural similarity."""

    def bind(self, sample: Sample, forward: Forward) -> Upper:
        target = target_of(sample, "ssim")
        if min(target.shape[2:]) < _SIZE:
            raise ValueError(f"ssim looks at windows of {_SIZE}×{_SIZE} pixels, and the images are smaller")
        low, high = sample.range
        return _Dissimilarity(target, high - low)


@dataclass(frozen=True)
class _Dissimilarity(Upper):
    target: Tensor
    extent: float

    convex = False
    lipschitz = None
    infimum = 0.0

    def value(self, x: Tensor) -> Tensor:
        return 1 - _ssim(x.double(), self.target.double(), self.extent)

    def gradient(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return -torch.autograd.grad(_ssim(leaf, self.target, self.extent).sum(), leaf)[0]

    def take(self, index: Tensor) -> Upper:
        return _Dissimilarity(self.target[index], self.extent)


def _ssim(x: Tensor, y: Tensor, extent: float) -> Tensor:
    """Mean structural similarity of each image, shape (B,)."""
    c1, c2 = (0.01 * extent) ** 2, (0.03 * extent) ** 2
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x = _blur(x.square()) - mean_x.square()
    variance_y = _blur(y.square()) - mean_y.square()
    covariance = _blur(x * y) - mean_x * mean_y
    alike = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    size = (mean_x.square() + mean_y.square() + c1) * (variance_x + variance_y + c2)
    return (alike / size).flatten(1).mean(1)


def _blur(x: Tensor) -> Tensor:
    """Gaussian means where the window fits, channel by channel."""
    position = torch.arange(_SIZE, dtype=x.dtype, device=x.device) - _SIZE // 2
    window = torch.exp(-(position**2) / (2 * _SIGMA**2))
    window = window / window.sum()
    planes = x.flatten(0, 1).unsqueeze(1)
    planes = F.conv2d(F.conv2d(planes, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    return planes.view(*x.shape[:2], *planes.shape[2:])
