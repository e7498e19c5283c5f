"""The lower level of the variational problem: h_i at one θ for the measurements of one chunk, with its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bltoolbox.bilevel.composite import Composite
from bltoolbox.bilevel.derivatives import Linearization, rows_of
from bltoolbox.bilevel.preconditioner import Preconditioner
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Bound, Constants, Counter, Rows, Theta
from bltoolbox.bilevel.saddle import Saddle
from bltoolbox.bilevel.tensors import dot, expand, norm
from bltoolbox.restoration.image_composite import ImageComposite, has_composite
from bltoolbox.restoration.image_saddle import ImageSaddle, has_saddle
from bltoolbox.restoration.layout import with_channels
from bltoolbox.restoration.spectral import linear_estimate, spectral
from bltoolbox.restoration.theta import join, split

if TYPE_CHECKING:
    from bltoolbox.restoration.variational import Variational, VariationalAt


@dataclass(frozen=True)
class ImageLower(Lower):
    """h_i(·, θ) for measurements y."""

    at: VariationalAt
    y: Tensor
    context: Rows
    ids: Tensor
    mu: Tensor
    #: What the regularizer read off the start of each sample, if it has done so.
    read: Rows | None = None

    @property
    def problem(self) -> Variational:
        return self.at.problem

    @property
    def theta(self) -> Theta:  # type: ignore[override]
        return self.at.theta

    @property
    def counter(self) -> Counter:  # type: ignore[override]
        return self.at.counter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.problem.variable_shape(self.at.shape)

    @property
    def constrained(self) -> bool:  # type: ignore[override]
        return self.problem.constraint != "none"

    @property
    def ridge(self) -> float:
        """μ_0 of the extra term (μ_0/2)‖x‖²."""
        return self.problem.strong_convexity

    @cached_property
    def data_theta(self) -> Theta:
        """The parameters of the data term for these samples."""
        return self.at.data_theta(self.context)

    @cached_property
    def prior_theta(self) -> Theta:
        """The parameters of the regularizer for these samples."""
        return self.problem.regularizer.select(self.at.prepared["regularizer"], self.guide)

    @cached_property
    def guide(self) -> Rows:
        return self.at.guide(self.y, self.context) if self.read is None else self.read

    @cached_property
    def _lipschitz(self) -> Bound:
        return self.at.lipschitz(self.y, self.context)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self._lipschitz is not None

    @cached_property
    def lipschitz(self) -> Tensor:
        return column(self._lipschitz, self.y, math.inf)

    def take(self, index: Tensor) -> ImageLower:
        context = {name: rows[index] for name, rows in self.context.items()}
        guide = {name: rows[index] for name, rows in self.guide.items()}
        y, mu, ids = self.y[index], self.mu[index], self.ids[index]
        return replace(self, y=y, mu=mu, context=context, ids=ids, read=guide)

    def at_theta(self, theta: Theta) -> ImageLower:
        return replace(self, at=replace(self.at, theta=dict(theta)), read=None)

    def start(self) -> Tensor:
        return self.project(self.embed(self.at.start(self.y, self.context)))

    def estimate(self) -> Tensor:
        return linear_estimate(self)

    def view(self, x: Tensor) -> Tensor:
        """The image in x."""
        return x[:, : self.at.shape[0]] if self.at.extra else x

    def embed(self, v: Tensor) -> Tensor:
        return with_channels(v, self.at.extra)

    def forward(self, x: Tensor) -> Tensor:
        """A applied to the image in x."""
        return self.problem.operator.apply(self.view(x), self.at.prepared["operator"], self.context)

    def backward(self, t: Tensor) -> Tensor:
        """The adjoint of ``forward``."""
        return self.embed(self.problem.operator.adjoint(t, self.at.prepared["operator"], self.context))

    def energy(self, x: Tensor) -> Tensor:
        data = self.problem.data_term.value(self.data_theta, self.forward(x), self.y)
        energy = data + self.problem.regularizer.energy(self.prior_theta, x)
        return energy + 0.5 * self.ridge * dot(x, x) if self.ridge else energy

    def gradient(self, x: Tensor) -> Tensor:
        self.counter.gradients += len(x)
        gradient = self.problem.regularizer.gradient(self.prior_theta, x)
        slope = self.problem.data_term.gradient(self.data_theta, self.forward(x), self.y)
        gradient = gradient + self.backward(slope)
        return gradient.add_(x, alpha=self.ridge) if self.ridge else gradient

    def project(self, x: Tensor) -> Tensor:
        if not self.constrained:
            return x
        inside = self.view(x).clamp(*self.problem.bounds)
        return torch.cat([inside, x[:, self.at.shape[0] :]], dim=1) if self.at.extra else inside

    def residual(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        gradient = self.gradient(x) if gradient is None else gradient
        return norm(gradient * self.free(x, gradient) if self.constrained else gradient)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Pixels that the constraint does not hold: inside C, or drawn inwards by the gradient."""
        low, high = self.problem.bounds
        image, gradient = self.view(x), self.view(gradient)
        held = torch.zeros_like(image, dtype=torch.bool)
        if low is not None:
            held |= (image <= low) & (gradient >= 0)
        if high is not None:
            held |= (image >= high) & (gradient <= 0)
        return ~self.embed(held)

    def linearize(self, x: Tensor) -> Linearization:
        self.counter.linearisations += len(x)
        free = self.free(x, self.gradient(x)) if self.constrained else None
        prior = self.problem.regularizer.linearize(self.prior_theta, x)
        t = self.y if self.problem.data_term.quadratic else self.forward(x)
        curvature = self.problem.data_term.curvature(self.data_theta, t, self.y)
        return Linearization(self, x, _Hessian(self, prior, curvature), free)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        lower = self.at_theta(theta)
        pairing = self.problem.regularizer.pairing(lower.prior_theta, x, q)
        if lower.at.prepared["operator"] or lower.at.prepared["data_term"] or self.y.requires_grad:
            slope = self.problem.data_term.gradient(lower.data_theta, lower.forward(x), self.y)
            pairing = pairing + dot(slope, lower.forward(q))
        return pairing

    def mixed(self, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
        q = self._free_part(x, q)
        if x.device.type == "cpu" or not self._mixed_is_analytic:
            return super().mixed(x, q, weights)
        # On a GPU formulas have fewer launches than a backward pass.
        self.counter.mixed_products += len(x)
        theta = split(self.theta, "regularizer")
        rows = self.problem.regularizer.pairing_gradients(theta, x, expand(weights, q) * q)
        return join(regularizer={name: row.sum(0) for name, row in rows.items()})

    @property
    def _mixed_is_analytic(self) -> bool:
        """Whether only the regularizer has parameters, and knows their derivatives."""
        regularizer = self.problem.regularizer
        others = split(self.theta, "operator") or split(self.theta, "data_term") or self.y.requires_grad
        return not others and regularizer.offers("pairing_gradients") and not regularizer.offers("guide")

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        q = self._free_part(x, q)
        if self.problem.regularizer.offers("guide"):
            return super().mixed_each(x, q)
        self.counter.mixed_products += len(x)
        raw = {role: split(self.theta, role) for role in self.problem.components}
        rows = join(regularizer=self.problem.regularizer.pairing_gradients(raw["regularizer"], x, q))
        others = join(operator=raw["operator"], data_term=raw["data_term"])
        if others:
            fixed = join(regularizer=raw["regularizer"])
            rows |= rows_of(lambda leaves: self.pairing(fixed | leaves, x, q), others)
        return rows

    def _free_part(self, x: Tensor, q: Tensor) -> Tensor:
        return q * self.free(x, self.gradient(x)) if self.constrained else q

    def constants(self, x: Tensor, radius: Tensor) -> Constants | None:
        regularizer = self.problem.regularizer
        if not regularizer.offers("constants") or regularizer.offers("guide") or self.constrained:
            return None
        if split(self.theta, "operator") or split(self.theta, "data_term"):
            return None
        third = self.problem.data_term.third(self.data_theta, self.y)
        _, squared = self.at.spectrum(self.context)
        if third is None or squared is None:
            return None
        prior = regularizer.constants(self.prior_theta, x, radius)
        data = third * squared**1.5
        return replace(prior, hessian_lipschitz=prior.hessian_lipschitz + data)

    def composite(self) -> Composite | None:
        parts = self.problem.regularizer, self.problem.data_term
        return ImageComposite(self) if has_composite(*parts) else None

    def saddle(self) -> Saddle | None:
        parts = self.problem.regularizer, self.problem.data_term
        return ImageSaddle(self) if has_saddle(*parts) else None


@dataclass(frozen=True)
class _Hessian:
    """v ↦ ∇²R v + Aᵀ(d'' ⊙ A v) + μ_0 v."""

    lower: ImageLower
    prior: Callable[[Tensor], Tensor]
    curvature: Tensor | float

    def __call__(self, v: Tensor) -> Tensor:
        image = self.lower.forward(v)
        weighted = (
            image if isinstance(self.curvature, float) and self.curvature == 1.0 else self.curvature * image
        )
        product = self.prior(v) + self.lower.backward(weighted)
        return product.add_(v, alpha=self.lower.ridge) if self.lower.ridge else product

    def preconditioner(self, always: bool) -> Preconditioner | None:
        """From the curvatures of the potentials, where the product of the regularizer has them."""
        prior = getattr(self.prior, "curvature", None)
        return None if prior is None else spectral(self.lower, prior, self.curvature, always)

    def take(self, index: Tensor) -> _Hessian | None:
        """For some of the samples; None where the product of the regularizer cannot be divided."""
        divide = getattr(self.prior, "take", None)
        if divide is None:
            return None
        curvature = self.curvature[index] if isinstance(self.curvature, Tensor) else self.curvature
        return _Hessian(self.lower.take(index), divide(index), curvature)


def column(bound: Bound, like: Tensor, unknown: float = -math.inf) -> Tensor:
    """A bound with one entry per sample."""
    value = unknown if bound is None else bound.detach() if isinstance(bound, Tensor) else bound
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like)).clone()
