"""Isotropic total variation, without smoothing.

    R_θ(x) = e^{θ_0} Σ_p |Dx|_p,        |Dx|_p² = Σ_c (∂_h x_c)_p² + (∂_v x_c)_p²

Forward differences, none across the border. With `channels: joint`, the edges of all channels are coupled (vectorial
TV); with `separate`, each channel has its own sum. One parameter, the log-weight θ_0.

R is not differentiable where neighbouring pixels are equal, as most of them are in restored images, which are piecewise
constant. Only `pdhg` can minimise it, with hypergradient `piggyback`. For a primal–dual solver the weight belongs to
the operator, C = e^{θ_0} D with ‖C‖² ≤ 8e^{2θ_0}, and the potential is the plain norm: dual variables lie in unit
balls, whatever θ is, so that they remain good starts when θ changes.

When to choose it: for total variation as it is defined, e.g. to compare with the literature, or where flat regions must
be flat. `tv` has nearly the same minimisers for a small ν and allows faster solvers.

References: Rudin, Osher & Fatemi, *Nonlinear total variation based noise removal algorithms*, Physica D 1992;
Chambolle, *An algorithm for total variation minimization and applications*, JMIV 2004.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.regularizers.differences import NORM, differences, differences_adjoint
from bltoolbox.plugin import Potentials, Regularizer, Theta


class NonsmoothTotalVariation(Regularizer):
    """Isotropic total variation, without smoothing.

    Args:
        weight: initial weight e^{θ_0}.
        channels: whether the channels share their edges.
    """

    smooth: ClassVar[bool] = False

    def __init__(
        self,
        weight: Annotated[float, Gt(0)] = 0.1,
        channels: Literal["joint", "separate"] = "joint",
    ) -> None:
        self.weight = weight
        self.channels = channels

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.full((1,), math.log(self.weight), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self._lengths(self.analyse(theta, x)).flatten(1).sum(1)

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        """(B, 2, C, H, W): weighted horizontal and vertical differences, zero across the border."""
        return theta["log_weight"].exp() * differences(x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return theta["log_weight"].exp() * differences_adjoint(t, shape)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return NORM * (2 * theta["log_weight"]).exp().squeeze()

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        return self._lengths(t).flatten(1).sum(1, dtype=torch.float64)

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        return p.new_zeros(len(p), dtype=torch.float64)

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        # Shorter by the step, or zero.
        return t * (1 - step / self._lengths(t).clamp_min(step))

    def prox_conjugate(self, theta: Theta, p: Tensor, step: Tensor | float) -> Tensor:
        return p / self._lengths(p).clamp_min(1)

    def potentials(self, theta: Theta) -> Potentials:
        weight = theta["log_weight"].exp()
        t = torch.linspace(-1, 1, 201, dtype=weight.dtype, device=weight.device)
        return Potentials(t, weight.unsqueeze(1) * t.abs(), weight)

    def _lengths(self, t: Tensor) -> Tensor:
        """Of the vectors at each pixel, (B, 1, C or 1, H, W); the derivative where one vanishes is 0."""
        return torch.linalg.vector_norm(t, dim=(1, 2) if self.channels == "joint" else 1, keepdim=True)
