"""No noise.

    y = t

When to choose it: to study an operator by itself, or with an operator whose measurements are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.plugin import Noise


class NoNoise(Noise):
    """Exact measurements."""

    level = 0.0

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        return t

    def mean(self, t: Tensor) -> Tensor:
        return t

    def variance(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)
