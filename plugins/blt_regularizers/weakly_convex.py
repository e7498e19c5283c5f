"""Weakly convex Field of Experts: learned filters under potentials that flatten for large responses.

    R_θ(x) = Σ_j Σ_p [a_j φ_{ν_j}(t) − e_j ω_j φ_{ω_j}(t)],     t = (c_j ⋆ x)_p,   φ_ν(t) = √(t² + ν²) − ν

with a_j = e^{θ_0 + θ_j} and the concave part smaller than the convex one: ω_j ≥ ν_j and e_j ω_j < a_j. The absolute
value of `foe` pulls at a strong edge as hard as at a weak one. Here the slope falls from a_j to a_j − e_j ω_j once a
response exceeds ω_j: edges are kept, flat parts are smoothed harder. R is no longer convex, but not by much: e_j is
the largest curvature of the concave part, so that ∇²R ⪰ −ρ with

    ρ ≤ ‖Σ_j e_j C_jᵀC_j‖

After every step of training all e_j are shortened alike until this is at most `limit` < 1 inside an image, away from
its border. A data term with AᵀA ⪰ 1, as in denoising, makes up for it: the lower level is (1 − ρ)-strongly convex and
has one minimiser. With a `periodic`, `zero` or `valid` border that is certified, and so are all accuracies. For a
mirrored border only a looser bound is known (up to four times ρ inside); where it passes 1, accuracies are called
estimated. For an operator with a null space (deblurring, inpainting) nothing is guaranteed, and Hessian products may
meet negative curvature.

a√(s + ν²) − eω√(s + ω²) is concave in s = t², so `mm` has its majorant weights a/√(t² + ν²) − eω/√(t² + ω²) > 0. Third
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

#: The largest part of its slope that a potential may lose.
_LOST = 0.999


class WeaklyConvexExperts(FieldOfExperts):
    """Learned filters under flattening potentials.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, as they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        nu: initial smoothing ν of every filter.
        omega: initial ω of every filter, where its potential flattens; above `nu`.
        flattening: initial part of its slope that a potential loses beyond ω, if `limit` allows it.
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
        flattening: Annotated[float, Gt(0), Lt(1)] = 0.5,
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
        self.flattening = flattening
        self.limit = limit

    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        theta = super().init_params(channels, generator)
        curvature = self.flattening * self.weight / self.omega
        theta["log_omega"] = torch.full((self.filters,), math.log(self.omega), dtype=torch.float64)
        theta["log_curvature"] = torch.full((self.filters,), math.log(curvature), dtype=torch.float64)
        return self.project(theta)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        return Regularizer.pairing_gradients(self, theta, x, q)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        """−ρ."""
        return -self._weak_convexity(theta, self.boundary)

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        return Regularizer.constants(self, theta, x, radius)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """Zero means, e shortened until ρ ≤ `limit` inside an image, then ω within its bounds."""
        theta = super().project(theta)
        excess = (self._weak_convexity(theta, "periodic") / self.limit).log().clamp_min(0)
        log_curvature = theta["log_curvature"] - excess
        most = math.log(_LOST) + theta["log_scale"] + theta["log_weights"] - log_curvature
        log_omega = theta["log_omega"].minimum(most).maximum(theta["log_smoothing"])
        # Where even ω = ν is too much, e gives way.
        return theta | {
            "log_omega": log_omega,
            "log_curvature": log_curvature - (log_omega - most).clamp_min(0),
        }

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        omega = theta["log_omega"].exp().max()
        t = torch.linspace(-3, 3, 301, dtype=omega.dtype, device=omega.device) * omega
        scaled = amplitudes(theta).view(-1, 1) * t
        values = self._form(theta).of.potential(scaled.view(1, self.filters, 1, -1))
        return Potentials(t, values[0, order, 0], importance)

    def _weak_convexity(self, theta: Theta, boundary: Boundary) -> Tensor:
        """A true upper bound of ρ."""
        return norm_bound(self.kernels(theta), theta["log_curvature"].exp(), boundary)

    def _normal_form(self, theta: Theta) -> NormalForm:
        a, omega = amplitudes(theta), theta["log_omega"].exp()
        lost = theta["log_curvature"].exp() * omega / a
        near, far = SmoothedAbs(theta["log_smoothing"].exp() * a), SmoothedAbs(omega * a)
        return NormalForm(super()._normal_form(theta).bank, _Flattening(near, far, Planes(lost)))


@dataclass(frozen=True)
class _Flattening:
    """φ_ν − β φ_ω, β the part of the slope that is lost."""

    near: SmoothedAbs
    far: SmoothedAbs
    beta: Planes

    def potential(self, t: Tensor) -> Tensor:
        return self.near.potential(t) - self.beta.at(t) * self.far.potential(t)

    def weights(self, t: Tensor) -> Tensor:
        return self.near.weights(t).addcmul(self.beta.at(t), self.far.weights(t), value=-1)

    def curvature(self, t: Tensor) -> Tensor:
        return self.near.curvature(t).addcmul(self.beta.at(t), self.far.curvature(t), value=-1)
