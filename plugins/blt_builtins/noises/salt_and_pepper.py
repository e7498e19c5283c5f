"""Salt-and-pepper noise: values that are lost.

    y = t with probability 1 − q, low or high with probability q/2 each

For low = 0 and high = 1 the mean is (1 − q)t + q/2 and the variance q(1 − q)(t − ½)² + q/4.

When to choose it: dead pixels, transmission errors. The data terms `huber` and `student-t` tolerate such outliers,
`least-squares` does not.

Reference: Nikolova, *A variational approach to remove outliers and impulse noise*, J. Math. Imaging Vis. 2004.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from bltoolbox.plugin import Noise


class SaltAndPepper(Noise):
    """Some values are replaced by the lowest or the highest one.

    Args:
        fraction: q, the probability that a value is lost.
        low: What half of the lost values are read as.
        high: What the other half are read as.
    """

    def __init__(
        self, fraction: Annotated[float, Ge(0), Le(1)] = 0.1, low: float = 0.0, high: float = 1.0
    ) -> None:
        if low >= high:
            raise ValueError(f"low {low:g} is not below high {high:g}")
        self.fraction = fraction
        self.low = low
        self.high = high

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(t.shape, dtype=t.dtype, generator=generator)
        extreme = torch.where(chance < self.fraction / 2, self.low, self.high).to(t)
        return torch.where(chance < self.fraction, extreme, t)

    def mean(self, t: Tensor) -> Tensor:
        return (1 - self.fraction) * t + self.fraction * (self.low + self.high) / 2

    def variance(self, t: Tensor) -> Tensor:
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return self.fraction * ((1 - self.fraction) * (t - middle).square() + half**2)
