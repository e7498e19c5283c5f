"""The derivatives of total generalized variation, of an image and a vector w at each of its pixels, and their adjoint.

    (x, w) ↦ (Dx − w, Ew),        Ew = (∂_h w_h,  ∂_v w_v,  (∂_v w_h + ∂_h w_v)/√2)

No difference reaches across the border, where Dx − w has no component either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blt_builtins.regularizers.differences import differences, differences_adjoint
from bltoolbox.plugin import image_layout

#: Components of Dx − w and of Ew at a pixel.
FIRST, SECOND = 2, 3


def derivatives(x: Tensor) -> Tensor:
    """(B, 5, C, H, W): Dx − w and Ew of an image with w in two further channels for each of its own."""
    channels = x.shape[1] // 3
    image, w = x[:, :channels], x[:, channels:].unflatten(1, (2, channels))
    t = x.new_zeros(len(x), FIRST + SECOND, *image.shape[1:])
    t[:, :2] = differences(image)
    t[:, 0, :, :, :-1] -= w[:, 0, :, :, :-1]
    t[:, 1, :, :-1] -= w[:, 1, :, :-1]
    t[:, 2, :, :, 1:] = w[:, 0].diff(dim=3)
    t[:, 3, :, 1:] = w[:, 1].diff(dim=2)
    t[:, 4, :, :-1] = w[:, 0].diff(dim=2) / math.sqrt(2)
    t[:, 4, :, :, :-1] += w[:, 1].diff(dim=3) / math.sqrt(2)
    return t


def derivatives_adjoint(t: Tensor, shape: Sequence[int]) -> Tensor:
    """The adjoint, for images of this shape (with the channels of w)."""
    channels, *sides = shape
    image = differences_adjoint(t[:, :2], (channels // 3, *sides))
    w = t.new_zeros(len(t), 2, *image.shape[1:])
    mixed = t[:, 4] / math.sqrt(2)
    w[:, 0, :, :, :-1] -= t[:, 0, :, :, :-1]
    w[:, 1, :, :-1] -= t[:, 1, :, :-1]
    _add_adjoint_difference(w[:, 0], t[:, 2, :, :, 1:], 3)
    _add_adjoint_difference(w[:, 1], t[:, 3, :, 1:], 2)
    _add_adjoint_difference(w[:, 0], mixed[:, :, :-1], 2)
    _add_adjoint_difference(w[:, 1], mixed[:, :, :, :-1], 3)
    return image_layout(torch.cat([image, w.flatten(1, 2)], dim=1))


def _add_adjoint_difference(w: Tensor, t: Tensor, dim: int) -> None:
    """Add to w what the adjoint of a difference along ``dim`` makes of t."""
    length = t.shape[dim]
    w.narrow(dim, 1, length).add_(t)
    w.narrow(dim, 0, length).sub_(t)
