"""Inpainting: some pixels are known, the others are missing.

    (A x)_p = m_p x_p,        m_p ∈ {0, 1}

y has the shape of the image, with zeros and no noise at the missing pixels. The mask is the same for all channels and
samples: `missing` is the exact fraction of missing pixels, and which ones depends only on `seed` and the size of the
image; or the mask comes from an ``.npy`` file, or from a picture that is dark where pixels are missing. Data may
provide a `mask` of shape (B, H, W) in their context, one per sample, which replaces it. A = Aᵀ = A², so ‖A‖ = 1; AᵀA
is singular unless no pixel is missing.

A solve starts from the image with each missing pixel replaced by the mean of the known ones in the smallest window
around it (3×3, 5×5, 9×9, …) that has any.

When to choose it: filling in lost pixels, scratches or text. Where a hole is wider than the filters of the
regularizer, the minimiser may not be unique: set `strong_convexity` in the recipe.

Reference: Bertalmio, Sapiro, Caselles & Ballester, *Image inpainting*, SIGGRAPH 2000.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.operators.arrays import misfit, read_picture_mask
from bltoolbox.plugin import Bound, Constant, Operator, Rows, Theta, keyed_generator, lasting


class Inpainting(Operator):
    """Known and missing pixels.

    Args:
        missing: fraction of the pixels that are missing.
        seed: seed of the choice of missing pixels.
        mask: path of an .npy file, 1 for known pixels and 0 for missing ones, or of a picture; null for a random mask.
    """

    def __init__(
        self,
        missing: Annotated[float, Ge(0), Lt(1)] = 0.5,
        seed: int = 0,
        mask: str | None = None,
    ) -> None:
        self.missing = missing
        self.seed = seed
        self.mask = None if mask is None else Constant(read_picture_mask(mask))

    def check(self, shape: Sequence[int]) -> str | None:
        return misfit(self.mask, (shape[1], shape[2]))

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return x * self.mask_for(x, context)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return y * self.mask_for(y, context)

    def measured(self, y: Tensor, context: Rows) -> Tensor:
        return self.mask_for(y, context)

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return fill(y, self.mask_for(y, context))

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        if "mask" in context:
            return context["mask"].double().amin((1, 2)), 1.0
        if self.mask is None:
            return 1.0 if _missing(self.missing, shape[1] * shape[2]) == 0 else 0.0, 1.0
        return float(self.mask.value.min()), 1.0

    def crop(self, rows: slice, columns: slice, shape: Sequence[int]) -> Inpainting:
        cut = copy.copy(self)
        whole = self.mask_for(torch.empty(1, 1, *shape[1:]), {})
        cut.mask = Constant(whole[rows, columns])
        return cut

    def example_contexts(self, shape: Sequence[int], count: int) -> list[Rows]:
        generator = keyed_generator("inpainting", "example", count)
        return [{}, {"mask": torch.rand(count, *shape[1:], generator=generator) < 0.7}]

    def mask_for(self, x: Tensor, context: Rows) -> Tensor:
        """The mask for images like ``x``: (H, W), or (B, 1, H, W) if each sample has its own."""
        if "mask" in context:
            mask = context["mask"]
            if mask.ndim != 3 or mask.shape[1:] != x.shape[2:]:
                raise ValueError(
                    f"mask in the context of the data has the shape {tuple(mask.shape)}, but inpainting needs"
                    f" (B, {x.shape[2]}, {x.shape[3]})"
                )
            return mask.to(x).unsqueeze(1)
        if self.mask is None:
            return random_mask(self.missing, self.seed, x.shape[2], x.shape[3], x.dtype, x.device)
        if sentence := self.check(x.shape[1:]):
            raise ValueError(sentence)
        return self.mask.like(x)


@lru_cache(maxsize=16)
def random_mask(
    missing: float, seed: int, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A mask with an exact fraction of zeros; cached, since every product with A uses it."""
    order = torch.randperm(height * width, generator=keyed_generator("inpainting", seed, height, width))
    with lasting():
        mask = torch.ones(height * width, dtype=dtype)
        mask[order[: _missing(missing, height * width)]] = 0
        return mask.view(height, width).to(device)


def _missing(fraction: float, pixels: int) -> int:
    """The number of missing pixels, such that at least one is known."""
    return min(round(fraction * pixels), pixels - 1)


def fill(y: Tensor, mask: Tensor) -> Tensor:
    """y with each missing pixel replaced by the mean of the known ones around it."""
    mask = mask.view(-1, 1, *mask.shape[-2:])
    filled, empty, radius = y * mask, mask == 0, 1
    # Where nothing at all is known, as in a tile within a hole, zeros are left.
    while radius <= 2 * max(mask.shape[2:]) and bool(empty.any()):
        count = _window_mean(mask, radius)
        here = empty & (count > 0)
        mean = _window_mean(y * mask, radius) / torch.where(here, count, 1.0)
        filled = torch.where(here, mean, filled)
        empty, radius = empty & ~here, 2 * radius
    return filled


def _window_mean(x: Tensor, radius: int) -> Tensor:
    """Mean over the (2 radius + 1)² window of each pixel, counting zeros beyond the border."""
    for size, padding in (((2 * radius + 1, 1), (radius, 0)), ((1, 2 * radius + 1), (0, radius))):
        x = F.avg_pool2d(x, size, stride=1, padding=padding)
    return x
