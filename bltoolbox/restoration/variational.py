"""The variational problem: reconstruct images by minimising data term plus regularizer.

    h_i(x, θ) = D_θ(A_θ x; y_i) + R_θ(x) + (μ_0/2)‖x‖²   over x in C

C is the whole space, the non-negative orthant or the range of values of the data. For a convex C everything below is
about the minimiser over C: ``residual`` is the norm of the shortest element of ∇h + N_C (so that residual/μ still
bounds the distance to the minimiser), and the linearisation acts on the free pixels only. Solvers and hypergradients
need not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.derivatives import Linearization, gradients_of, rows_of
from bltoolbox.bilevel.preconditioner import Preconditioner
from bltoolbox.bilevel.problem import Composite, Lower, Upper
from bltoolbox.bilevel.records import Bound, Constants, Counter, Rows, Theta
from bltoolbox.bilevel.roles import Parametric, Problem
from bltoolbox.bilevel.saddle import Saddle
from bltoolbox.bilevel.tensors import Constant, detached, dot, norm, ordinary
from bltoolbox.bilevel.viewed import Viewed
from bltoolbox.errors import BltError
from bltoolbox.restoration.layout import image_layout, with_channels
from bltoolbox.restoration.metrics import METRICS, UNIT, ImageMetric, Range
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import DataTerm, Noise, Operator, Regularizer, Sample, UpperLoss
from bltoolbox.restoration.saddle import ImageSaddle, has_saddle
from bltoolbox.restoration.samples import Samples
from bltoolbox.restoration.spectral import linear_estimate, spectral

Constraint = Literal["none", "nonnegative", "box"]


def split(theta: Theta, role: str) -> dict[str, Tensor]:
    """The parameters of one role, under the names its component gave them."""
    prefix = role + "."
    return {name[len(prefix) :]: value for name, value in theta.items() if name.startswith(prefix)}


def join(**roles: Theta) -> dict[str, Tensor]:
    """Named parameters of several roles in one mapping."""
    return {f"{role}.{name}": value for role, part in roles.items() for name, value in part.items()}


def upgraded(theta: Theta, problem: Variational) -> dict[str, Tensor]:
    """θ as read from a file, in the parameters that the components have today."""
    return join(**{role: part.upgrade(split(theta, role)) for role, part in problem.parts.items()})


@dataclass(frozen=True)
class Variational(Problem):
    """Operator, data term, regularizer, loss and constraint, with the samples of each split where there are any."""

    operator: Operator
    regularizer: Regularizer
    data_term: DataTerm
    upper_loss: UpperLoss
    constraint: Constraint = "none"
    strong_convexity: float = 0.0
    #: What happens to A x when it is measured; None where measurements were recorded.
    noise: Noise | None = None
    samples: Mapping[str, Samples] = field(default_factory=dict)
    #: Roles whose parameters are not learned.
    frozen: frozenset[str] = frozenset()
    #: The values between which images lie.
    range: Range = UNIT
    #: What can be reported about restored images.
    metrics: ClassVar[Mapping[str, ImageMetric]] = METRICS

    @property
    def noise_level(self) -> float | None:
        """The standard deviation of the noise; None where it has none or is not known."""
        return None if self.noise is None else self.noise.level

    @cached_property
    def restoring(self) -> Variational:
        """The problem for measurements as they are: where a loss that splits them has trained R at a higher noise
        level, R is carried back to theirs, if the data term allows it."""
        gain = self.upper_loss.noise_gain
        if gain == 1 or not self.data_term.rescales:
            return self
        return replace(self, regularizer=Rescaled(self.regularizer, 1 / gain))

    def measurable(self, metrics: Iterable[ImageMetric], samples: Samples) -> tuple[ImageMetric, ...]:
        """The metrics that can be measured of samples, whose true images may not be known."""
        without = not self.upper_loss.needs_truth
        return tuple(one for one in metrics if samples.has_truth or (without and not one.needs_truth))

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """What the constraint allows, from below and from above."""
        low, high = self.range
        return {"none": (None, None), "nonnegative": (0.0, None), "box": (low, high)}[self.constraint]

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self.upper_loss.scale

    @property
    def parts(self) -> dict[str, Parametric]:
        """The components that may have parameters, in the order in which these are initialised."""
        return {"regularizer": self.regularizer, "operator": self.operator, "data_term": self.data_term}

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.samples["training"].shape
        return join(**{role: part.init_params(shape, generator) for role, part in self.parts.items()})

    def tasks(self, split: str) -> VariationalTasks | None:
        return VariationalTasks(self, self.samples[split]) if split in self.samples else None

    def at(self, theta: Theta, shape: Sequence[int], counter: Counter | None = None) -> VariationalAt:
        """The problem at θ for images of ``shape`` (C, H, W), with its constants."""
        theta = {name: ordinary(value) for name, value in theta.items()}
        return VariationalAt(self, theta, tuple(shape), counter or Counter())

    def image_shape(self, theta: Theta, y: Tensor, context: Rows | None = None) -> tuple[int, ...]:
        """The shape (C, H, W) of the images behind measurements y; a ValueError if they cannot be treated."""
        shape = tuple(self.operator.start(y, prepare(self, theta)["operator"], context or {}).shape[1:])
        if misfit := self.check(shape):
            raise ValueError(misfit[1])
        return shape

    def variable_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of x for images of ``shape`` (C, H, W): with the auxiliary channels of the regularizer."""
        channels, *sides = shape
        return channels + self.regularizer.extra_channels(channels), *sides

    def check(self, shape: Sequence[int], without: Collection[str] = ()) -> tuple[str, str] | None:
        """The role and the sentence of the first component that cannot treat images of ``shape`` (C, H, W)."""
        for role, part in self.parts.items():
            if role not in without and (sentence := part.check(shape)):
                return role, sentence
        return None

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return join(**{role: part.project(split(theta, role)) for role, part in self.parts.items()})

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        free = {role: part.project_gradient(split(gradient, role)) for role, part in self.parts.items()}
        for role in self.frozen:
            free[role] = {name: torch.zeros_like(value) for name, value in free[role].items()}
        return join(**free)

    def penalty(self, theta: Theta) -> Tensor | None:
        total: Tensor | None = None
        for role, part in self.parts.items():
            if (penalty := part.penalty(split(theta, role))) is None:
                continue
            if penalty.numel() != 1:
                raise BltError(
                    f"the penalty of {role} {type(part).__name__} has shape {list(penalty.shape)}, but must be one"
                    " number; sum it up"
                )
            total = penalty.reshape(()) if total is None else total + penalty.reshape(())
        return total


@dataclass(frozen=True)
class VariationalTasks:
    """The samples of one split as tasks."""

    problem: Variational
    samples: Samples

    @property
    def shape(self) -> tuple[int, ...]:
        return self.problem.variable_shape(self.samples.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.samples.dtype

    @property
    def device(self) -> torch.device:
        return self.samples.device

    def __len__(self) -> int:
        return len(self.samples)

    def at(self, theta: Theta, counter: Counter) -> VariationalTasksAt:
        return VariationalTasksAt(self.problem.at(theta, self.samples.shape, counter), self.samples)


@dataclass(frozen=True)
class VariationalTasksAt:
    """The samples of one split at one θ."""

    at: VariationalAt
    samples: Samples

    def on(self, ids: Sequence[int]) -> tuple[ImageLower, Upper]:
        sample = self.samples.batch(ids)
        lower = self.at.on(sample.y, sample.context, ids)
        upper = self.at.problem.upper_loss.bind(sample, BoundOperator(lower))
        if split(self.at.theta, "operator"):
            upper = LearnedForward(upper, sample, lower)
        return lower, Viewed(upper, lower) if self.at.extra else upper


@dataclass(frozen=True)
class LearnedForward(Upper):
    """The loss where the operator has parameters: one that compares A_θ x with measurements depends on θ, too."""

    upper: Upper
    sample: Sample
    lower: ImageLower

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return self.upper.convex

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.upper.scale

    @property
    def lipschitz(self) -> Bound:  # type: ignore[override]
        return self.upper.lipschitz

    @property
    def infimum(self) -> float:  # type: ignore[override]
        return self.upper.infimum

    def value(self, x: Tensor) -> Tensor:
        return self.upper.value(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.upper.gradient(x)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Through A_θ, by autograd, and what the loss adds itself."""
        own = self.upper.theta_gradient(x, weights)
        names = join(operator=split(self.lower.theta, "operator"))
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in names.items()}
            forward = BoundOperator(self.lower.at_theta({**self.lower.theta, **leaves}))
            bound = self.lower.problem.upper_loss.bind(self.sample, forward)
            total = (weights * bound.value(x.detach())).sum()
        through = gradients_of(total, leaves)
        return own | {name: part + own[name] if name in own else part for name, part in through.items()}

    def take(self, index: Tensor) -> LearnedForward:
        return LearnedForward(
            self.upper.take(index), _rows_of_sample(self.sample, index), self.lower.take(index)
        )


def _rows_of_sample(sample: Sample, index: Tensor) -> Sample:
    truth, target = (None if part is None else part[index] for part in (sample.truth, sample.target))
    return replace(
        sample,
        ids=[sample.ids[i] for i in index.tolist()],
        y=sample.y[index],
        truth=truth,
        target=target,
        context={name: rows[index] for name, rows in sample.context.items()},
    )


@dataclass(frozen=True)
class VariationalAt:
    """A problem at one θ. Whatever depends on θ alone is computed once and shared by all chunks."""

    problem: Variational
    theta: dict[str, Tensor]
    shape: tuple[int, ...]
    counter: Counter

    @cached_property
    def prepared(self) -> dict[str, Theta]:
        """θ by role, prepared by its component."""
        return prepare(self.problem, self.theta)

    @cached_property
    def extra(self) -> int:
        """The number of auxiliary channels that follow those of the image in x."""
        return self.problem.regularizer.extra_channels(self.shape[0])

    @cached_property
    def prior_lipschitz(self) -> Bound:
        """Of ∇R; computed when a solver asks."""
        theta = self.prepared["regularizer"]  # made where it is differentiable
        with detached():
            return self.problem.regularizer.lipschitz(theta, self.shape)

    @cached_property
    def prior_convexity(self) -> Bound:
        theta = self.prepared["regularizer"]
        with detached():
            bound = self.problem.regularizer.strong_convexity(theta, self.shape)
        # The Hessian of a convex function is never negative, whether or not its author says more.
        return 0.0 if bound is None and self.problem.regularizer.convex else bound

    @cached_property
    def operator_symbol(self) -> Constant | None:
        """The eigenvalues of AᵀA by frequency; None where cosines do not diagonalise it."""
        theta = self.prepared["operator"]
        with detached():
            symbol = self.problem.operator.symbol(theta, self.shape)
        return None if symbol is None else Constant(symbol)

    def spectrum(self, context: Rows) -> tuple[Bound, Bound]:
        """Bounds of AᵀA; computed once where all samples have the same operator."""
        return self._spectrum(context) if context else self._common_spectrum

    @cached_property
    def _common_spectrum(self) -> tuple[Bound, Bound]:
        return self._spectrum({})

    def _spectrum(self, context: Rows) -> tuple[Bound, Bound]:
        theta = self.prepared["operator"]
        with detached():
            least, most = self.problem.operator.spectrum(theta, self.shape, context)
        return (0.0 if least is None else least), most  # AᵀA is never negative

    def on(self, y: Tensor, context: Rows | None = None, ids: Sequence[int] | None = None) -> ImageLower:
        """Bound to measurements."""
        y, context = ordinary(image_layout(y)), context or {}
        return ImageLower(
            at=self,
            y=y,
            context=context,
            ids=torch.as_tensor(range(len(y)) if ids is None else ids, device=y.device),
            mu=_column(self._mu(y, context), y),
        )

    def _data_theta(self, context: Rows) -> Theta:
        return self.problem.data_term.select(self.prepared["data_term"], context)

    def _mu(self, y: Tensor, context: Rows) -> Bound:
        """A true lower bound of the strong convexity of h; None when a component knows none."""
        return add_bounds(self.data_convexity(y, context), self.prior_convexity)

    def data_convexity(self, y: Tensor, context: Rows) -> Bound:
        """A true lower bound of the strong convexity of h without its regularizer."""
        least, most = self.spectrum(context)
        curvature, _ = self.problem.data_term.spectrum(self._data_theta(context), y)
        bound = _lowest(curvature, least, most)
        if self.extra and bound is not None:  # the data term does not depend on the auxiliary channels
            bound = torch.as_tensor(bound).clamp_max(0.0)
        return add_bounds(bound, self.problem.strong_convexity)

    def lipschitz(self, y: Tensor, context: Rows) -> Bound:
        """A true upper bound of the Lipschitz constant of ∇h, or None when a component knows none."""
        problem = self.problem
        _, most = self.spectrum(context)
        _, curvature = problem.data_term.spectrum(self._data_theta(context), y)
        data = None if most is None or curvature is None else curvature * most
        bound = add_bounds(data, self.prior_lipschitz, problem.strong_convexity)
        # Infinity bounds nothing; a step of length 1/∞ would not move.
        return None if bound is None or bool(torch.isinf(torch.as_tensor(bound)).any()) else bound


def prepare(problem: Variational, theta: Theta) -> dict[str, Theta]:
    """θ by role, prepared by its component."""
    return {role: part.prepare(split(theta, role)) for role, part in problem.parts.items()}


def add_bounds(*bounds: Bound) -> Bound:
    """The sum; unknown when one of them is."""
    total: Tensor | float = 0.0
    for bound in bounds:
        if bound is None:
            return None
        total = total + bound
    return total


def _lowest(curvature: Bound, least: Bound, most: Bound) -> Bound:
    """A lower bound of Aᵀ diag(d'') A from d'' ≥ curvature and least ≤ AᵀA ≤ most."""
    if curvature is None:
        return None
    if isinstance(curvature, float | int):
        scale = least if curvature >= 0 else most
        return None if scale is None else curvature * scale
    low, high = (None if bound is None else torch.as_tensor(bound).to(curvature) for bound in (least, most))
    infinite = torch.full_like(curvature, -math.inf)
    positive = infinite if low is None else curvature * low
    return torch.where(curvature >= 0, positive, infinite if high is None else curvature * high)


def _column(bound: Bound, like: Tensor, unknown: float = -math.inf) -> Tensor:
    """One entry per sample."""
    value = unknown if bound is None else bound.detach() if isinstance(bound, Tensor) else bound
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like)).clone()


@dataclass(frozen=True)
class ImageLower(Lower):
    """h_i(·, θ) for measurements y."""

    at: VariationalAt
    y: Tensor
    context: Rows
    ids: Tensor
    mu: Tensor

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
        return self.problem.data_term.select(self.at.prepared["data_term"], self.context)

    @cached_property
    def _lipschitz(self) -> Bound:
        return self.at.lipschitz(self.y, self.context)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self._lipschitz is not None

    @cached_property
    def lipschitz(self) -> Tensor:
        return _column(self._lipschitz, self.y, math.inf)

    def take(self, index: Tensor) -> ImageLower:
        context = {name: rows[index] for name, rows in self.context.items()}
        return replace(self, y=self.y[index], mu=self.mu[index], context=context, ids=self.ids[index])

    def at_theta(self, theta: Theta) -> ImageLower:
        return replace(self, at=replace(self.at, theta=dict(theta)))

    def start(self) -> Tensor:
        y = self.problem.data_term.centre(self.data_theta, self.y)
        start = self.problem.operator.start(y, self.at.prepared["operator"], self.context)
        return self.project(self.embed(image_layout(start)))

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
        energy = data + self.problem.regularizer.energy(self.at.prepared["regularizer"], x)
        return energy + 0.5 * self.ridge * dot(x, x) if self.ridge else energy

    def gradient(self, x: Tensor) -> Tensor:
        self.counter.gradients += len(x)
        gradient = self.problem.regularizer.gradient(self.at.prepared["regularizer"], x)
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
        prior = self.problem.regularizer.linearize(self.at.prepared["regularizer"], x)
        t = self.y if self.problem.data_term.quadratic else self.forward(x)
        curvature = self.problem.data_term.curvature(self.data_theta, t, self.y)
        return Linearization(self, x, _Hessian(self, prior, curvature), free)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        parts = prepare(self.problem, theta)
        pairing = self.problem.regularizer.pairing(parts["regularizer"], x, q)
        if parts["operator"] or parts["data_term"]:
            apply = self.problem.operator.apply
            x, q = self.view(x), self.view(q)
            t = apply(x, parts["operator"], self.context)
            data_theta = self.problem.data_term.select(parts["data_term"], self.context)
            slope = self.problem.data_term.gradient(data_theta, t, self.y)
            pairing = pairing + dot(slope, apply(q, parts["operator"], self.context))
        return pairing

    def mixed(self, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return super().mixed(x, self._free_part(x, q), weights)

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        self.counter.mixed_products += len(x)
        q = self._free_part(x, q)
        raw = {role: split(self.theta, role) for role in self.problem.parts}
        rows = join(regularizer=self.problem.regularizer.pairing_gradients(raw["regularizer"], x, q))
        others = join(operator=raw["operator"], data_term=raw["data_term"])
        if others:
            fixed = join(regularizer=raw["regularizer"])
            rows |= rows_of(lambda leaves: self.pairing(fixed | leaves, x, q), others)
        return rows

    def _free_part(self, x: Tensor, q: Tensor) -> Tensor:
        return q * self.free(x, self.gradient(x)) if self.constrained else q

    def constants(self, x: Tensor, radius: Tensor) -> Constants | None:
        if not self.problem.regularizer.offers("constants") or self.constrained:
            return None
        if split(self.theta, "operator") or split(self.theta, "data_term"):
            return None
        third = self.problem.data_term.third(self.data_theta, self.y)
        _, squared = self.at.spectrum(self.context)
        if third is None or squared is None:
            return None
        prior = self.problem.regularizer.constants(self.at.prepared["regularizer"], x, radius)
        data = third * squared**1.5
        return replace(prior, hessian_lipschitz=prior.hessian_lipschitz + data)

    def composite(self) -> Composite | None:
        offers = self.problem.regularizer.offers
        return (
            _HalfQuadratic(self) if offers("majorant") and self.problem.data_term.offers("majorant") else None
        )

    def saddle(self) -> Saddle | None:
        return ImageSaddle(self) if has_saddle(self.problem.regularizer, self.problem.data_term) else None


@dataclass(frozen=True)
class BoundOperator:
    """A_θ of the samples of a lower level: the ``Forward`` of a loss."""

    lower: ImageLower

    def __call__(self, x: Tensor) -> Tensor:
        return self.lower.forward(x)

    def adjoint(self, t: Tensor) -> Tensor:
        return self.lower.view(self.lower.backward(t))

    @property
    def squared_norm(self) -> Bound:
        return self.lower.at.spectrum(self.lower.context)[1]

    def take(self, index: Tensor) -> BoundOperator:
        return BoundOperator(self.lower.take(index))


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


@dataclass(frozen=True)
class _HalfQuadratic:
    """h = ψ(C x) + D(A x; y) + (μ_0/2)‖x‖², both terms with a majorising parabola at every point."""

    lower: ImageLower

    @property
    def ridge(self) -> float:
        return self.lower.ridge

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        lower = self.lower
        prior = lower.problem.regularizer.analyse(lower.at.prepared["regularizer"], x)
        return prior, lower.forward(x)

    def adjoint(self, t: tuple[Tensor, ...]) -> Tensor:
        lower, (prior, data) = self.lower, t
        image = lower.problem.regularizer.synthesise(lower.at.prepared["regularizer"], prior, lower.shape)
        back = lower.backward(data)
        # Where A is the identity, the slopes of the data term are at hand to be written to.
        return data.add_(image) if back is data else image + back

    def touch(self, t: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor | float, ...]]:
        lower, (prior, data) = self.lower, t
        weights = lower.problem.regularizer.majorant(lower.at.prepared["regularizer"], prior)
        theta = lower.data_theta
        slope = lower.problem.data_term.gradient(theta, data, lower.y)
        curvature = lower.problem.data_term.majorant(theta, data, lower.y)
        return (weights * prior, slope), (weights, curvature)

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
