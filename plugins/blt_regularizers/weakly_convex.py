"""Weakly convex Field of Experts: learned filters under potentials that flatten for large responses.

    R_θ(x) = Σ_j Σ_p [a_j φ_{ν_j}(t) − e_j ω_j φ_{ω_j}(t)],     t = (c_j ⋆ x)_p,   φ_ν(t) = √(t² + ν²) − ν

with a_j = e^{θ_0 + θ_j} and the concave part smaller than the convex one: ω_j ≥ ν_j and e_j ω_j < a_j. The absolute
value of `foe` pulls at a strong edge as hard as at a weak one. Here the slope falls from a_j to a_j − e_j ω_j once a
response exceeds ω_j: edges are kept, flat parts are smoothed harder. R is no longer convex, but not by much: e_j is
the largest curvature of the concave part, so that ∇²R ⪰ −ρ with ρ ≤ ‖Σ_j e_j C_jᵀC_j‖. The filters share what there is
to spend,

    e_j = ρ_0 s_j / ‖Σ_i s_i C_iᵀC_i‖,        s_j = e^{θ'_j},   ρ_0 < 1

the norm being that inside an image, away from its border; derivatives in θ take it along. A data term with AᵀA ⪰ 1, as
in denoising, makes up for it: the lower level is (1 − ρ_0)-strongly convex and has one minimiser. With a `periodic`,
`zero` or `valid` border that is certified, and so are all accuracies. For a mirrored border only a looser bound is
known (up to four times ρ_0); where it passes 1, accuracies are called estimated. For an operator with a null space
(deblurring, inpainting) nothing is guaranteed, and Hessian products may meet negative curvature.

a√(s + ν²) − eω√(s + ω²) is concave in s = t², so `mm` has its majorant weights a/√(t² + ν²) − eω/√(t² + ω²) > 0. Third
derivatives are not bounded here: error bounds of hypergradients are estimated.

When to choose it: denoising, where it is ahead of every convex choice here. The lower level is less strongly convex
than with `foe`, so that a solve takes more iterations.

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
from bltoolbox.results import Potentials

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
        weight: initial weight a_j of a filter of unit norm.
        flattening: initial part of its slope that a potential loses for large responses.
        curvature: ρ_0, how far from convex R is; below 1, so that denoising stays strongly convex.
        start: initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
    """

    convex: ClassVar[bool] = False
    # What `foe` knows of its own potentials does not hold for these.
    pairing_gradients = Regularizer.pairing_gradients
    constants = Regularizer.constants

    def __init__(
        self,
        filters: Annotated[int, Gt(0)] = 10,
        kernel_size: Annotated[int, Ge(2)] = 7,
        boundary: Boundary = "symmetric",
        nu: Annotated[float, Gt(0)] = 0.01,
        weight: Annotated[float, Gt(0)] = 0.02,
        flattening: Annotated[float, Gt(0), Lt(1)] = 0.5,
        curvature: Annotated[float, Gt(0), Lt(1)] = 0.95,
        start: Literal["differences", "dct", "random"] = "differences",
    ) -> None:
        super().__init__(filters, kernel_size, boundary, "per-filter", nu, weight, start)
        self.flattening = flattening
        self.curvature = curvature

    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        theta = super().init_params(channels, generator)
        theta["log_shares"] = torch.zeros(self.filters, dtype=torch.float64)
        theta["log_omega"] = math.log(self.flattening) + self._log_largest_omega(theta)
        return self.project(theta)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        """−ρ."""
        return -norm_bound(self.kernels(theta), self._curvatures(theta), self.boundary)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """Zero means, and ω between ν and what the slope allows; where that is nothing, ν gives way."""
        theta = super().project(theta)
        log_omega = theta["log_omega"].minimum(math.log(_LOST) + self._log_largest_omega(theta))
        return theta | {"log_omega": log_omega, "log_smoothing": theta["log_smoothing"].minimum(log_omega)}

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        omega = theta["log_omega"].exp().median()
        t = torch.linspace(-3, 3, 301, dtype=omega.dtype, device=omega.device) * omega
        scaled = amplitudes(theta).view(-1, 1) * t
        values = self._form(theta).of.potential(scaled.view(1, self.filters, 1, -1))
        return Potentials(t, values[0, order, 0], importance)

    def _curvatures(self, theta: Theta) -> Tensor:
        """e_j."""
        shares = theta["log_shares"].exp()
        return self.curvature * shares / norm_bound(self.kernels(theta), shares, "periodic")

    def _log_largest_omega(self, theta: Theta) -> Tensor:
        """log(a_j/e_j), where all slope would be lost."""
        return theta["log_scale"] + theta["log_weights"] - self._curvatures(theta).log()

    def _normal_form(self, theta: Theta) -> NormalForm:
        a, omega = amplitudes(theta), theta["log_omega"].exp()
        lost = self._curvatures(theta) * omega / a
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
