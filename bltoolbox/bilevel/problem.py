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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Bound, Constants, Counter, Theta
from bltoolbox.bilevel.tensors import norm

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


class Composite(Protocol):
    """h = Σ_k ψ_k(K_k x) + (μ_0/2)‖x‖², blocks k: the structure that majorise–minimise and primal–dual solvers
    need."""

    @property
    def ridge(self) -> float:
        """μ_0."""
        ...

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """K_k x for every block; the first one is that of the regularizer."""
        ...

    def adjoint(self, t: tuple[Tensor, ...]) -> Tensor:
        """Σ_k K_kᵀ t_k; may write to ``t``."""
        ...

    def touch(self, t: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor | float, ...]]:
        """Slopes ψ_k'(t_k), and curvatures of the parabolas that touch ψ_k there and lie above it."""
        ...


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the x of one task."""
        return tuple(self.start().shape[1:])

    @abstractmethod
    def start(self) -> Tensor:
        """The start of a cold solve."""

    def gradient_tol(self, tol: float) -> Tensor:
        """The gradient norm that guarantees a distance ``tol`` to the minimiser, μ·tol; where h is not known to be
        strongly convex none does, and ``tol`` itself is used."""
        return torch.where(self.mu > 0, tol * self.mu, tol)

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

    def linearize(self, x: Tensor) -> Linearization:
        """∇²h at x, with everything that depends only on x computed once."""
        self.counter.linearisations += len(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradient = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
        return Linearization(self, x, _Retained(gradient, x))

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i ∂_θ h_i(x_i, θ)."""
        leaves = _leaves(self.theta)
        with torch.enable_grad():
            total = (weights * self.at_theta(leaves).energy(x.detach())).sum()
        return gradients_of(total, leaves)

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
        leaves = _leaves(self.theta)
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

    def block(self: AnyLower, j: Tensor) -> AnyLower:
        """One block of a finite sum, j of each task; the mean over all blocks is h."""
        raise NotImplementedError(f"{type(self).__name__} is not a finite sum")

    def view(self, x: Tensor) -> Tensor:
        """The part of x that ``Upper`` and the metrics use."""
        return x

    def embed(self, v: Tensor) -> Tensor:
        """The adjoint of ``view``."""
        return v


@dataclass(frozen=True)
class Linearization:
    """v ↦ ∇²h(x) v.

    On a constraint set it is P∇²h P + (1 − P), P the free entries, which is as definite and has the same solution.
    """

    lower: Lower
    x: Tensor
    product: Callable[[Tensor], Tensor]
    free: Tensor | None = None

    def hvp(self, v: Tensor) -> Tensor:
        self.lower.counter.hessian_products += len(v)
        if self.free is None:
            return self.product(v)
        inside = v * self.free
        return self.product(inside) * self.free + (v - inside)

    def take(self, index: Tensor) -> Linearization:
        """The same for some of the tasks; reuses earlier computations if the product can be split."""
        lower, x = self.lower.take(index), self.x[index]
        divide = getattr(self.product, "take", None)
        product = None if divide is None else divide(index)
        if product is None:
            return lower.linearize(x)
        return Linearization(lower, x, product, None if self.free is None else self.free[index])


@dataclass(frozen=True)
class _Retained:
    """Hessian products by a second backward pass through a retained graph."""

    gradient: Tensor
    x: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        if not self.gradient.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(self.gradient, self.x, v, retain_graph=True)[0]


class BoundTasks(Protocol):
    """Tasks at one θ."""

    def on(self, ids: Sequence[int]) -> tuple[Lower, Upper]:
        """The lower level and the loss of the tasks ``ids``."""
        ...


class Tasks(Protocol):
    """The tasks of one split, addressed by number."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the x of one task."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def at(self, theta: Theta, counter: Counter) -> BoundTasks:
        """The tasks bound to θ; constants are computed once and shared by all chunks."""
        ...


def _leaves(theta: Theta) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in theta.items()}


def gradients_of(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The derivative of a scalar in each leaf; zero for leaves it does not depend on."""
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if part is None else part
        for (name, leaf), part in zip(leaves.items(), parts, strict=True)
    }


def rows_of(pairing: Callable[[dict[str, Tensor]], Tensor], theta: Theta) -> dict[str, Tensor]:
    """The derivative in θ of every entry of ``pairing(θ)``, one backward pass each; differentiable in the rest."""
    with torch.enable_grad():
        leaves = _leaves(theta)
        rows: list[Sequence[Any]] = [
            torch.autograd.grad(
                value, list(leaves.values()), create_graph=True, retain_graph=True, allow_unused=True
            )
            for value in pairing(leaves)
        ]
    return {
        name: torch.stack([torch.zeros_like(leaf) if row[k] is None else row[k] for row in rows])
        for k, (name, leaf) in enumerate(leaves.items())
    }
