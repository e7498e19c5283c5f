"""The variational problem as a sum over linear images of x, which majorise–minimise solvers work on.

    h(x) = ψ(Cx) + D(Ax; y) + (μ_0/2)‖x‖²

ψ ∘ C is the regularizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bltoolbox.bilevel.composite import Touch
from bltoolbox.bilevel.preconditioner import Preconditioner
from bltoolbox.restoration.roles import DataTerm, Regularizer
from bltoolbox.restoration.spectral import spectral

if TYPE_CHECKING:
    from bltoolbox.restoration.image_lower import ImageLower


def has_composite(regularizer: Regularizer, data_term: DataTerm) -> bool:
    """Whether both components have majorising parabolas."""
    return regularizer.offers("majorant") and data_term.offers("majorant")


@dataclass(frozen=True)
class ImageComposite:
    """The terms of ``lower``, each with a majorising parabola at every point."""

    lower: ImageLower

    @property
    def ridge(self) -> float:
        return self.lower.ridge

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        lower = self.lower
        prior = lower.problem.regularizer.analyse(lower.prior_theta, x)
        return prior, lower.forward(x)

    def adjoint(self, t: tuple[Tensor, ...]) -> Tensor:
        lower, (prior, data) = self.lower, t
        image = lower.problem.regularizer.synthesise(lower.prior_theta, prior, lower.shape)
        back = lower.backward(data)
        # Where A is the identity, the slopes of the data term are at hand to be written to.
        return data.add_(image) if back is data else image + back

    def touch(
        self, t: tuple[Tensor, ...], first: Touch | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | float, ...]]:
        lower, (prior, data) = self.lower, t
        if first is None:
            if (offset := lower.problem.regularizer.offset(lower.prior_theta)) is not None:
                prior = prior - offset
            weights = lower.problem.regularizer.majorant(lower.prior_theta, prior)
            first = weights * prior, weights
        theta = lower.data_theta
        slope = lower.problem.data_term.gradient(theta, data, lower.y)
        curvature = lower.problem.data_term.majorant(theta, data, lower.y)
        return (first[0], slope), (first[1], curvature)

    def majorant(self) -> Callable[[Tensor], Tensor] | None:
        regularizer, theta = self.lower.problem.regularizer, self.lower.prior_theta
        return None if regularizer.offset(theta) is not None else regularizer.pointwise_majorant(theta)

    def preconditioner(
        self, curvatures: tuple[Tensor | float, ...], always: bool = False, shift: Tensor | float = 0.0
    ) -> Preconditioner | None:
        prior, data = curvatures
        return spectral(self.lower, torch.as_tensor(prior), data, always, shift, majorant=True)

    @property
    def tilt_curvature(self) -> None:
        return None

    def tilt(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)
