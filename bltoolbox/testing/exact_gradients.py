"""f, its gradient and the gradient of every task to high accuracy, along a sequence of θ.

Lower levels and adjoint systems are solved to a small fraction of their scales, in float64, and each starts from the
solution at the last θ, from where a few Newton steps suffice; where they do not, the recipe's own solver is used. All
tasks are solved at once: this is for problems small enough to know ∇f at every step.

f is g(x) − ⟨q, ∇h(x)⟩: since x − x̂ ≈ H⁻¹∇h(x) and q = H⁻¹∇g(x), the error of x enters squared, and differences of f
between neighbouring θ are known to many digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.penalty import penalty_gradient
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Counter, Scales, Theta
from bltoolbox.bilevel.tensors import detached, dot, norm

#: Accuracy of solutions and adjoints, relative to their scales.
PRECISION = 1e-7
_LIMIT = 10_000
#: Newton steps that are tried, and the relative accuracy of each.
_NEWTON, _FORCING = 12, 1e-3


@dataclass(frozen=True)
class Gradients:
    """f at one θ, and ∇f_i of every task as a row of a matrix (m, d)."""

    value: float
    rows: Tensor

    @property
    def mean(self) -> Tensor:
        """∇f."""
        return self.rows.mean(0)

    @property
    def variance(self) -> float:
        """V = 1/m Σ_i ‖∇f_i − ∇f‖²."""
        return float((self.rows - self.mean).square().sum(1).mean())

    def of(self, batch: Sequence[int]) -> Tensor:
        """∇f_v of a batch with equal weights."""
        return self.rows[list(batch)].mean(0)


class ExactGradients:
    """The gradients of the first ``count`` tasks of an oracle, with warm starts of their own."""

    def __init__(self, oracle: BilevelOracle, count: int, scales: Scales) -> None:
        self._oracle = oracle
        self._ids = range(count)
        self._scales = scales
        self._warm: tuple[Tensor, Tensor] | None = None

    @detached()
    def at(self, theta: Theta) -> Gradients:
        """f and its gradients at θ."""
        lower, upper = self._oracle.tasks.at(theta, Counter()).on(self._ids)
        start, adjoint = self._warm or (lower.start(), torch.zeros_like(lower.start()))
        x = self._minimiser(lower, start)
        tol = torch.full_like(lower.mu, PRECISION * self._scales.slope * upper.scale)
        q = _solved(lower, x, upper.gradient(x), adjoint, tol)
        self._warm = (x, q)
        rows = {name: -entry for name, entry in lower.mixed_each(x, q).items()}
        for name, entry in upper.theta_gradient_each(x).items():
            rows[name] = rows[name] + entry
        penalty, slopes = penalty_gradient(self._oracle.problem, theta)
        for name, entry in slopes.items():
            rows[name] = rows[name] + entry
        value = upper.value(x)
        if not lower.constrained:
            value = value - dot(q, lower.gradient(x))
        return Gradients(float(value.mean()) + (penalty or 0.0), self._flat(rows, theta))

    def _minimiser(self, lower: Lower, start: Tensor) -> Tensor:
        effort = Accuracy(PRECISION * self._scales.distance)
        near = None if self._warm is None or lower.constrained else _newton(lower, start, effort)
        if near is not None:
            return near
        solution = self._oracle.minimise(lower, start, effort)
        self._oracle.require_solved(solution, self._ids)
        return solution.x

    def _flat(self, rows: dict[str, Tensor], theta: Theta) -> Tensor:
        """One row per task, without what a linear constraint excludes."""
        project = self._oracle.problem.project_gradient
        each = [project({name: rows[name][i] for name in theta}) for i in range(len(self._ids))]
        return torch.stack([flatten(gradient, theta) for gradient in each])


def _newton(lower: Lower, x: Tensor, effort: Accuracy) -> Tensor | None:
    """Newton's method as long as every residual falls; None if one does not, or not far enough."""
    tol, residual = lower.gradient_tol(effort.tol).to(x.device), torch.full_like(lower.mu, torch.inf)
    for _ in range(_NEWTON):
        gradient = lower.gradient(x)
        before, residual = residual, norm(gradient)
        if bool((residual <= tol).all()):
            return x
        if not bool((residual < before).all()):
            return None
        needed = torch.maximum(_FORCING * residual, 0.5 * tol)
        x = x - _solved(lower, x, gradient, torch.zeros_like(x), needed)
    return None


def _solved(lower: Lower, x: Tensor, right: Tensor, start: Tensor, tol: Tensor) -> Tensor:
    """∇²h(x)⁻¹ applied to the right-hand side, to a residual norm for each task."""
    method = ConjugateGradients("the exact gradient")
    q, _, _ = solve_linear(method, lower.linearize(x), right, start, tol, _LIMIT)
    return q


def flatten(values: Theta, order: Theta) -> Tensor:
    """Entries by name as one vector, in the order of another mapping."""
    return torch.cat([values[name].detach().double().flatten() for name in order])
