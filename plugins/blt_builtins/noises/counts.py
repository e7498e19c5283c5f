"""Counting photons, for the noises that do."""

from __future__ import annotations

import torch
from torch import Tensor

#: Rounding may leave dark places below zero by this, relative to the brightest one.
_ROUNDING = 1e-6


def count(t: Tensor, peak: float, background: float, generator: torch.Generator) -> Tensor:
    """Poisson(p(t + b))/p; a ValueError where the mean of a count would be negative."""
    mean = t + background
    least = float(mean.min())
    if least < -_ROUNDING * max(1.0, float(mean.max())):
        raise ValueError(
            f"a mean count cannot be negative, and A x + background falls to {least:.3g}; use gaussian noise"
        )
    return torch.poisson(peak * mean.clamp_min(0), generator=generator) / peak
