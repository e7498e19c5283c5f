"""Recorrupted measurements: a loss without true images.

    y₁ = y + αn,   y₂ = y − n/α,   n ~ N(0, σ²I)        g(x) = s·‖A x − y₂‖²,   ∇g = 2s Aᵀ(A x − y₂),   L_g = 2s‖A‖²

The lower level sees y₁ and the loss y₂. Where y has Gaussian noise of level σ, the noises of y₁ and y₂ are independent,
and for m measurements

    E g(x̂(y₁)) = s·(E‖A x̂(y₁) − A x*‖² + mσ²(1 + 1/α²)),

so that the constant apart it is the squared error of the measurements. Nothing is learned about the null space of A.
For other noise it is an approximation.

In training the noise is √(1 + α²) times as strong as in y. Where the data term allows it, R is therefore rescaled by
1/√(1 + α²) when measurements are restored as they are, in evaluations and by `blt apply`; this is approximate, and the
more so the larger α is. The alternative, the mean of x̂(y + αn) over draws of n, costs a solve for each draw and was no
better for `denoise-unsupervised` (rescaled 29.49 dB; the mean over 1, 2, 4 and 8 draws 28.93, 29.18, 29.32 and
29.38 dB), so it is not offered. With other data terms R stays as it is trained. A small α adds little noise to y₁ and
much to y₂: the loss then varies more, and more samples or steps are needed.

When to choose it: training on noisy measurements alone, with `validation: {metric: loss}` where no true images are
known at all.

Reference: Pang, Zheng, Quan & Ji, *Recorrupted-to-recorrupted: unsupervised deep learning for image denoising*, CVPR
2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import Bound, Forward, Sample, Upper, UpperLoss, dot


class Recorrupted(UpperLoss):
    """The squared distance to measurements that were made noisier in another way.

    Args:
        alpha: α, how much noise is added to what the lower level sees.
        sigma: σ, the noise level of the measurements; that of `noise` by default.
        scale: s, by which the loss is multiplied; steps and accuracies of the upper level scale with it.
    """

    needs_truth = False

    def __init__(
        self,
        alpha: Annotated[float, Gt(0)] = 0.5,
        sigma: Annotated[float, Gt(0)] | None = None,
        scale: Annotated[float, Gt(0)] = 1.0,
    ) -> None:
        self.alpha = alpha
        self.sigma = sigma
        self.scale = scale
        self.noise_gain = math.sqrt(1 + alpha**2)

    def check_noise(self, level: float | None) -> str | None:
        if self.sigma is None and level is None:
            return "the noise of the measurements has no known level; give it as sigma, e.g. sigma: 25/255"
        if self.sigma is None and level == 0:
            return "the measurements have no noise; use another loss, or give noise"
        return None

    def split(
        self, y: Tensor, level: float | None, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        sigma = level if self.sigma is None else self.sigma
        if sigma is None:
            raise ValueError(f"recorrupted: {self.check_noise(level)}")
        noise = sigma * torch.randn(y.shape, dtype=y.dtype, generator=generator)
        return y + self.alpha * noise, y - noise / self.alpha

    def bind(self, sample: Sample, forward: Forward) -> Upper:
        if sample.target is None:
            raise ValueError("recorrupted compares with measurements that it has split, and these are whole")
        return _Misfit(forward, sample.target, self.scale)


@dataclass(frozen=True)
class _Misfit(Upper):
    """s·‖A x − y₂‖², summed in float64."""

    forward: Forward
    target: Tensor
    scale: float

    convex = True
    infimum = 0.0

    @property
    def lipschitz(self) -> Bound:  # type: ignore[override]
        squared = self.forward.squared_norm
        return None if squared is None else 2 * self.scale * squared

    def value(self, x: Tensor) -> Tensor:
        return self.scale * dot(difference := (self.forward(x) - self.target).double(), difference)

    def gradient(self, x: Tensor) -> Tensor:
        return 2 * self.scale * self.forward.adjoint(self.forward(x) - self.target)

    def take(self, index: Tensor) -> Upper:
        return _Misfit(self.forward.take(index), self.target[index], self.scale)
