"""The identity: A x = x, so that y = x* + noise.

When to choose it: denoising. The data term alone makes the lower level 1-strongly convex, so every accuracy is
certified.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bltoolbox.plugin import Operator, Rows, Theta


class Identity(Operator):
    """A x = x, for denoising."""

    identity = True

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return x

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return y

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        return 1.0, 1.0

    def symbol(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return torch.ones(tuple(shape[1:]), dtype=torch.float64)
