"""Weakly convex Field of Experts: learned filters under potentials that flatten for large responses.

    R_θ(x) = e^{θ_0} Σ_j e^{θ_j} Σ_p [φ_{ν_j}(t) − β_j φ_{ω_j}(t)],     t = (c_j ⋆ x)_p,   φ_ν(t) = √(t² + ν²) − ν

with 0 < β_j < 1 and ω_j > ν_j. The absolute value of `foe` pulls at a strong edge as hard as at a weak one. Here the
slope falls from 1 to 1 − β_j once a response exceeds ω_j: edges are kept, flat parts are smoothed harder. R is no
longer convex, but not by much: ∇²R ⪰ −ρ with

    ρ ≤ ‖Σ_j a_j b_j C_jᵀC_j‖,        b_j = −min_t (φ_{ν_j}''(t) − β_j φ_{ω_j}''(t))

After every step of training the β_j are shortened alike until this is at most `limit` < 1 inside an image, away from
its border. A data term with AᵀA ⪰ 1, as in denoising, makes up for it: the lower level is (1 − ρ)-strongly convex and
has one minimiser. With a `periodic`, `zero` or `valid` border that is certified, and so are all accuracies. For a
mirrored border only a looser bound is known (up to four times ρ inside); where it passes 1, accuracies are called
estimated. For an operator with a null space (deblurring, inpainting) nothing is guaranteed, and Hessian products may
meet negative curvature.

√(s + ν²) − β√(s + ω²) is concave in s = t², so `mm` has its majorant weights 1/√(t² + ν²) − β/√(t² + ω²) > 0. Third
derivatives are not bounded here: error bounds of hypergradients are estimated.

When to choose it: denoising, where it is ahead of every convex choice here for little more time.

References: Goujon, Neumayer & Unser, *Learning weakly convex regularizers for convergent image-reconstruction
algorithms*, SIAM J. Imaging Sci. 2024; Lanza, Morigi, Selesnick & Sgallari, *Sparsity-inducing nonconvex nonseparable
regularization for convex image processing*, SIAM J. Imaging Sci. 2019; Chen, Ranftl & Pock, *Insights into analysis
operator learning*, IEEE TIP 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from blt_regularizers.filters import Boundary, norm_bound
from blt_regularizers.foe import FieldOfExperts, NormalForm, Planes, SmoothedAbs, amplitudes
from bltoolbox.interfaces import Regularizer, Theta
from bltoolbox.results import Constants, Potentials

#: Points of the grid on which the least curvature of a potential is bounded.
_GRID = 400
#: Of the interval in which the factor of all β is sought.
_HALVINGS = 10


class WeaklyConvexExperts(FieldOfExperts):
    """Learned filters under flattening potentials.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, as they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        nu: initial smoothing ν of every filter.
        omega: initial ω of every filter, where its potential begins to flatten; above `nu`.
        beta: initial part β by which the slope falls beyond ω.
        weight: initial weight e^{θ_0 + θ_j} of a filter of unit norm.
        limit: the largest ρ (away from the border) that training may reach; below 1, so that denoising stays strongly
            convex.
        start: initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
    """

    convex: ClassVar[bool] = False

    def __init__(
        self,
        filters: Annotated[int, Gt(0)] = 10,
        kernel_size: Annotated[int, Ge(2)] = 7,
        boundary: Boundary = "symmetric",
        nu: Annotated[float, Gt(0)] = 0.01,
        omega: Annotated[float, Gt(0)] = 0.15,
        beta: Annotated[float, Gt(0), Lt(1)] = 0.5,
        weight: Annotated[float, Gt(0)] = 0.02,
        limit: Annotated[float, Gt(0), Lt(1)] = 0.95,
        start: Literal["differences", "dct", "random"] = "differences",
    ) -> None:
        if omega <= nu:
            raise ValueError(
                f"omega {omega:g} is not above nu {nu:g}; a potential flattens beyond its rounding"
            )
        super().__init__(filters, kernel_size, boundary, "per-filter", nu, weight, start)
        self.omega = omega
        self.beta = beta
        self.limit = limit

    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        theta = super().init_params(channels, generator)
        ratio = math.log(self.omega / self.nu - 1)
        theta["log_ratio"] = torch.full((self.filters,), ratio, dtype=torch.float64)
        theta["log_beta"] = torch.full((self.filters,), math.log(self.beta), dtype=torch.float64)
        return self.project(theta)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        return Regularizer.pairing_gradients(self, theta, x, q)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        """−ρ."""
        return -self._weak_convexity(theta, self.boundary)

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        return Regularizer.constants(self, theta, x, radius)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """Zero means, β < 1, and all β shortened alike until ρ ≤ `limit` inside an image."""
        theta = super().project(theta)
        log_beta = theta["log_beta"].clamp_max(math.log(0.999))

        def excess(shift: Tensor) -> Tensor:
            shifted = theta | {"log_beta": log_beta + shift}
            return (self._weak_convexity(shifted, "periodic") / self.limit).log()

        # b_j is convex in β_j and 0 at β_j = 0: it shrinks at least as β_j does, and mostly much faster.
        none = torch.zeros_like(log_beta[0])
        low, high = -excess(none).clamp_min(0).to(none), none
        if bool(low < 0):
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                fits = excess(middle) <= 0
                low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
        return theta | {"log_beta": log_beta + low}

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        form = self._form(theta)
        omega = self._scales(theta)[1].max()
        t = torch.linspace(-3, 3, 301, dtype=omega.dtype, device=omega.device) * omega
        scaled = amplitudes(theta).view(-1, 1) * t
        return Potentials(t, form.of.potential(scaled.view(1, self.filters, 1, -1))[0, order, 0], importance)

    def _scales(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """ν_j and ω_j."""
        nu = theta["log_smoothing"].exp()
        return nu, nu * (1 + theta["log_ratio"].exp())

    def _weak_convexity(self, theta: Theta, boundary: Boundary) -> Tensor:
        """A true upper bound of ρ.

        Both curvatures fall with |t|, so between two points of a grid φ_ν'' is at least its value at the right end and
        βφ_ω'' at most its value at the left one; beyond the last point the whole is bounded by the latter.
        """
        nu, omega = (scale.double().unsqueeze(1) for scale in self._scales(theta))
        beta = theta["log_beta"].double().exp().unsqueeze(1)
        # From ν/100 to 100 ω.
        grid = torch.linspace(0, 1, _GRID, dtype=torch.float64, device=nu.device)
        t = torch.cat([torch.zeros_like(nu), 0.01 * nu * (1e4 * omega / nu).pow(grid)], 1)
        first = nu.square() / (t.square() + nu.square()).pow(1.5)
        second = beta * omega.square() / (t.square() + omega.square()).pow(1.5)
        right = torch.cat([first[:, 1:], torch.zeros_like(nu)], 1)
        least = (second - right).amax(1).clamp_min(0)
        kernels = self.kernels(theta)
        return norm_bound(kernels, (amplitudes(theta) * least).to(kernels), boundary)

    def _normal_form(self, theta: Theta) -> NormalForm:
        nu, omega = (scale * amplitudes(theta) for scale in self._scales(theta))
        flattening = _Flattening(SmoothedAbs(nu), SmoothedAbs(omega), Planes(theta["log_beta"].exp()))
        return NormalForm(super()._normal_form(theta).bank, flattening)


@dataclass(frozen=True)
class _Flattening:
    """φ_ν − β φ_ω."""

    near: SmoothedAbs
    far: SmoothedAbs
    beta: Planes

    def potential(self, t: Tensor) -> Tensor:
        return self.near.potential(t) - self.beta.at(t) * self.far.potential(t)

    def weights(self, t: Tensor) -> Tensor:
        return self.near.weights(t).addcmul(self.beta.at(t), self.far.weights(t), value=-1)

    def curvature(self, t: Tensor) -> Tensor:
        return self.near.curvature(t).addcmul(self.beta.at(t), self.far.curvature(t), value=-1)
