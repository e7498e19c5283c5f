"""The variational problem as a saddle-point problem.

    F(Kx) + G(x) = ψ(Cx) + D(Ax; y) + (μ_0/2)‖x‖² + ι_C(x)

ψ ∘ C is the regularizer, and the first block of K is its C. Where A is the identity, D belongs to G, whose proximal map
is that of D, shrunk by μ_0 and clipped to the constraint. Elsewhere D is a second block with K_2 = A, and G is what
remains. In the duality gap D belongs to G in either case, since it is differentiable: so the gap is finite for every
operator, and where A is the identity and D quadratic it is the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Bound
from bltoolbox.bilevel.saddle import Blocks
from bltoolbox.bilevel.tensors import expand
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.roles import DataTerm, Regularizer

if TYPE_CHECKING:
    from bltoolbox.restoration.image_lower import ImageLower

#: What a primal–dual solver needs of a regularizer.
METHODS = ("analyse", "synthesise", "analysis_norm", "potential_sum", "conjugate", "prox_potential")


def has_saddle(regularizer: Regularizer, data_term: DataTerm) -> bool:
    """Whether components have the methods that the saddle-point form needs."""
    return all(map(regularizer.offers, METHODS)) and data_term.offers("prox") and data_term.convex


@dataclass(frozen=True)
class ImageSaddle:
    """The saddle-point form of ``lower``."""

    lower: ImageLower

    @property
    def norms(self) -> Blocks:
        lower, problem = self.lower, self.lower.problem
        prior = problem.regularizer.analysis_norm(lower.prior_theta, lower.at.shape)
        bounds = {"regularizer": prior}
        if not problem.operator.identity:
            bounds["operator"] = lower.at.spectrum(lower.context)[1]
        return tuple(self._column(bound, role) for role, bound in bounds.items())

    def _column(self, bound: Bound, role: str) -> Tensor:
        if bound is None:
            name = type(getattr(self.lower.problem, role)).__name__
            raise NumericalError(
                f"the step of a primal–dual solver needs a bound on the norm of {role} {name}, which provides none;"
                " use a smooth regularizer and agd, which needs no bound"
            )
        column = torch.as_tensor(bound).to(self.lower.mu).expand_as(self.lower.mu)
        return column.clamp_min(torch.finfo(column.dtype).tiny)

    @property
    def convexity(self) -> Tensor:
        if self.lower.problem.operator.identity:
            return self.gap_convexity
        return torch.full_like(self.lower.mu, self.lower.ridge)

    @property
    def gap_convexity(self) -> Tensor:
        lower = self.lower
        convexity = lower.at.data_convexity(lower.y, lower.context)
        return (
            torch.as_tensor(0.0 if convexity is None else convexity)
            .to(lower.mu)
            .expand_as(lower.mu)
            .clamp_min(0.0)
        )

    def scale(self, x: Tensor) -> Tensor:
        lower = self.lower
        t = lower.forward(x)
        curvature = lower.problem.data_term.curvature(lower.data_theta, t, lower.y)
        mean = torch.as_tensor(curvature).to(t).expand_as(t).flatten(1).mean(1)
        if not lower.problem.operator.identity:
            mean = mean * self.norms[1]
        mean = mean + lower.ridge
        return torch.where(mean > 0, mean, 1.0)  # where D is linear, any unit is as good

    def forward(self, x: Tensor) -> Blocks:
        lower = self.lower
        prior = lower.problem.regularizer.analyse(lower.prior_theta, x)
        return (prior,) if lower.problem.operator.identity else (prior, lower.forward(x))

    def adjoint(self, p: Blocks) -> Tensor:
        lower = self.lower
        theta = lower.prior_theta
        back = lower.problem.regularizer.synthesise(theta, p[0], lower.shape)
        return back + lower.backward(p[1]) if len(p) > 1 else back

    def prox(self, x: Tensor, tau: Tensor) -> Tensor:
        lower, step = self.lower, expand(tau, x)
        if lower.ridge:
            shrinkage = 1 + lower.ridge * step
            x, step = x / shrinkage, step / shrinkage
        if lower.problem.operator.identity:
            near = lower.problem.data_term.prox(lower.data_theta, lower.view(x), lower.y, step)
            x = torch.cat([near, x[:, near.shape[1] :]], dim=1) if lower.at.extra else near
        return lower.project(x)

    def prox_dual(self, p: Blocks, sigma: Blocks) -> Blocks:
        lower, step = self.lower, expand(sigma[0], p[0])
        theta = lower.prior_theta
        prior = lower.problem.regularizer.prox_conjugate(theta, p[0], step)
        if len(p) == 1:
            return (prior,)
        step = expand(sigma[1], p[1])
        near = lower.problem.data_term.prox(lower.data_theta, p[1] / step, lower.y, 1 / step)
        return prior, p[1] - step * near

    def slack(self, x: Tensor, t: Blocks, p: Blocks, back: Tensor) -> tuple[Tensor, Tensor]:
        lower, regularizer = self.lower, self.lower.problem.regularizer
        theta = lower.prior_theta
        products = (t[0] * p[0]).flatten(1).sum(1, dtype=torch.float64)
        complementarity = (
            regularizer.potential_sum(theta, t[0]) + regularizer.conjugate(theta, p[0]) - products
        )
        image = lower.view(x) if len(t) == 1 else t[1]
        slope = lower.problem.data_term.gradient(lower.data_theta, image, lower.y)
        slope = lower.embed(slope) if len(t) == 1 else lower.backward(slope - p[1])
        slope = slope + back
        if lower.ridge:
            slope = slope + lower.ridge * x
        # Rounding alone makes it negative.
        return complementarity.clamp_min(0.0), lower.residual(x, slope)
