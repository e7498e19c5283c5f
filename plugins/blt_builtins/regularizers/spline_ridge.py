"""Ridge regularizer: learned filters under splines of any slope, convex, weakly convex or neither.

    R_θ(x) = Σ_j Σ_p ψ_j((c_j ⋆ x)_p),        ψ_j'(t) = ∫_0^t s_j(τ) dτ,   s_j = θ_jm on interval m

As in `crr`, each ψ_j' is a linear spline with equidistant knots on [−range, range] that is zero at zero and constant
beyond; but its slopes are the parameters themselves, of any sign, where those of `crr` are exponentials. So this is the
form of published convex ridge regularizers (CRR), which clip slopes to exactly zero, and of weakly convex ones (WCRR),
whose slopes become negative for large responses: `blt import crr FILE` and `blt import wcrr FILE` make models of it.
One scaling per filter, R = Σ_j ψ(σ_j t)/σ_j², is part of kernels and slopes.

Convexity is read off θ: with n_j the steepest descent of ψ_j', or 0 where there is none, ∇²R ≥ −‖Σ_j n_j C_jᵀC_j‖, for
which there is a certified bound; denoising stays strongly convex as long as that norm is below 1.

ψ_j is C^{1,1} but not C², so error bounds of hypergradients are estimated, never certified; and as for `crr` there is
no majorant: use `agd` or `lbfgs`, not `mm`.

When to choose it: for imported models. For training, `crr` and `wcfoe` cannot leave the convexity that they promise.

References: Goujon, Neumayer, Bohra, Ducotterd & Unser, *A neural-network-based convex regularizer for inverse
problems*, IEEE TCI 2023; Goujon, Neumayer & Unser, *Learning weakly convex regularizers for convergent
image-reconstruction algorithms*, SIAM Journal on Imaging Sciences 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blt_builtins.regularizers.crr import ConvexRidge, Spline
from blt_builtins.regularizers.mirrored_norm import lipschitz_bound
from blt_builtins.regularizers.published import FORMATS, Published
from bltoolbox.plugin import Theta


class SplineRidge(ConvexRidge):
    """Learned filters under splines of any slope.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        knots: number of knots of ψ' on [−range, range]; odd, so that 0 is one of them.
        range: where the spline ends and ψ' becomes constant.
        symmetry: whether ψ is even (ψ' odd), or free to differ for positive and negative responses.
        weight: initial limit of ψ_j', comparable with the weight of `foe`.
    """

    convex = False

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        theta = super().init_params(shape, generator)
        slopes = (theta["log_scale"] + theta["log_slopes"]).exp()
        return {"kernels": theta["kernels"], "slopes": slopes}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return lipschitz_bound(theta["kernels"], theta["slopes"].abs().amax(1), self.boundary, shape)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        falling = (-theta["slopes"].amin(1)).clamp_min(0)
        bound = lipschitz_bound(theta["kernels"], falling, self.boundary, shape)
        return torch.where(falling.amax() > 0, -bound, torch.zeros_like(bound))

    def _importance(self, theta: Theta) -> Tensor:
        """The total variation of ψ_j' if the kernel of the filter had unit norm."""
        total = theta["slopes"].abs().sum(1) * self.spacing * (1.0 if self.symmetry == "odd" else 0.5)
        return total * theta["kernels"].flatten(1).norm(dim=1)

    def _spline(self, theta: Theta) -> Spline:
        slopes = theta["slopes"]
        if self.symmetry == "odd":
            slopes = torch.cat([slopes.flip(1), slopes], dim=1)
        return Spline.of(slopes, self.spacing)

    @classmethod
    def from_published(
        cls, form: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], noise: float | None
    ) -> Published:
        """Options and θ of a published model; a ValueError that is one sentence says why it cannot be converted."""
        return FORMATS[form](tensors, config, noise)
