"""The variational problem: reconstruct images by minimising data term plus regularizer.

    h_i(x, θ) = D_θ(A_θ x; y_i) + R_θ(x) + (μ_0/2)‖x‖²   over x in C

C is the whole space, the non-negative orthant or the range of values of the data. For a convex C everything below is
about the minimiser over C: ``residual`` is the norm of the shortest element of ∇h + N_C (so that residual/μ still
bounds the distance to the minimiser), and the linearisation acts on the free pixels only. Solvers and hypergradients
need not know.

When to choose it: for images, of which something was measured. It is the problem of recipes that name none, and is made
of their sections: data, operator, noise, data_term, constraint, regularizer and upper_loss.

Reference: Kunisch & Pock, *A bilevel optimization approach for parameter learning in variational models*, SIAM Journal
on Imaging Sciences 2013.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Bound, Counter, Rows, Theta
from bltoolbox.bilevel.roles import Parametric, Problem
from bltoolbox.bilevel.tasks import BoundTasks, Tasks
from bltoolbox.bilevel.tensors import Constant, beside, detached, ordinary
from bltoolbox.bilevel.wrapped_loss import Viewed
from bltoolbox.errors import BltError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.image_lower import ImageLower, column
from bltoolbox.restoration.image_upper import BoundOperator, LearnedForward
from bltoolbox.restoration.layout import image_layout
from bltoolbox.restoration.metrics import METRICS, UNIT, ImageMetric, Range
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import DataTerm, Noise, Operator, Regularizer, UpperLoss
from bltoolbox.restoration.theta import join, prepare, split
from bltoolbox.restoration.undoing import Undoing

Constraint = Literal["none", "nonnegative", "box"]


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
    from_sections: ClassVar[bool] = True

    @property
    def unit(self) -> float:  # type: ignore[override]
        """The width of the range of values."""
        low, high = self.range
        return high - low

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
        return tuple(
            metric for metric in metrics if samples.has_truth or (without and not metric.needs_truth)
        )

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """What the constraint allows, from below and from above."""
        low, high = self.range
        return {"none": (None, None), "nonnegative": (0.0, None), "box": (low, high)}[self.constraint]

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self.upper_loss.scale

    @property
    def components(self) -> dict[str, Parametric]:
        """The components that may have parameters, in the order in which these are initialised."""
        return {"regularizer": self.regularizer, "operator": self.operator, "data_term": self.data_term}

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.samples["training"].shape
        return join(
            **{role: component.init_params(shape, generator) for role, component in self.components.items()}
        )

    def tasks(self, split: str, like: Tensor) -> VariationalTasks | None:
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
        for role, component in self.components.items():
            if role not in without and (sentence := component.check(shape)):
                return role, sentence
        return None

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return join(
            **{role: component.project(split(theta, role)) for role, component in self.components.items()}
        )

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        free = {
            role: component.project_gradient(split(gradient, role))
            for role, component in self.components.items()
        }
        for role in self.frozen:
            free[role] = {name: torch.zeros_like(value) for name, value in free[role].items()}
        return join(**free)

    def penalty(self, theta: Theta) -> Tensor | None:
        total: Tensor | None = None
        for role, component in self.components.items():
            if (penalty := component.penalty(split(theta, role))) is None:
                continue
            if penalty.numel() != 1:
                raise BltError(
                    f"the penalty of {role} {type(component).__name__} has shape {list(penalty.shape)}, but must be one"
                    " number; sum it up"
                )
            total = penalty.reshape(()) if total is None else total + penalty.reshape(())
        return total


@dataclass(frozen=True)
class VariationalTasks(Tasks):
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

    @property
    def reads_ahead(self) -> bool:
        return self.samples.workers > 0

    def prefetch(self, ids: Sequence[int]) -> None:
        self.samples.prefetch(ids)

    def close(self) -> None:
        self.samples.close()

    def label(self, number: int) -> str:
        return self.samples.label(number)

    def digest(self) -> str:
        return self.samples.digest()


@dataclass(frozen=True)
class VariationalTasksAt(BoundTasks):
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
            ids=beside(torch.as_tensor(range(len(y)) if ids is None else ids), y),
            mu=column(self._mu(y, context), y),
        )

    def start(self, y: Tensor, context: Rows) -> Tensor:
        """The images that cold solves start from, before constraints."""
        y = self.problem.data_term.centre(self.data_theta(context), y)
        return image_layout(self.problem.operator.start(y, self.prepared["operator"], context))

    def guide(self, y: Tensor, context: Rows) -> Rows:
        """What the regularizer reads off the start of each sample."""
        regularizer = self.problem.regularizer
        if not regularizer.offers("guide"):
            return {}
        read = regularizer.guide(self.prepared["regularizer"], self.seen(y, context))
        return {name: context.get(name, rows) for name, rows in read.items()}

    def seen(self, y: Tensor, context: Rows) -> Tensor:
        """What the regularizer reads: the start, with the operator undone where it asks for that and cosines
        diagonalise it."""
        if self._undoing is None or y.shape[1:] != self.shape:
            return self.start(y, context)
        y = self.problem.data_term.centre(self.data_theta(context), y)
        return self._undoing.apply(self.problem.operator.adjoint(y, self.prepared["operator"], context))

    @cached_property
    def _undoing(self) -> Undoing | None:
        operator, weight = self.problem.operator, self.problem.regularizer.undo
        learned = bool(self.prepared["operator"])  # u is not differentiable in its parameters
        if weight is None or operator.identity or learned or self.operator_symbol is None:
            return None
        return Undoing(self.operator_symbol, weight)

    def data_theta(self, context: Rows) -> Theta:
        """The parameters of the data term for samples with this context."""
        return self.problem.data_term.select(self.prepared["data_term"], context)

    def _mu(self, y: Tensor, context: Rows) -> Bound:
        """A true lower bound of the strong convexity of h; None when a component knows none."""
        return add_bounds(self.data_convexity(y, context), self.prior_convexity)

    def data_convexity(self, y: Tensor, context: Rows) -> Bound:
        """A true lower bound of the strong convexity of h without its regularizer."""
        least, most = self.spectrum(context)
        curvature, _ = self.problem.data_term.spectrum(self.data_theta(context), y)
        bound = _lowest(curvature, least, most)
        if self.extra and bound is not None:  # the data term does not depend on the auxiliary channels
            bound = torch.as_tensor(bound).clamp_max(0.0)
        return add_bounds(bound, self.problem.strong_convexity)

    def lipschitz(self, y: Tensor, context: Rows) -> Bound:
        """A true upper bound of the Lipschitz constant of ∇h, or None when a component knows none."""
        problem = self.problem
        _, most = self.spectrum(context)
        _, curvature = problem.data_term.spectrum(self.data_theta(context), y)
        data = None if most is None or curvature is None else curvature * most
        bound = add_bounds(data, self.prior_lipschitz, problem.strong_convexity)
        # Infinity bounds nothing; a step of length 1/∞ would not move.
        return None if bound is None or bool(torch.isinf(torch.as_tensor(bound)).any()) else bound


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
