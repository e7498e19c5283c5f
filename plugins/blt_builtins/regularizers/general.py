"""General Fields of Experts: filters as stacks of small convolutions, potentials as learned mixtures.

    R_θ(x) = Σ_j a_j Σ_p ψ_j((C x)_jp),        C = C_L ⋯ C_1,   ψ_j = Σ_k w_jk φ_{ν_jk},   φ_ν(t) = √(t² + ν²) − ν

with a_j = e^{θ_0 + θ_j}, shares w_jk ≥ 0 that add up to one over k, and ν_jk = ν_j r^k on a geometric grid whose ratio
r is learned. So R is convex and smooth, the slope of ψ_j tends to a_j as in `foe`, and how it gets there is learned: a
mixture of smoothed absolute values has the place and the width of its bend in each filter. Each ingredient is switched
on by itself:

* `layers` and `channels`: C is a composition of convolutions, without bias, of the given sides. Sides 11 and 3 see
  13×13 pixels, and with few channels between them that costs less than full kernels; powers of two compute fast. Only
  the first layer has zero mean. In colour, ``start: dct`` spreads few channels over all colour axes. One layer stands
  for full kernels.
* `components`: the number of smoothed absolute values in each mixture; 1 for the potential of `foe`.
* `profile`: shares of each filter, or one profile of all filters; with ``smoothing: per-filter`` this profile has one
  scale per filter.

With one layer and one component it is `foe`, number for number. Two groups of ingredients are components of their own:
`pooled-foe` has norms of groups of filters, and `noise-aware` makes potentials depend on the noise level.

Gradient and Hessian products are analytic: C and Cᵀ once each, with the curvature stored. As √(s + ν²) is concave in
s = t², so is a mixture, and `mm` has its majorant weights Σ_k w_jk/√(t² + ν_jk²). The Lipschitz constant is certified,
‖Σ_j a_j (Σ_k w_jk/ν_jk) C_jᵀC_j‖ bounded by ``stacked_bound``; for stacks at mirrored or zero borders up to a
probability of 1e-10, as for `foe`. No bound on third derivatives is implemented, so error bounds of hypergradients are
estimated.

When to choose it: for large kernels at low cost, above all in colour. In gray denoising no ingredient made it more
accurate than `foe` with as many steps (docs/results.md).

References: Goujon, Neumayer, Bohra, Ducotterd & Unser, *A neural-network-based convex regularizer for inverse
problems*, IEEE TCI 2023, whose filters are stacks, too; Chen, Ranftl & Pock, *Insights into analysis operator
learning*, IEEE TIP 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, MinLen
from torch import Tensor

from blt_builtins.regularizers.filters import Boundary, FilterBank
from blt_builtins.regularizers.foe import (
    FieldOfExperts,
    NormalForm,
    Planes,
    Potential,
    SmoothedAbs,
    Start,
    amplitudes,
    from_scaled_basis,
    initial_kernels,
    to_scaled_basis,
    without_constants,
)
from blt_builtins.regularizers.stack import Stack, composed, initial_layers, stacked_bound, unfitting
from bltoolbox.plugin import Potentials, Regularizer, Theta

#: A gradient step changes shares of a mixture as fast as other steps change their parameters.
_STEEPNESS = 2.0
#: The initial share of the first component, the narrowest: with equal shares training loses filters, whose potentials
#: become so wide that nothing pulls them back.
_FIRST_SHARE = 0.8
#: Points at which potentials are drawn, on each side of zero.
_POINTS = 100


class GeneralExperts(FieldOfExperts):
    """Learned filters, full or as stacks of small convolutions, under learned mixtures of smoothed absolute values.

    Args:
        filters: number J of filters.
        layers: sides of the kernels of each layer, the one that sees the image first; one for full kernels.
        channels: responses of each layer but the last, which has one for each filter.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        smoothing: one ν shared by all filters, or one per filter.
        components: number of smoothed absolute values in the potential of a filter.
        profile: whether every filter has shares of its own, or all have the same.
        nu: initial smoothing ν of the first component.
        ratio: initial ratio r of the ν of a component and that of the one before.
        weight: initial weight e^{θ_0 + θ_j} of a filter of unit norm.
        start: initial kernels of the first layer: finite differences in the colour axes, the smoothest cosines, or
            Gaussian noise.
        least_nu: the smallest ν that training may choose. Below half a step of 8 bits or so, a smaller one hardly
            changes images, but costs iterations.
    """

    # What `foe` has for one bank and one smoothed absolute value only.
    pairing_gradients = Regularizer.pairing_gradients
    constants = Regularizer.constants

    def __init__(
        self,
        filters: Annotated[int, Gt(0), Le(4096)] = 48,
        layers: Annotated[tuple[Annotated[int, Ge(1), Le(63)], ...], MinLen(1)] = (11, 3),
        channels: tuple[Annotated[int, Gt(0), Le(4096)], ...] = (8,),
        boundary: Boundary = "symmetric",
        smoothing: Literal["shared", "per-filter"] = "per-filter",
        components: Annotated[int, Ge(1), Le(16)] = 3,
        profile: Literal["per-filter", "shared"] = "per-filter",
        nu: Annotated[float, Gt(0)] = 0.01,
        ratio: Annotated[float, Ge(1)] = 4.0,
        weight: Annotated[float, Gt(0)] = 0.04,
        start: Start = "differences",
        least_nu: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        trouble = unfitting(layers, channels)
        if trouble is None and layers[0] < 2:
            trouble = (
                "the first layer has kernels of one pixel, without a change to see; use a side of at least 2"
            )
        if trouble is not None:
            raise ValueError(trouble)
        reach = 1 + sum(side - 1 for side in layers)
        super().__init__(filters, reach, boundary, smoothing, nu, weight, start, "dct", least_nu)
        self.layers = tuple(layers)
        self.channels = tuple(channels)
        self.components = components
        self.profile = profile
        self.ratio = ratio

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"filters": 4, "layers": [3, 3], "channels": [2], "components": 2, "nu": 0.1}

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        counts = (*self.channels, self.filters)
        first = initial_kernels(self.start, counts[0], shape[0], self.layers[0], generator)
        kernels = [to_scaled_basis(layer) for layer in initial_layers(first, counts[1:], self.layers[1:])]
        several = self.filters if self.smoothing == "per-filter" else 1
        return {
            **dict(zip(self._names, kernels, strict=True)),
            "log_weights": torch.zeros(self.filters, dtype=torch.float64),
            "log_scale": torch.full((1,), math.log(self.weight), dtype=torch.float64),
            "log_smoothing": torch.full((several,), math.log(self.nu), dtype=torch.float64),
            **(self._initial_mixture() if self.components > 1 else {}),
        }

    def _initial_mixture(self) -> dict[str, Tensor]:
        rows = self.filters if self.profile == "per-filter" else 1
        shares = torch.zeros(rows, self.components, dtype=torch.float64)
        shares[:, 0] = math.log((self.components - 1) * _FIRST_SHARE / (1 - _FIRST_SHARE)) / _STEEPNESS
        return {
            "shares": shares,
            "log_ratio": torch.full((1,), math.log(self.ratio), dtype=torch.float64),
        }

    @property
    def _names(self) -> list[str]:
        """Of the kernels of each layer in θ."""
        return [*(f"layer_{k}" for k in range(1, len(self.layers))), "kernels"]

    def kernels(self, theta: Theta) -> Tensor:
        """c_j in pixels, (J, C, K, K), composed of all layers."""
        return composed(self._layers(theta))

    def project(self, theta: Theta) -> dict[str, Tensor]:
        theta = super().project(theta)
        if "log_ratio" in theta:  # so that the first component is the narrowest
            theta["log_ratio"] = theta["log_ratio"].clamp_min(0)
        return theta

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        first = self._names[0]  # what it does not see, no later layer sees
        return dict(gradient) | {first: without_constants(gradient[first])}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        shares, nu = self._mixture(theta)
        weights = amplitudes(theta) * (shares / nu).sum(0)
        return stacked_bound(self._layers(theta), weights, self.boundary, shape)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return stacked_bound(self._layers(theta), amplitudes(theta).square(), self.boundary, shape)

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        widest = self._mixture(theta)[1].max()
        t = torch.linspace(-5, 5, 2 * _POINTS + 1, dtype=widest.dtype, device=widest.device) * widest
        scaled = amplitudes(theta).view(-1, 1) * t
        values = self._form(theta).of.potential(scaled.view(1, self.filters, 1, -1))
        return Potentials(t, values[0, order, 0], importance)

    def _layers(self, theta: Theta) -> list[Tensor]:
        """The kernels of each layer in pixels."""
        return [from_scaled_basis(theta[name]) for name in self._names]

    def _mixture(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """w_jk and ν_jk, (components, J)."""
        nu = theta["log_smoothing"].exp().expand(1, self.filters)
        if self.components == 1:
            return torch.ones_like(nu), nu
        place = torch.arange(self.components, dtype=nu.dtype, device=nu.device)
        shares = torch.softmax(_STEEPNESS * theta["shares"], 1).mT.expand(-1, self.filters)
        return shares, nu * (place * theta["log_ratio"]).exp().unsqueeze(1)

    def _normal_form(self, theta: Theta) -> NormalForm:
        a, layers = amplitudes(theta), self._layers(theta)
        layers[-1] = layers[-1] * a.view(-1, 1, 1, 1)
        banks = tuple(FilterBank(kernels, self.boundary) for kernels in layers)
        shares, nu = self._mixture(theta)
        # One component is less work as what it is.
        potential: Potential = SmoothedAbs(nu[0] * a) if self.components == 1 else Mixture(shares, nu * a)
        return NormalForm(banks[0] if len(banks) == 1 else Stack(banks), potential)


@dataclass(frozen=True)
class Mixture:
    """Σ_k w_jk φ_{ν_jk} with shares and widths (components, J); every result is a new tensor, differentiable in
    both."""

    shares: Tensor
    nu: Tensor

    def potential(self, t: Tensor) -> Tensor:
        square = t.square()
        values = [
            share.at(t) * ((square + near.at(t)).sqrt() - nu.view(1, -1, 1, 1))
            for (share, near), nu in zip(self._planes, self.nu, strict=True)
        ]
        return torch.stack(values).sum(0) if len(values) > 1 else values[0]

    def weights(self, t: Tensor) -> Tensor:
        """ψ'(t)/t = Σ_k w_k/√(t² + ν_k²)."""
        square, total = t.square(), torch.zeros_like(t)
        for share, near in self._planes:
            total = total.addcmul_(share.at(t), (square + near.at(t)).rsqrt_())
        return total

    def curvature(self, t: Tensor) -> Tensor:
        """ψ''(t) = Σ_k w_k ν_k²/√(t² + ν_k²)³."""
        square, total = t.square(), torch.zeros_like(t)
        for share, near in self._planes:
            root = (square + near.at(t)).rsqrt_()
            total = total.addcmul_(share.at(t) * near.at(t), root.pow(3))
        return total

    @cached_property
    def _planes(self) -> list[tuple[Planes, Planes]]:
        """w_k and ν_k² of every component."""
        return [(Planes(share), Planes(nu.square())) for share, nu in zip(self.shares, self.nu, strict=True)]
