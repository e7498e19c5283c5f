"""The mathematics of one problem: lower-level energies and their derivatives, and the upper loss.

    h_i(x, θ) = ½‖A_θ x − y_i‖² + R_θ(x) + (μ_0/2)‖x‖²   over x in C,        g_i(x) = ‖x − x*_i‖²

C is the whole space, the non-negative orthant or the unit box. For a convex C everything below is about the minimiser
over C: ``residual`` is the norm of the shortest element of ∇h + N_C (so that residual/μ still bounds the distance to
the minimiser), and the linearisation acts on the free pixels only. Solvers and hypergradients need not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Counter
from bltoolbox.bilevel.roles import Operator, Regularizer, Theta
from bltoolbox.bilevel.tensors import detached, dot, image_layout, norm, ordinary

Constraint = Literal["none", "nonnegative", "box"]
_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "nonnegative": (0.0, None),
    "box": (0.0, 1.0),
}


def split(theta: Theta, role: str) -> dict[str, Tensor]:
    """The parameters of one role, under the names its component gave them."""
    prefix = role + "."
    return {name[len(prefix) :]: value for name, value in theta.items() if name.startswith(prefix)}


def join(**roles: Theta) -> dict[str, Tensor]:
    """Named parameters of several roles in one mapping."""
    return {f"{role}.{name}": value for role, part in roles.items() for name, value in part.items()}


def upgraded(theta: Theta, regularizer: Regularizer) -> dict[str, Tensor]:
    """θ as read from a file, in the parameters that the regularizer has today."""
    others = {name: value for name, value in theta.items() if not name.startswith("regularizer.")}
    return join(regularizer=regularizer.upgrade(split(theta, "regularizer"))) | others


@dataclass(frozen=True)
class UpperLoss:
    """g_i(x) = scale·‖x − x*_i‖², summed in float64."""

    x_true: Tensor
    scale: float = 1.0

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of ∇g."""
        return 2 * self.scale

    def value(self, x: Tensor) -> Tensor:
        return self.scale * dot(difference := (x - self.x_true).double(), difference)

    def gradient(self, x: Tensor) -> Tensor:
        return 2 * self.scale * (x - self.x_true)


@dataclass(frozen=True)
class Problem:
    """Operator, regularizer and constraint: everything that does not depend on θ or on the samples."""

    operator: Operator
    regularizer: Regularizer
    constraint: Constraint = "none"
    strong_convexity: float = 0.0
    loss_scale: float = 1.0

    def at(self, theta: Theta, shape: Sequence[int], counter: Counter | None = None) -> ProblemAt:
        """The problem at θ for images of ``shape`` (C, H, W), with its constants."""
        theta = {name: ordinary(value) for name, value in theta.items()}
        return ProblemAt(self, theta, tuple(shape), counter or Counter())

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ."""
        return join(
            regularizer=self.regularizer.project(split(theta, "regularizer")),
            operator=split(theta, "operator"),
        )

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        """z without its components across a linear constraint."""
        return join(
            regularizer=self.regularizer.project_gradient(split(gradient, "regularizer")),
            operator=split(gradient, "operator"),
        )


@dataclass(frozen=True)
class ProblemAt:
    """A problem at one θ. Lipschitz and convexity constants are computed once and shared by all chunks."""

    problem: Problem
    theta: dict[str, Tensor]
    shape: tuple[int, ...]
    counter: Counter

    @cached_property
    def regularizer_theta(self) -> dict[str, Tensor]:
        return split(self.theta, "regularizer")

    @cached_property
    def operator_theta(self) -> dict[str, Tensor]:
        return split(self.theta, "operator")

    @cached_property
    def lipschitz(self) -> Tensor | float | None:
        """A true upper bound of the Lipschitz constant of ∇h, or None when a component knows none."""
        with detached():
            data = self.problem.operator.norm_bound(self.operator_theta, self.shape)
            prior = self.problem.regularizer.lipschitz(self.regularizer_theta, self.shape)
            if data is None or prior is None:
                return None
            bound = data + prior + self.problem.strong_convexity
            # Infinity bounds nothing; a step of length 1/∞ would not move.
            return None if bool(torch.isinf(torch.as_tensor(bound)).any()) else bound

    @cached_property
    def mu(self) -> Tensor | float:
        """A true lower bound of the eigenvalues of ∇²h, of either sign; −∞ when none is known."""
        operator, regularizer = self.problem.operator, self.problem.regularizer
        with detached():
            data = operator.strong_convexity(self.operator_theta, self.shape)
            prior = regularizer.strong_convexity(self.regularizer_theta, self.shape)
            # What is true without being told: AᵀA is never negative, and neither is the Hessian of a convex function.
            data = 0.0 if data is None else data
            if prior is None:
                prior = 0.0 if regularizer.convex else -math.inf
            return data + prior + self.problem.strong_convexity

    def on(self, y: Tensor) -> LowerLevel:
        """Bound to measurements."""
        y = ordinary(image_layout(y))
        return LowerLevel(self, y, _column(self.mu, y))


def _column(value: Tensor | float, like: Tensor) -> Tensor:
    """The same number for every sample."""
    with detached():
        return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like)).clone()


@dataclass(frozen=True)
class LowerLevel:
    """h_i(·, θ) for the samples of one chunk: what solvers and hypergradients work on.

    ``mu`` and ``lipschitz`` have one entry per sample. ``mu`` bounds the eigenvalues of ∇²h from below: only where it
    is positive is h known to be strongly convex, and it is −∞ where nothing is known. ``lipschitz`` is None then.
    """

    at: ProblemAt
    y: Tensor
    mu: Tensor

    @property
    def lipschitz(self) -> Tensor | None:
        """Computed when somebody asks, once a θ: not every solver does."""
        return None if self.at.lipschitz is None else _column(self.at.lipschitz, self.y)

    @property
    def operator(self) -> Operator:
        return self.at.problem.operator

    @property
    def regularizer(self) -> Regularizer:
        return self.at.problem.regularizer

    @property
    def counter(self) -> Counter:
        """Where derivatives are counted; a solver that forms a gradient without ``gradient`` counts it here."""
        return self.at.counter

    @property
    def theta(self) -> dict[str, Tensor]:
        return self.at.theta

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of x."""
        return self.at.shape

    @property
    def constrained(self) -> bool:
        return self.at.problem.constraint != "none"

    @property
    def ridge(self) -> float:
        """μ_0 of the extra term (μ_0/2)‖x‖²."""
        return self.at.problem.strong_convexity

    def take(self, index: Tensor) -> LowerLevel:
        """The same problem for some of the samples."""
        return replace(self, y=self.y[index], mu=self.mu[index])

    def gradient_tol(self, tol: float) -> Tensor:
        """The gradient norm that asks for a distance ``tol`` to the minimiser, μ·tol; where h is not known to be
        strongly convex no gradient norm does, and ``tol`` itself is asked for."""
        return torch.where(self.mu > 0, tol * self.mu, tol)

    def start(self) -> Tensor:
        """Where a cold solve begins."""
        return self.project(image_layout(self.operator.start(self.y, self.at.operator_theta)))

    def forward(self, x: Tensor) -> Tensor:
        """A x."""
        return self.operator.apply(x, self.at.operator_theta)

    def backward(self, y: Tensor) -> Tensor:
        """Aᵀ y."""
        return self.operator.adjoint(y, self.at.operator_theta)

    def energy(self, x: Tensor) -> Tensor:
        """h_i(x_i), shape (B,)."""
        misfit = self.forward(x) - self.y
        energy = 0.5 * dot(misfit, misfit) + self.regularizer.energy(self.at.regularizer_theta, x)
        return energy + 0.5 * self.ridge * dot(x, x) if self.ridge else energy

    def gradient(self, x: Tensor) -> Tensor:
        """∇_x h_i(x_i)."""
        self.counter.gradients += len(x)
        gradient = self.regularizer.gradient(self.at.regularizer_theta, x)
        gradient = gradient + self.backward(self.forward(x) - self.y)
        return gradient.add_(x, alpha=self.ridge) if self.ridge else gradient

    def project(self, x: Tensor) -> Tensor:
        """The nearest point of C."""
        low, high = _BOUNDS[self.at.problem.constraint]
        return x.clamp(low, high) if self.constrained else x

    def residual(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Norm of the shortest element of ∇h(x) + N_C(x), shape (B,); without constraint ‖∇h(x)‖."""
        gradient = self.gradient(x) if gradient is None else gradient
        return norm(gradient * self.free(x, gradient) if self.constrained else gradient)

    def free(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Pixels that the constraint does not hold: inside C, or drawn inwards by the gradient."""
        low, high = _BOUNDS[self.at.problem.constraint]
        held = torch.zeros_like(x, dtype=torch.bool)
        if low is not None:
            held |= (x <= low) & (gradient >= 0)
        if high is not None:
            held |= (x >= high) & (gradient <= 0)
        return ~held

    def linearize(self, x: Tensor) -> Linearization:
        """∇²h at x, with what depends on x computed once."""
        self.counter.linearisations += len(x)
        free = self.free(x, self.gradient(x)) if self.constrained else None
        return Linearization(self, x, self.regularizer.linearize(self.at.regularizer_theta, x), free)

    def mixed(self, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i ∂_θ⟨∇_x h_i(x_i, θ), q_i⟩, for all parameters in one backward pass."""
        self.counter.mixed_products += len(x)
        q = self._free_part(x, q)
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in self.theta.items()}
            pairing = self.regularizer.pairing(split(leaves, "regularizer"), x, q)
            if operator_leaves := split(leaves, "operator"):
                pairing = pairing + self._operator_pairing(operator_leaves, x, q)
            gradients = torch.autograd.grad(
                (weights * pairing).sum(), list(leaves.values()), allow_unused=True
            )
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """∂_θ⟨∇_x h_i, q_i⟩ of each sample apart, with a leading sample dimension; differentiable in q."""
        self.counter.mixed_products += len(x)
        q = self._free_part(x, q)
        parts = join(regularizer=self.regularizer.pairing_gradients(self.at.regularizer_theta, x, q))
        if self.at.operator_theta:
            parts |= join(operator=self._operator_pairing_gradients(x, q))
        return parts

    def _free_part(self, x: Tensor, q: Tensor) -> Tensor:
        return q * self.free(x, self.gradient(x)) if self.constrained else q

    def _operator_pairing(self, theta: Mapping[str, Tensor], x: Tensor, q: Tensor) -> Tensor:
        """⟨Aᵀ(Ax − y), q⟩ = ⟨Ax − y, Aq⟩."""
        return dot(self.operator.apply(x, theta) - self.y, self.operator.apply(q, theta))

    def _operator_pairing_gradients(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in self.at.operator_theta.items()}
            pairing = self._operator_pairing(leaves, x, q)
            rows = [
                torch.autograd.grad(value, list(leaves.values()), create_graph=True, retain_graph=True)
                for value in pairing
            ]
        return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(leaves)}


@dataclass(frozen=True)
class Linearization:
    """v ↦ ∇²h(x) v; with a constraint P∇²h P + (1 − P), P the free pixels, which is as definite and solves the same."""

    lower: LowerLevel
    x: Tensor
    regularizer_hvp: Callable[[Tensor], Tensor]
    free: Tensor | None = None

    def hvp(self, v: Tensor) -> Tensor:
        self.lower.counter.hessian_products += len(v)
        if self.free is None:
            return self._hvp(v)
        inside = v * self.free
        return self._hvp(inside) * self.free + (v - inside)

    def take(self, index: Tensor) -> Linearization:
        """For some of the samples; what was computed is kept where the regularizer's product can be split."""
        lower, x = self.lower.take(index), self.x[index]
        part = getattr(self.regularizer_hvp, "take", None)
        if part is None:
            return lower.linearize(x)
        return Linearization(lower, x, part(index), None if self.free is None else self.free[index])

    def _hvp(self, v: Tensor) -> Tensor:
        product = self.regularizer_hvp(v) + self.lower.backward(self.lower.forward(v))
        return product.add_(v, alpha=self.lower.ridge) if self.lower.ridge else product
