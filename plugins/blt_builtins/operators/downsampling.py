"""Downsampling: the mean of each block of pixels.

    (A x)_p = 1/s² Σ_{q in block p} x_q,        block p of s × s pixels

A Aᵀ = s⁻² I, so ‖A‖² = s⁻² exactly; AᵀA is singular for s > 1. Constant images keep their value. A solve starts from
the bilinear interpolation of y.

When to choose it: super-resolution, for example for a camera whose pixels integrate the light.

Reference: Park, Park & Kang, *Super-resolution image reconstruction: a technical overview*, IEEE SPM 2003.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Gt
from torch import Tensor
from torch.nn import functional as F

from bltoolbox.plugin import Operator, Rows, Theta


class Downsampling(Operator):
    """The mean of each block of pixels.

    Args:
        factor: side s of the blocks; must divide the height and the width of the images.
    """

    def __init__(self, factor: Annotated[int, Gt(0)] = 2) -> None:
        self.factor = factor

    def check(self, shape: Sequence[int]) -> str | None:
        if shape[1] % self.factor or shape[2] % self.factor:
            return (
                f"factor {self.factor} does not divide the {shape[1]}×{shape[2]} images;"
                " use another factor, or crop the images to a multiple of it"
            )
        return None

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        if sentence := self.check(x.shape[1:]):
            raise ValueError(sentence)
        return F.avg_pool2d(x, self.factor)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        spread = y.repeat_interleave(self.factor, dim=2).repeat_interleave(self.factor, dim=3)
        return spread / self.factor**2

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return F.interpolate(y, scale_factor=self.factor, mode="bilinear", align_corners=False)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        return 1.0 if self.factor == 1 else 0.0, 1 / self.factor**2
