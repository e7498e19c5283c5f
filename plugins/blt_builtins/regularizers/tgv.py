"""Smoothed total generalized variation of second order.

    R_θ(x) = min_w  α_1 Σ_p φ_ν(|Dx − w|_p) + α_0 Σ_p φ_ν(|Ew|_p),        φ_ν(t) = √(t² + ν²) − ν

D are forward differences, w a vector at each pixel and E its symmetrised derivative,

    Ew = (∂_h w_h,  ∂_v w_v,  (∂_v w_h + ∂_h w_v)/√2),        |·|_p the norm of all components at a pixel

The minimum over w is taken together with that over x: the lower level has x and w as its variable, w in two channels
for each channel of the image. So R is smooth and convex in the variable, and derivatives are those of a plain sum. No
difference reaches across the border, where Dx − w has no component either, so that an affine image with w its slope
has R = 0. With `channels: joint` the edges of all channels are coupled; with `separate` each has its own sum.
Parameters: the log-weights of α_1 and α_0, and log ν.

h is not strongly convex in w: accuracies are gradient norms, unless `strong_convexity` in the recipe adds (μ/2)‖·‖² to
image and w.

When to choose it: images with smooth shading, in which `tv` produces steps; its three parameters need hardly any
training data. The lower variable is three times as large as the image, and solvers need about five times as many
iterations as for `tv`.

References: Bredies, Kunisch & Pock, *Total generalized variation*, SIAM J. Imaging Sci. 2010; De los Reyes, Schönlieb &
Valkonen, *Bilevel parameter learning for higher-order total variation regularisation models*, JMIV 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.regularizers.differences import NORM
from blt_builtins.regularizers.second_differences import FIRST, SECOND, derivatives, derivatives_adjoint
from bltoolbox.plugin import Potentials, Regularizer, Theta


class TotalGeneralizedVariation(Regularizer):
    """Smoothed total generalized variation of second order.

    Args:
        weight: initial weight α_1 of first derivatives.
        ratio: initial α_0/α_1; the larger, the closer to total variation.
        nu: initial smoothing ν.
        channels: whether the channels share their edges.
    """

    def __init__(
        self,
        weight: Annotated[float, Gt(0)] = 0.1,
        ratio: Annotated[float, Gt(0)] = 2.0,
        nu: Annotated[float, Gt(0)] = 0.01,
        channels: Literal["joint", "separate"] = "joint",
    ) -> None:
        self.weight = weight
        self.ratio = ratio
        self.nu = nu
        self.channels = channels

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        weights = torch.tensor([self.weight, self.weight * self.ratio], dtype=torch.float64)
        return {
            "log_weights": weights.log(),
            "log_smoothing": torch.full((1,), math.log(self.nu), dtype=torch.float64),
        }

    def extra_channels(self, channels: int) -> int:
        return 2 * channels

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        nu = theta["log_smoothing"].exp()
        lengths = self._lengths(theta, self.analyse(theta, x))
        parts = [(length - nu).flatten(1).sum(1) for length in lengths]
        return (theta["log_weights"].exp() * torch.stack(parts, dim=1)).sum(1)

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return self.synthesise(theta, self.majorant(theta, t) * t, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        t = self.analyse(theta, x)
        direction, curvature = t / _spread(*self._lengths(theta, t)), self.majorant(theta, t)

        def hvp(v: Tensor) -> Tensor:
            t_v = self.analyse(theta, v)
            along = direction * _spread(*self._sums(direction * t_v))
            return self.synthesise(theta, curvature * (t_v - along), v.shape[1:])

        return hvp

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return (self.majorant(theta, t) * t * self.analyse(theta, q)).flatten(1).sum(1)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        # α_1‖Dx − w‖² + α_0‖Ew‖² ≤ α_1(√8‖x‖ + ‖w‖)² + 8α_0‖w‖², a quadratic form in (‖x‖, ‖w‖); ψ'' ≤ α/ν.
        first, second = theta["log_weights"].exp().unbind()
        of_x, of_w = NORM * first, first + NORM * second
        largest = (of_x + of_w + ((of_x - of_w).square() + 4 * NORM * first.square()).sqrt()) / 2
        return largest / theta["log_smoothing"].exp().squeeze()

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return derivatives(x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return derivatives_adjoint(t, shape)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        first, second = self._lengths(theta, t)
        alpha = theta["log_weights"].exp()
        return _spread(alpha[0] / first, alpha[1] / second).expand_as(t)

    def potentials(self, theta: Theta) -> Potentials:
        weights, nu = theta["log_weights"].exp(), theta["log_smoothing"].exp()
        t = torch.linspace(-10, 10, 201, dtype=nu.dtype, device=nu.device) * nu
        return Potentials(t, weights.unsqueeze(1) * ((t.square() + nu.square()).sqrt() - nu), weights)

    def _lengths(self, theta: Theta, t: Tensor) -> tuple[Tensor, Tensor]:
        """√(|Dx − w|² + ν²) and √(|Ew|² + ν²) at each pixel."""
        nu_squared = (2 * theta["log_smoothing"]).exp()
        first, second = self._sums(t.square())
        return (first + nu_squared).sqrt(), (second + nu_squared).sqrt()

    def _sums(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Over the components of each derivative, and over the channels if they are coupled."""
        dims = (1, 2) if self.channels == "joint" else (1,)
        return t[:, :FIRST].sum(dims, keepdim=True), t[:, FIRST:].sum(dims, keepdim=True)


def _spread(first: Tensor, second: Tensor) -> Tensor:
    """One value for each derivative, repeated for its components."""
    return torch.cat([first.expand(-1, FIRST, -1, -1, -1), second.expand(-1, SECOND, -1, -1, -1)], dim=1)
