"""Gaussian noise.

    y = t + σn,   n ~ N(0, I)        mean t, variance σ²

When to choose it: electronic noise, many small errors, and whatever the literature compares on. `least-squares` is its
likelihood.

Reference: Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel Learning with Inexact Stochastic Gradients*, 2024.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from bltoolbox.plugin import Noise


class Gaussian(Noise):
    """Independent errors of the same standard deviation.

    Args:
        level: σ, in units of the image.
    """

    level: float

    def __init__(self, level: Annotated[float, Ge(0)] = 25 / 255) -> None:
        self.level = level

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        return t + self.level * torch.randn(t.shape, dtype=t.dtype, generator=generator)

    def mean(self, t: Tensor) -> Tensor:
        return t

    def variance(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.level**2)
