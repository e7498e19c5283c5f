"""Poisson–Gaussian noise: photon counts, read out with an electronic error.

    y = Poisson(p(t + b))/p + σn,   n ~ N(0, I)        mean t + b, variance (t + b)/p + σ²

When to choose it: cameras at low light, where both kinds of noise matter. y may be negative, which the data term
`poisson` refuses; `least-squares` with weights 1/variance is the usual approximation.

Reference: Foi, Trimeche, Katkovnik & Egiazarian, *Practical Poissonian–Gaussian noise modeling and fitting for
single-image raw-data*, IEEE TIP 2008.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_builtins.noises.counts import count
from bltoolbox.plugin import Noise


class PoissonGaussian(Noise):
    """Counts, divided by their peak, with Gaussian errors.

    Args:
        peak: p, the mean count of a value of 1.
        background: b, what is counted where the image is 0, in units of the image.
        sigma: σ of the electronic error, in units of the image.
    """

    def __init__(
        self,
        peak: Annotated[float, Gt(0)] = 100.0,
        background: Annotated[float, Ge(0)] = 0.01,
        sigma: Annotated[float, Ge(0)] = 0.02,
    ) -> None:
        self.peak = peak
        self.background = background
        self.sigma = sigma

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        counted = count(t, self.peak, self.background, generator)
        return counted + self.sigma * torch.randn(t.shape, dtype=t.dtype, generator=generator)

    def mean(self, t: Tensor) -> Tensor:
        return t + self.background

    def variance(self, t: Tensor) -> Tensor:
        return (t + self.background) / self.peak + self.sigma**2
