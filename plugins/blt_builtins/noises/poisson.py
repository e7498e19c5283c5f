"""Poisson noise: photon counts.

    y = Poisson(p(t + b))/p        mean t + b, variance (t + b)/p

with peak p and background b. The background stays in y, where the data term `poisson` of the same peak and background
expects it.

When to choose it: few photons, as in fluorescence, emission tomography and low light.

Reference: Bertero, Boccacci, Desiderà & Vicidomini, *Image deblurring with Poisson data*, Inverse Problems 2009.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_builtins.noises.counts import count
from bltoolbox.plugin import Noise


class PoissonNoise(Noise):
    """Counts, divided by their peak.

    Args:
        peak: p, the mean count of a value of 1.
        background: b, what is counted where the image is 0, in units of the image.
    """

    def __init__(
        self, peak: Annotated[float, Gt(0)] = 100.0, background: Annotated[float, Ge(0)] = 0.01
    ) -> None:
        self.peak = peak
        self.background = background

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        return count(t, self.peak, self.background, generator)

    def mean(self, t: Tensor) -> Tensor:
        return t + self.background

    def variance(self, t: Tensor) -> Tensor:
        return (t + self.background) / self.peak
