"""Uniform noise: errors of rounding.

    y = t + Δ(u − ½),   u ~ U[0, 1]        mean t, variance Δ²/12

When to choose it: coarse quantisation with Δ the width of a step, or a test with bounded errors.

Reference: Widrow & Kollár, *Quantization Noise*, Cambridge University Press 2008.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from bltoolbox.plugin import Noise


class Uniform(Noise):
    """Independent errors, equally likely within an interval around zero.

    Args:
        width: Δ, the width of the interval, in units of the image.
    """

    def __init__(self, width: Annotated[float, Ge(0)] = 0.1) -> None:
        self.width = width
        self.level = width / math.sqrt(12)

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        return t + self.width * (torch.rand(t.shape, dtype=t.dtype, generator=generator) - 0.5)

    def mean(self, t: Tensor) -> Tensor:
        return t

    def variance(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.width**2 / 12)
