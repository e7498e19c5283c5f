"""Gaussian noise of a level that differs from image to image.

    y = t + σn,   n ~ N(0, I),   log σ uniform between log of the least and log of the most        mean t

Each image has one level for all its pixels, drawn once with the noise, so it is the same in every epoch. ``level`` is
None, since no number describes all images; `noise-aware` knows the level of each, other regularizers do with all alike.

When to choose it: to train one model for a range of noise levels.

Reference: Zhang, Zuo, Chen, Meng & Zhang, *Beyond a Gaussian denoiser: residual learning of deep CNN for image
denoising*, IEEE TIP 2017, who train one network for a range.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import Noise


class GaussianRange(Noise):
    """Independent errors of one standard deviation per image, drawn from a range.

    Args:
        least: the smallest σ, in units of the image.
        most: the largest.
    """

    def __init__(
        self, least: Annotated[float, Gt(0)] = 5 / 255, most: Annotated[float, Gt(0)] = 50 / 255
    ) -> None:
        if most < least:
            raise ValueError(f"most {most:g} is smaller than least {least:g}; exchange them")
        self.least = least
        self.most = most

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        level = self.level_of(generator)
        return t + level * torch.randn(t.shape, dtype=t.dtype, generator=generator)

    def level_of(self, generator: torch.Generator) -> float:
        share = float(torch.rand((), dtype=torch.float64, generator=generator))
        return self.least * (self.most / self.least) ** share

    def mean(self, t: Tensor) -> Tensor:
        return t

    def variance(self, t: Tensor) -> Tensor:
        """Of all images together: the mean of σ²."""
        span = 2 * math.log(self.most / self.least)
        mean_square = self.least**2 if span == 0 else (self.most**2 - self.least**2) / span
        return torch.full_like(t, mean_square)
