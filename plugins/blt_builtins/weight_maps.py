"""Maps of positive weights e^w, one for each place: on a grid that is interpolated, or one per pixel.

e^w, w on rows × columns;        roughness Σ |∇w|², differences of neighbouring entries
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def flat_map(shape: Sequence[int], grid: int | None) -> Tensor:
    """w = 0 with ``grid`` rows and columns, or an entry for each pixel of images of ``shape`` (C, H, W)."""
    return torch.zeros(tuple(shape[-2:]) if grid is None else (grid, grid), dtype=torch.float64)


def roughness(w: Tensor) -> Tensor:
    """Σ |∇w|²."""
    return w.diff(dim=0).square().sum() + w.diff(dim=1).square().sum()


def weights_at(w: Tensor, size: Sequence[int]) -> Tensor:
    """e^w at each of the places (H, W), between the entries by bilinear interpolation of w."""
    if w.shape != tuple(size):
        w = F.interpolate(w[None, None], tuple(size), mode="bilinear", align_corners=True)[0, 0]
    return w.exp()


def extremes(w: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest weight: values between the entries of w are means of them."""
    return w.detach().min().exp(), w.detach().max().exp()
