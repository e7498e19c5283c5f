"""Speckle: multiplicative noise.

    y = t·s,   s ~ Gamma(L, 1/L)        mean t, variance t²/L

with L looks: the average of L independent exponential intensities.

When to choose it: coherent imaging, as in synthetic-aperture radar, ultrasound and laser images.

Reference: Goodman, *Some fundamental properties of speckle*, J. Opt. Soc. Am. 1976.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import Noise


class Speckle(Noise):
    """A random factor of mean 1 for every value.

    Args:
        looks: L; the standard deviation of the factor is 1/√L.
    """

    def __init__(self, looks: Annotated[float, Gt(0)] = 10.0) -> None:
        self.looks = looks

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        shape = torch.full(t.shape, self.looks, dtype=t.dtype)
        return t * torch._standard_gamma(shape, generator=generator) / self.looks

    def mean(self, t: Tensor) -> Tensor:
        return t

    def variance(self, t: Tensor) -> Tensor:
        return t.square() / self.looks
