"""Tikhonov regularization: a learned weight on the squared norm of the gradient, or of the image.

    R_θ(x) = ½ e^{θ_0} ‖Dx‖²        D = ∇ (forward differences, none across the border) or D = I

R is quadratic: with a quadratic data term x̂ is linear in y, ∇²R does not depend on x, and its constants are exact:
‖∇‖² = Σ over both axes of 4 sin²(π(n−1)/(2n)), the largest eigenvalue of the Laplacian of a line of n pixels.

When to choose it: as a baseline with one parameter that blurs edges, to test a new method where everything is known,
or as the ridge (`of: identity`) that makes a singular problem strongly convex with a learned constant.

Reference: Tikhonov & Arsenin, *Solutions of Ill-Posed Problems*, 1977.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.symbols import difference_symbols, separate_channels
from bltoolbox.plugin import Regularizer, Theta


class Tikhonov(Regularizer):
    """A squared norm with a learned weight.

    Args:
        weight: initial weight e^{θ_0}.
        of: the squared quantity: the gradient of the image, or the image itself.
    """

    def __init__(
        self, weight: Annotated[float, Gt(0)] = 0.1, of: Literal["gradient", "identity"] = "gradient"
    ) -> None:
        self.weight = weight
        self.of = of

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.full((1,), math.log(self.weight), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return 0.5 * theta["log_weight"].exp() * t.square().flatten(1).sum(1)

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return 0.5 * theta["log_weight"].exp() * t.square().flatten(1, -3).sum(1)

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        return theta["log_weight"].exp() * self.synthesise(theta, self.analyse(theta, x), x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        return _Hessian(self, theta, self.majorant(theta, self.analyse(theta, x)))

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        product = self.analyse(theta, x) * self.analyse(theta, q)
        return theta["log_weight"].exp() * product.flatten(1).sum(1)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        # R is e^{θ_0} times a term that does not depend on θ.
        return {"log_weight": self.pairing(theta, x, q).unsqueeze(1)}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return (theta["log_weight"].exp() * self.analysis_norm(theta, shape)).squeeze()

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor | float:
        # Constant images have no gradient.
        return 0.0 if self.of == "gradient" else theta["log_weight"].exp().squeeze()

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        """Dx: (B, 2, C, H, W) for the gradient, horizontal and vertical, zero across the border."""
        if self.of == "identity":
            return x
        right = torch.diff(x, dim=3, append=x[:, :, :, -1:])
        down = torch.diff(x, dim=2, append=x[:, :, -1:])
        return torch.stack([right, down], dim=1)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        if self.of == "identity":
            return t
        right, down = t[:, 0, :, :, :-1], t[:, 1, :, :-1]
        along = -torch.diff(right, dim=3, prepend=_zeros(t, 3), append=_zeros(t, 3))
        return along - torch.diff(down, dim=2, prepend=_zeros(t, 2), append=_zeros(t, 2))

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return theta["log_weight"].exp().view(-1, *(1,) * (t.ndim - 1)).expand_as(t)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> float:
        if self.of == "identity":
            return 1.0
        return sum(4 * math.sin(math.pi * (n - 1) / (2 * n)) ** 2 for n in shape[1:])

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        # ∇²R does not depend on x: P is exact for (almost) any operator with a symbol.
        if self.of == "identity":
            channels = curvature.view(-1, shape[0], 1, 1).expand(-1, *shape)
        else:
            channels = torch.einsum("bkc,khw->bchw", curvature, difference_symbols(shape, curvature))
        return separate_channels(channels)

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        return 0.5 * theta["log_weight"].exp() * t.square().flatten(1).sum(1, dtype=torch.float64)

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        return 0.5 * (-theta["log_weight"]).exp() * p.square().flatten(1).sum(1, dtype=torch.float64)

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        return t / (1 + step * theta["log_weight"].exp())


class _Hessian:
    """v ↦ e^{θ_0} DᵀD v, the same for every x and hence for every selection of samples."""

    def __init__(self, regularizer: Tikhonov, theta: Theta, curvature: Tensor) -> None:
        self.regularizer = regularizer
        self.theta = theta
        self.curvature = curvature

    def __call__(self, v: Tensor) -> Tensor:
        return self.regularizer.gradient(self.theta, v)

    def take(self, index: Tensor) -> _Hessian:
        return _Hessian(self.regularizer, self.theta, self.curvature[index])


def _zeros(t: Tensor, dim: int) -> Tensor:
    """A line of zeros at the border of an image, across ``dim``."""
    shape = [len(t), *t.shape[2:]]
    shape[dim] = 1
    return t.new_zeros(shape)
