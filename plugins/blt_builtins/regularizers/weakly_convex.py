"""Weakly convex Field of Experts: learned filters under potentials that flatten for large responses.

    R_θ(x) = Σ_j a_j Σ_p [φ_{ν_j}(t) − β_j φ_{ω_j}(t)],     t = (c_j ⋆ x)_p,   φ_ν(t) = √(t² + ν²) − ν

with a_j = e^{θ_0 + θ_j}. The absolute value in `foe` penalises strong edges as steeply as weak ones. Here the slope
falls from a_j to (1 − β_j) a_j once a response exceeds ω_j: edges are preserved, and flat regions are smoothed more. R
is only weakly convex: with e_j the largest curvature of the concave part, ∇²R ⪰ −ρ with
ρ ≤ ‖Σ_j e_j C_jᵀC_j‖. The filters share the curvature that is available,

    e_j = ρ_0 s_j / (b ‖Σ_i s_i C_iᵀC_i‖),        s_j = e^{θ'_j},   ρ_0 < 1

where the norm is that in the interior of an image, away from its border, and derivatives in θ include it. At a mirrored
border the norm is larger by up to a quarter. There b ≥ 1 is its ratio to that of the interior, by the tight bound of
``mirrored_norm``; elsewhere b = 1. Like the zero mean of kernels, b is a constraint on θ: it is stored, derivatives are
taken with b fixed, and it is renewed after every step (0.1 s). The rest of θ is unconstrained: the fraction of the
slope that is lost is a logistic function, and the widths follow from it and from the parameters λ_j and n_j > 0,

    β_j = 0.9999/(1 + e^{−8λ_j}),       ω_j = β_j a_j / e_j,       1/ν_j² = 1/n_j² + 1/ω_j²

so β_j < 1 and ν_j < ω_j always hold, with ν_j ≈ n_j where n_j is much smaller than ω_j. The norm has no derivative
where several frequencies attain it, as with symmetric kernels; the initial kernels are therefore slightly perturbed.

Guarantees: for a data term with AᵀA ⪰ 1, as in denoising, the lower level is (1 − ρ_0)-strongly convex and has a unique
minimiser, and accuracies are certified, at every border and for images of any size; at mirrored borders, where b is
computed for all images with sides of at least 48 pixels (or 7K), smaller ones have a bound of their own. Files written
before b was introduced have b = 1 and restore as they did; their ρ at mirrored borders is 1.1 to 1.3, so nothing is
guaranteed for them until they are trained further. For an operator with a null space (deblurring, inpainting) nothing
is guaranteed, and the Hessian may have negative curvature.

√(s + ν²) − β√(s + ω²) is concave in s = t², so `mm` has its majorant weights a(1/√(t² + ν²) − β/√(t² + ω²)) > 0. No
bound on third derivatives is implemented, so error bounds of hypergradients are estimated.

When to choose it: denoising, where it is more accurate than every convex regularizer here. The lower level is less
strongly convex than with `foe`, so a solve takes more iterations.

References: Goujon, Neumayer & Unser, *Learning weakly convex regularizers for convergent image-reconstruction
algorithms*, SIAM J. Imaging Sci. 2024; Lanza, Morigi, Selesnick & Sgallari, *Sparsity-inducing nonconvex nonseparable
regularization for convex image processing*, SIAM J. Imaging Sci. 2019; Chen, Ranftl & Pock, *Insights into analysis
operator learning*, IEEE TIP 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from blt_builtins.regularizers.filters import Boundary, norm_bound
from blt_builtins.regularizers.foe import (
    FieldOfExperts,
    NormalForm,
    Planes,
    Potential,
    SmoothedAbs,
    amplitudes,
)
from blt_builtins.regularizers.mirrored_norm import lipschitz_bound, mirrored_norm, standing_side
from bltoolbox.plugin import Potentials, Regularizer, Theta

#: The supremum of β_j: the small remaining slope keeps majorant weights positive in float32, too.
_LOST = 0.9999
#: A gradient step in λ_j changes β_j as fast as other steps change their parameters; with 1, training lags behind.
_STEEPNESS = 8.0
#: Standard deviation of the noise on the coordinates of the initial kernels.
_ASYMMETRY = 0.01
#: Distance from the limits of the parameters at which values of older files are placed.
_CLOSE = 1e-9


class WeaklyConvexExperts(FieldOfExperts):
    """Learned filters under flattening potentials.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        nu: initial smoothing ν of every filter.
        weight: initial weight a_j of a filter of unit norm.
        flattening: initial β_j, the fraction of its slope that a potential loses for large responses.
        curvature: ρ_0, the negative curvature allowed for R; below 1, so that denoising stays strongly convex.
        start: initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
    """

    convex: ClassVar[bool] = False
    # The constants of `foe` do not hold for these potentials.
    pairing_gradients = Regularizer.pairing_gradients
    constants = Regularizer.constants

    def __init__(
        self,
        filters: Annotated[int, Gt(0), Le(4096)] = 10,
        kernel_size: Annotated[int, Ge(2), Le(63)] = 7,
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

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        theta = super().init_params(shape, generator)
        # Symmetric kernels attain their norm at several frequencies at once, where it has no derivative.
        noise = torch.randn(theta["kernels"].shape, dtype=torch.float64, generator=generator)
        theta["kernels"] = theta["kernels"] + _ASYMMETRY * noise
        theta["log_shares"] = torch.zeros(self.filters, dtype=torch.float64)
        theta["logit_flattening"] = _logit(torch.full((self.filters,), self.flattening, dtype=torch.float64))
        return self.project(theta)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        theta = super().project(theta)
        return theta | ({"log_border": self._log_border(theta)} if self.boundary == "symmetric" else {})

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        fixed = {name: torch.zeros_like(value) for name, value in gradient.items() if name == "log_border"}
        return super().project_gradient(gradient) | fixed

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        """Convert θ of older files: without log b, or with log ω_j and the log ν_j of the potential itself."""
        theta = dict(theta)
        if self.boundary == "symmetric" and "log_border" not in theta:
            theta["log_border"] = torch.zeros_like(theta["log_scale"])
        if "log_omega" not in theta:
            return theta
        exact = {name: value.double() for name, value in theta.items()}
        log_omega = exact.pop("log_omega")
        lost = (log_omega - self._log_largest_omega(exact)).exp()
        ratio = (2 * (exact["log_smoothing"] - log_omega)).exp()
        # Such files may have ν = ω, which is now a limit.
        exact["logit_flattening"] = _logit(lost)
        exact["log_smoothing"] = exact["log_smoothing"] - (1 - ratio).clamp_min(_CLOSE).log() / 2
        return {name: value.to(theta["log_omega"]) for name, value in exact.items()}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        nu, _ = self._widths(theta)
        weights = self._by_filter(theta, amplitudes(theta) / nu)
        return lipschitz_bound(self.kernels(theta), weights, self.boundary, shape)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        """−ρ."""
        kernels, shares = self.kernels(theta), self._shares(theta)
        if self.boundary != "symmetric":
            return -norm_bound(kernels, shares, self.boundary) * self._curvature_per_share(theta)
        side = standing_side(self.kernel_size)
        if min(shape[1:]) >= side:
            shape = (shape[0], side + 1, side + 1)  # the norm that `project` computes, too
        return -mirrored_norm(kernels, shares, shape) * self._curvature_per_share(theta)

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        omega = self._widths(theta)[1].median()
        t = torch.linspace(-3, 3, 301, dtype=omega.dtype, device=omega.device) * omega
        scaled = amplitudes(theta).view(-1, 1) * t
        values = self._lone(theta).potential(scaled.view(1, self.filters, 1, -1))
        return Potentials(t, values[0, order, 0], importance)

    def _lone(self, theta: Theta) -> Potential:
        """Potentials of single responses."""
        return self._form(theta).of

    def _curvatures(self, theta: Theta) -> Tensor:
        """e_j."""
        return theta["log_shares"].exp() * self._curvature_per_share(theta)

    def _shares(self, theta: Theta) -> Tensor:
        """s_j, as weights of C_jᵀC_j."""
        return self._by_filter(theta, theta["log_shares"].exp())

    def _by_filter(self, theta: Theta, by_potential: Tensor) -> Tensor:
        """Curvatures of the potentials as weights of C_jᵀC_j: here every filter has its own potential."""
        return by_potential

    def _curvature_per_share(self, theta: Theta) -> Tensor:
        """e_j / s_j."""
        border = theta["log_border"].exp().squeeze(0) if "log_border" in theta else 1.0
        inside = norm_bound(self.kernels(theta), self._shares(theta), "periodic")
        return self.curvature / (inside * border)

    def _log_border(self, theta: Theta) -> Tensor:
        """log b, (1,)."""
        with torch.no_grad():
            kernels, shares = self.kernels(theta), self._shares(theta)
            side = standing_side(self.kernel_size) + 1
            at_border = mirrored_norm(kernels, shares, (kernels.shape[1], side, side))
            ratio = at_border / norm_bound(kernels, shares, "periodic")
            # A step that was far too long is reported by the solver's guard.
            return torch.where(ratio.isfinite(), ratio.log().clamp_min(0), 0.0).view(1)

    def _log_largest_omega(self, theta: Theta) -> Tensor:
        """log(a_j/e_j), the width at which all slope would be lost."""
        return theta["log_scale"] + theta["log_weights"] - self._curvatures(theta).log()

    def _lost(self, theta: Theta) -> Tensor:
        """β_j."""
        return _LOST * torch.sigmoid(_STEEPNESS * theta["logit_flattening"])

    def _widths(self, theta: Theta) -> tuple[Tensor, Tensor]:
        """ν_j and ω_j."""
        log_omega = self._lost(theta).log() + self._log_largest_omega(theta)
        log_nu = -torch.logaddexp(-2 * theta["log_smoothing"], -2 * log_omega) / 2
        return log_nu.exp(), log_omega.exp()

    def _normal_form(self, theta: Theta) -> NormalForm:
        a, (nu, omega) = amplitudes(theta), self._widths(theta)
        flattening = _Flattening(SmoothedAbs(nu * a), SmoothedAbs(omega * a), Planes(self._lost(theta)))
        return NormalForm(super()._normal_form(theta).bank, flattening)


def _logit(lost: Tensor) -> Tensor:
    """The λ_j for which the fraction β_j of the slope is lost."""
    return (lost / _LOST).clamp_max(1 - _CLOSE).logit() / _STEEPNESS


@dataclass(frozen=True)
class _Flattening:
    """φ_ν − β φ_ω, where β is the fraction of the slope that is lost."""

    near: SmoothedAbs
    far: SmoothedAbs
    beta: Planes

    def potential(self, t: Tensor) -> Tensor:
        return self.near.potential(t) - self.beta.at(t) * self.far.potential(t)

    def weights(self, t: Tensor) -> Tensor:
        return self.near.weights(t).addcmul(self.beta.at(t), self.far.weights(t), value=-1)

    def curvature(self, t: Tensor) -> Tensor:
        return self.near.curvature(t).addcmul(self.beta.at(t), self.far.curvature(t), value=-1)
