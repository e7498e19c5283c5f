"""The narrow interface of the toolbox: the lower level of a task, and the loss of its minimiser.

    x̂_i(θ) = argmin_x h_i(x, θ)                      a ``Lower``
    f(θ)    = 1/m Σ_i v_i g_i(x̂_i(θ), θ) + P(θ)      an ``Upper``, with the penalty P of the problem

Solvers, hypergradients, error bounds and the oracle see these two classes and nothing behind them. A task is a
picture to reconstruct, a fold of a cross-validation, or a few-shot problem: x may have any shape, and the first
dimension of every tensor is the task. Nothing may depend on which tasks share a batch.

The author of a problem writes ``start``, ``energy`` and ``take`` of a frozen dataclass with a field ``theta``; every
derivative then comes from autograd. Overriding a method makes it faster, not different.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from bltoolbox.bilevel.composite import Composite, TiltedComposite
from bltoolbox.bilevel.derivatives import Linearization, Retained, gradients_of, leaves_of, rows_of
from bltoolbox.bilevel.records import Bound, Constants, Counter, Theta
from bltoolbox.bilevel.saddle import Saddle
from bltoolbox.bilevel.tensors import expand, norm

AnyLower = TypeVar("AnyLower", bound="Lower")


class Upper(ABC):
    """g_i(x, θ) of the tasks of one chunk.

    ``lipschitz`` bounds the Lipschitz constant of ∇g, None if it is unknown; ``infimum`` is a number that no value
    falls below, −∞ if none is known. Accuracies of a linear system with ∇g on its right are relative to ``scale``.
    Values are summed in float64.
    """

    convex: bool = True
    scale: float = 1.0
    lipschitz: Bound = None
    infimum: float = -math.inf
    blocks: int = 1

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """g_i(x_i), shape (B,), in float64."""

    def gradient(self, x: Tensor) -> Tensor:
        """∇_x g_i(x_i); by autograd unless overridden."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.value(x).sum(), x)[0]

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i ∂_θ g_i(x_i, θ) by parameter; empty if g does not depend on θ."""
        return {}

    @property
    def depends_on_theta(self) -> bool:
        """Whether g has a derivative in θ besides that through x."""
        return type(self).theta_gradient is not Upper.theta_gradient

    def theta_gradient_each(self, x: Tensor) -> dict[str, Tensor]:
        """∂_θ g_i(x_i, θ) of each task by itself, with a leading task dimension; nothing where there is none."""
        if not self.depends_on_theta:
            return {}
        tasks = torch.arange(len(x), device=x.device).split(1)
        rows = [self.take(task).theta_gradient(x[task], x.new_ones(1)) for task in tasks]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @abstractmethod
    def take(self, index: Tensor) -> Upper:
        """The same for some of the tasks."""

    def block(self, j: Tensor) -> Upper:
        """One block of a finite sum, j of each task; the mean over all blocks is g."""
        raise NotImplementedError(f"{type(self).__name__} is not a finite sum")

    def sampled(self, j: Tensor) -> Upper:
        """``block(j)``; g itself if it is not a finite sum."""
        return self.block(j) if self.blocks > 1 else self


class Lower(ABC):
    """h_i(·, θ) for the tasks of one chunk: what solvers and hypergradients work on.

    Attributes:
        ids: the numbers of the tasks, shape (B,).
        theta: all parameters by their full names.
        mu: a valid lower bound on the strong convexity of each h_i, shape (B,); −∞ where none is known.
        lipschitz: a valid upper bound on the Lipschitz constant of each ∇h_i, shape (B,); +∞ where none is known.
        bounded: whether ``lipschitz`` is known for every task, evaluated once and on the host.
        constrained: whether x is confined to a convex set C.
        counter: where derivatives are counted.
    """

    ids: Tensor
    theta: Theta
    mu: Tensor
    counter: Counter
    constrained: bool = False
    bounded: bool = False
    blocks: int = 1

    @property
    def lipschitz(self) -> Tensor:
        return torch.full_like(self.mu, math.inf)

    @cached_property
    def mu_on_host(self) -> Tensor:
        """``mu``, read from the device once."""
        return self.mu.detach().cpu()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the x of one task."""
        return tuple(self.start().shape[1:])

    @abstractmethod
    def start(self) -> Tensor:
        """The start of a cold solve, and what is shown as "before"."""

    def estimate(self) -> Tensor:
        """A start that is closer to the minimiser, if one is cheap to compute; ``start`` itself by default."""
        return self.start()

    def gradient_tol(self, tol: float) -> Tensor:
        """The gradient norm that guarantees a distance ``tol`` to the minimiser, μ·tol; where h is not known to be
        strongly convex none does, and ``tol`` itself is used. On the host."""
        mu = self.mu_on_host
        return torch.where(mu > 0, tol * mu, tol)

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """h_i(x_i, θ), shape (B,), differentiable in x and θ."""

    @abstractmethod
    def take(self: AnyLower, index: Tensor) -> AnyLower:
        """The same problem for some of the tasks."""

    def at_theta(self: AnyLower, theta: Theta) -> AnyLower:
        """The same tasks at another θ, or at leaves that derivatives are taken with respect to."""
        return replace(self, theta=theta)  # type: ignore[type-var]

    def gradient(self, x: Tensor) -> Tensor:
        """∇_x h_i(x_i)."""
        self.counter.gradients += len(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x)[0]

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of C."""
        return x

    def residual(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Norm of the shortest element of ∇h(x) + N_C(x), shape (B,): residual/μ bounds the distance to x̂."""
        return norm(self.gradient(x) if gradient is None else gradient)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor | None:
        """The entries of x that the constraint does not hold where the gradient is as given; None if there is no
        constraint."""
        return None

    def linearize(self, x: Tensor) -> Linearization:
        """∇²h at x, with everything that depends only on x computed once."""
        self.counter.linearisations += len(x)
        product = Retained.of(lambda x: self.energy(x).sum(), x)
        return Linearization(self, product.x, product)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i ∂_θ h_i(x_i, θ), by the names of ``theta``."""
        self.counter.theta_gradients += len(x)
        leaves = leaves_of(self.theta)
        with torch.enable_grad():
            total = (weights * self.at_theta(leaves).energy(x.detach())).sum()
        return gradients_of(total, leaves)

    def theta_gradient_each(self, x: Tensor) -> dict[str, Tensor]:
        """∂_θ h_i(x_i, θ) of each task separately, with a leading task dimension."""
        self.counter.theta_gradients += len(x)
        rows = rows_of(lambda theta: self.at_theta(theta).energy(x.detach()), self.theta)
        return {name: gradients.detach() for name, gradients in rows.items()}

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        """⟨∇_x h_i(x_i, θ), q_i⟩, shape (B,), differentiable in θ and linear in q."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.at_theta(theta).energy(x).sum()
            gradient = torch.autograd.grad(energy, x, create_graph=True)[0]
            return (gradient * q).flatten(1).sum(1)

    def mixed(self, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i ∂_θ⟨∇_x h_i(x_i, θ), q_i⟩, for all parameters in one backward pass."""
        self.counter.mixed_products += len(x)
        leaves = leaves_of(self.theta)
        with torch.enable_grad():
            total = (weights * self.pairing(leaves, x, q)).sum()
        return gradients_of(total, leaves)

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """∂_θ⟨∇_x h_i, q_i⟩ of each task separately, with a leading task dimension; differentiable in q."""
        self.counter.mixed_products += len(x)
        return rows_of(lambda theta: self.pairing(theta, x, q), self.theta)

    def constants(self, x: Tensor, radius: Tensor) -> Constants | None:
        """Valid constants on the ball of ``radius`` (B,) around each x, for certified error bounds; None if
        unknown."""
        return None

    def composite(self) -> Composite | None:
        """h as a sum over linear images of x, for solvers that need it; None if it is not of this form."""
        return None

    def saddle(self) -> Saddle | None:
        """h as the value of a saddle-point problem, for primal–dual solvers; None if it is not of this form."""
        return None

    def tilted(self, upper: Upper, weight: float | Tensor) -> Lower:
        """h + weight·g, one weight for all tasks or one per task."""
        weights = torch.as_tensor(weight, dtype=self.mu.dtype, device=self.mu.device)
        return Tilted(self, upper, weights.expand(len(self.mu)))

    def wrt(self, *inputs: str) -> Lower:
        """The same tasks with inputs such as ``y`` added to θ, so that every estimator differentiates in them, too.

        An input is a field with one row per task.
        """
        if clashes := sorted(set(inputs) & set(self.theta)):
            raise ValueError(f"θ already has a parameter {clashes[0]!r}")
        values: dict[str, Tensor] = {}
        for name in inputs:
            if not isinstance(value := getattr(self, name, None), Tensor):
                raise ValueError(f"{type(self).__name__} has no input {name!r} with one row per task")
            values[name] = value
        return WithInputs(self, values)

    def block(self: AnyLower, j: Tensor) -> AnyLower:
        """One block of a finite sum, j of each task; the mean over all blocks is h.

        Its constants are those of the block. Methods use ``sampled``.
        """
        raise NotImplementedError(f"{type(self).__name__} is not a finite sum")

    def counted_by(self: AnyLower, counter: Counter) -> AnyLower:
        """The same tasks with another counter."""
        return replace(self, counter=counter)  # type: ignore[type-var]

    def sampled(self: AnyLower, j: Tensor) -> AnyLower:
        """``block(j)``, whose iterations and derivatives count as 1/blocks; h itself if it is not a finite sum."""
        return self.block(j).counted_by(self.counter.part(self.blocks)) if self.blocks > 1 else self

    @property
    def block_lipschitz(self) -> Tensor:
        """An upper bound on the Lipschitz constants of ∇h_ij for all blocks j, shape (B,); +∞ where none is known.

        A step must not depend on the block that was drawn, or its mean would not be that of ∇h.
        """
        if self.blocks == 1:
            return self.lipschitz
        numbers = torch.arange(self.blocks, device=self.ids.device)
        return torch.stack([self.block(j.expand(len(self.ids))).lipschitz for j in numbers]).amax(0)

    def view(self, x: Tensor) -> Tensor:
        """The part of x that is the result, and that metrics see. A problem in which it is not all of x wraps its loss
        in ``Viewed``, so that ``Upper`` is a function of x."""
        return x

    def embed(self, v: Tensor) -> Tensor:
        """The adjoint of ``view``."""
        return v


@dataclass(frozen=True)
class _WrappedLower(Lower):
    """A lower level around another: what is not overridden is that of ``lower``."""

    lower: Lower

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        return self.lower.ids

    @property
    def theta(self) -> Theta:  # type: ignore[override]
        return self.lower.theta

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        return self.lower.mu

    @property
    def lipschitz(self) -> Tensor:
        return self.lower.lipschitz

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.lower.bounded

    @property
    def counter(self) -> Counter:  # type: ignore[override]
        return self.lower.counter

    @property
    def constrained(self) -> bool:  # type: ignore[override]
        return self.lower.constrained

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lower.shape

    def start(self) -> Tensor:
        return self.lower.start()

    def estimate(self) -> Tensor:
        return self.lower.estimate()

    def project(self, x: Tensor) -> Tensor:
        return self.lower.project(x)

    def residual(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        return self.lower.residual(x, self.gradient(x) if gradient is None else gradient)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor | None:
        return self.lower.free(x, gradient)

    def mixed(self, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return super().mixed(x, self._on_free_entries(x, q), weights)

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        return super().mixed_each(x, self._on_free_entries(x, q))

    def _on_free_entries(self, x: Tensor, q: Tensor) -> Tensor:
        """q with zeros where a constraint holds x, which the pairing does not know."""
        free = self.free(x, self.gradient(x)) if self.constrained else None
        return q if free is None else q * free

    def view(self, x: Tensor) -> Tensor:
        return self.lower.view(x)

    def embed(self, v: Tensor) -> Tensor:
        return self.lower.embed(v)


@dataclass(frozen=True)
class Tilted(_WrappedLower):
    """h + w g, a weight w per task: the lower level of value-function methods.

    Bounds come from those of h and g: ∇²g lies between 0 (−L_g if g is not convex) and L_g. θ is that of h, and
    ``mixed`` needs a g that does not depend on it.
    """

    upper: Upper
    weight: Tensor

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        down = self.weight < 0 if self.upper.convex else self.weight != 0
        return self.lower.mu - torch.where(down, self.slack, 0.0)

    @property
    def lipschitz(self) -> Tensor:
        return self.lower.lipschitz + self.slack

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.lower.bounded and self.upper.lipschitz is not None

    @property
    def slack(self) -> Tensor:
        """|w|·L_g, infinite where L_g is unknown and w is not zero."""
        bound = math.inf if self.upper.lipschitz is None else self.upper.lipschitz
        size = self.weight.abs() * torch.as_tensor(bound, dtype=self.weight.dtype, device=self.weight.device)
        return torch.where(self.weight == 0, 0.0, size)

    def take(self, index: Tensor) -> Tilted:
        return Tilted(self.lower.take(index), self.upper.take(index), self.weight[index])

    def at_theta(self, theta: Theta) -> Tilted:
        return replace(self, lower=self.lower.at_theta(theta))

    def energy(self, x: Tensor) -> Tensor:
        return self.lower.energy(x) + (self.weight * self.upper.value(x)).to(x.dtype)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.lower.gradient(x), expand(self.weight, x), self.upper.gradient(x))

    def linearize(self, x: Tensor) -> Linearization:
        product = self.lower.linearize(x).product
        slope = Retained.of(lambda x: (self.weight * self.upper.value(x)).sum(), x)
        free = self.free(x, self.gradient(x)) if self.constrained else None
        return Linearization(self, x, lambda v: product(v) + slope(v), free)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        gradient = self.lower.theta_gradient(x, weights)
        for name, direct in self.upper.theta_gradient(x, weights * self.weight).items():
            gradient[name] = gradient[name] + direct
        return gradient

    def theta_gradient_each(self, x: Tensor) -> dict[str, Tensor]:
        rows = self.lower.theta_gradient_each(x)
        for name, direct in self.upper.theta_gradient_each(x).items():
            rows[name] = rows[name] + expand(self.weight, direct) * direct
        return rows

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        if self.upper.depends_on_theta:
            raise NotImplementedError(
                "the loss depends on θ, so mixed derivatives of h + w g are not available"
            )
        return self.lower.pairing(theta, x, q)

    def composite(self) -> Composite | None:
        composite = self.lower.composite()
        if composite is None or self.upper.lipschitz is None:
            return None
        concave = self.upper.convex & (self.weight < 0)
        return TiltedComposite(composite, self._slope, torch.where(concave, 0.0, self.slack))

    def _slope(self, x: Tensor) -> Tensor:
        """w ∇g(x)."""
        return expand(self.weight, x) * self.upper.gradient(x)


@dataclass(frozen=True)
class WithInputs(_WrappedLower):
    """h as a function of x, θ and inputs, e.g. the measurements y: they are parameters of each task by itself.

    θ contains the rows of all tasks that there were when ``wrt`` was called. ``take`` keeps it whole and remembers
    which rows are in use, so that estimators may drop tasks and still add up gradients of one shape.
    """

    inputs: Theta
    #: The rows of the inputs that belong to the tasks; None for all of them.
    rows: Tensor | None = None

    @property
    def theta(self) -> Theta:  # type: ignore[override]
        return {**self.lower.theta, **self.inputs}

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.lower.blocks

    def at_theta(self, theta: Theta) -> WithInputs:
        inputs = {name: theta[name] for name in self.inputs}
        lower = self.lower.at_theta({name: value for name, value in theta.items() if name not in inputs})
        own = {name: value if self.rows is None else value[self.rows] for name, value in inputs.items()}
        return WithInputs(replace(lower, **own), inputs, self.rows)  # type: ignore[type-var]

    def take(self, index: Tensor) -> WithInputs:
        rows = index if self.rows is None else self.rows[index]
        return WithInputs(self.lower.take(index), self.inputs, rows)

    def block(self, j: Tensor) -> WithInputs:
        return replace(self, lower=self.lower.block(j))

    def counted_by(self, counter: Counter) -> WithInputs:
        return replace(self, lower=self.lower.counted_by(counter))

    def gradient_tol(self, tol: float) -> Tensor:
        return self.lower.gradient_tol(tol)

    def energy(self, x: Tensor) -> Tensor:
        return self.lower.energy(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.lower.gradient(x)

    def linearize(self, x: Tensor) -> Linearization:
        return self.lower.linearize(x)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        lower = self.at_theta(theta).lower
        return lower.pairing(lower.theta, x, q)

    def composite(self) -> Composite | None:
        return self.lower.composite()

    def saddle(self) -> Saddle | None:
        return self.lower.saddle()
