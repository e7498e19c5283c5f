"""Smoothed isotropic total variation.

    R_θ(x) = e^{θ_0} Σ_p (√(|Dx|_p² + ν²) − ν),        |Dx|_p² = Σ_c (∂_h x_c)_p² + (∂_v x_c)_p²

Forward differences, none across the border. With `channels: joint`, the edges of all channels are coupled
(vectorial TV); with `separate`, each channel has its own sum. Parameters: log-weight θ_0 and log ν.

When to choose it: as the classical baseline; its two parameters need hardly any training data.

References: Rudin, Osher & Fatemi, *Nonlinear total variation based noise removal algorithms*, Physica D 1992;
Blomgren & Chan, *Color TV*, IEEE TIP 1998.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.regularizers.differences import NORM, differences, differences_adjoint
from blt_builtins.regularizers.filter_constants import THIRD
from blt_builtins.symbols import difference_symbols, separate_channels
from bltoolbox.plugin import Constants, Potentials, Regularizer, Theta, norm


class TotalVariation(Regularizer):
    """Smoothed isotropic total variation.

    Args:
        weight: initial weight e^{θ_0}.
        nu: initial smoothing ν.
        channels: whether the channels share their edges.
    """

    cheap = True

    def __init__(
        self,
        weight: Annotated[float, Gt(0)] = 0.1,
        nu: Annotated[float, Gt(0)] = 0.01,
        channels: Literal["joint", "separate"] = "joint",
    ) -> None:
        self.weight = weight
        self.nu = nu
        self.channels = channels

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "log_weight": torch.full((1,), math.log(self.weight), dtype=torch.float64),
            "log_smoothing": torch.full((1,), math.log(self.nu), dtype=torch.float64),
        }

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        nu = theta["log_smoothing"].exp()
        length = self._length(theta, self.analyse(theta, x))
        return theta["log_weight"].exp() * (length - nu).sum((1, 2, 3, 4))

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        length = self._length(theta, self.analyse(theta, x))
        return theta["log_weight"].exp() * (length - theta["log_smoothing"].exp()).sum((1, 2))

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return self.synthesise(theta, self.majorant(theta, t) * t, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        t = self.analyse(theta, x)
        length = self._length(theta, t)
        return _Hessian(self, theta, t / length, theta["log_weight"].exp() / length)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return (self.majorant(theta, t) * t * self.analyse(theta, q)).sum((1, 2, 3, 4))

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        # ψ'' ≤ a/ν.
        return (NORM * (theta["log_weight"] - theta["log_smoothing"]).exp()).squeeze()

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        a, nu = theta["log_weight"].exp().squeeze(), theta["log_smoothing"].exp().squeeze()
        t = self.analyse(theta, x)
        length = self._length(theta, t)
        columns = [self.synthesise(theta, a * t / length, x.shape[1:])]
        columns.append(self.synthesise(theta, a * nu.square() * t / length.pow(3), x.shape[1:]))
        # |D³ψ| ≤ 0.8587/ν², the two differences at a pixel together have norm √3, and both columns of B are
        # Lipschitz with a‖D‖²/ν.
        hessian = THIRD / nu.square() * a * NORM * math.sqrt(3)
        mixed = math.sqrt(2) * NORM * a / nu
        return Constants(
            hessian_lipschitz=hessian.expand_as(radius),
            mixed_lipschitz=mixed.expand_as(radius),
            mixed_norm=torch.stack([norm(column) for column in columns]).norm(dim=0),
        )

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        """(B, 2, C, H, W): horizontal and vertical differences, zero across the border."""
        return differences(x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return differences_adjoint(t, shape)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return (theta["log_weight"].exp() / self._length(theta, t)).expand_as(t)

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        channels = torch.einsum("bkc,khw->bchw", curvature, difference_symbols(shape, curvature))
        return separate_channels(channels)

    def potentials(self, theta: Theta) -> Potentials:
        weight, nu = theta["log_weight"].exp(), theta["log_smoothing"].exp()
        t = torch.linspace(-10, 10, 201, dtype=nu.dtype, device=nu.device) * nu
        return Potentials(t, (weight * ((t.square() + nu.square()).sqrt() - nu)).unsqueeze(0), weight)

    def _length(self, theta: Theta, t: Tensor) -> Tensor:
        """√(|Dx|² + ν²) at each pixel."""
        return (self._sum(t.square()) + (2 * theta["log_smoothing"]).exp()).sqrt()

    def _sum(self, t: Tensor) -> Tensor:
        return t.sum((1, 2), keepdim=True) if self.channels == "joint" else t.sum(1, keepdim=True)


@dataclass(frozen=True)
class _Hessian:
    """v ↦ Dᵀ w(Dv − e⟨e, Dv⟩) with e = Dx/√(|Dx|² + ν²) and w = e^{θ_0}/√(|Dx|² + ν²)."""

    regularizer: TotalVariation
    theta: Theta
    direction: Tensor
    weight: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        t = self.regularizer.analyse(self.theta, v)
        along = self.direction * self.regularizer._sum(self.direction * t)
        return self.regularizer.synthesise(self.theta, self.weight * (t - along), v.shape[1:])

    @property
    def curvature(self) -> Tensor:
        """The diagonal of ψ''."""
        return self.weight * (1 - self.direction.square())

    def take(self, index: Tensor) -> _Hessian:
        return _Hessian(self.regularizer, self.theta, self.direction[index], self.weight[index])
