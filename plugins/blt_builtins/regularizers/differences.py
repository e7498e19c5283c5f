"""Finite differences between neighbouring pixels, none across the border, and their adjoints.

(Dx)_0 = x_{i,j+1} − x_{i,j},   (Dx)_1 = x_{i+1,j} − x_{i,j},        ‖D‖² ≤ 8
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

#: A bound of ‖D‖² for images of any size: 4 for each of the two directions.
NORM = 8.0


def differences(x: Tensor) -> Tensor:
    """D x, (B, 2, C, H, W): horizontal and vertical differences of images, zero across the border."""
    t = x.new_zeros(len(x), 2, *x.shape[1:])
    t[:, 0, :, :, :-1] = x[:, :, :, 1:] - x[:, :, :, :-1]
    t[:, 1, :, :-1] = x[:, :, 1:] - x[:, :, :-1]
    return t


def differences_adjoint(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Dᵀ t, images of ``shape`` (C, H, W)."""
    x = t.new_zeros(len(t), *shape)
    x[:, :, :, 1:] += t[:, 0, :, :, :-1]
    x[:, :, :, :-1] -= t[:, 0, :, :, :-1]
    x[:, :, 1:] += t[:, 1, :, :-1]
    x[:, :, :-1] -= t[:, 1, :, :-1]
    return x
