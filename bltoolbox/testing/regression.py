"""A finite sum with a closed form: regression with a learned ridge, one task per fold.

    h_i(x, θ) = 1/n Σ_j ½(⟨a_ij, x⟩ − b_ij)² + ½ Σ_k e^{θ_k} x_k²,        g_i(x) = 1/n Σ_j ½(⟨c_ij, x⟩ − d_ij)²

x is a vector, the rows of both levels are their blocks, and with H_i = A_iᵀA_i/n + diag(e^θ)

    x̂_i = H_i⁻¹ A_iᵀb_i/n,        q_i = H_i⁻¹ ∇g_i(x̂_i),        ∂f/∂θ_k = −Σ_i w_i e^{θ_k} x̂_ik q_ik

All rows have norm 1, so that the series and iterations over single blocks converge with steps of 1/L of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.tensors import dot, keyed_generator

NAME = "log_weight"


@dataclass(frozen=True)
class Rows:
    """A matrix and a right-hand side for each task, (B, n, d) and (B, n)."""

    a: Tensor
    b: Tensor

    def misfit(self, x: Tensor) -> Tensor:
        return (self.a @ x.unsqueeze(-1)).squeeze(-1) - self.b

    def gradient(self, x: Tensor) -> Tensor:
        """Of the mean over the rows of half the squared misfits."""
        return (self.a.mT @ self.misfit(x).unsqueeze(-1)).squeeze(-1) / self.b.shape[1]

    def hessian(self) -> Tensor:
        return self.a.mT @ self.a / self.b.shape[1]

    def take(self, index: Tensor) -> Rows:
        return Rows(self.a[index], self.b[index])

    def block(self, j: Tensor) -> Rows:
        """Row j of each task, or the rows j where there are several."""
        tasks = torch.arange(len(self.b), device=self.b.device).unsqueeze(1)
        j = j.reshape(len(self.b), -1)
        return Rows(self.a[tasks, j], self.b[tasks, j])


@dataclass(frozen=True)
class RegressionLower(Lower):
    """h of some folds."""

    ids: Tensor
    theta: Theta
    rows: Rows
    counter: Counter = field(default_factory=Counter)

    bounded = True

    @cached_property
    def spectrum(self) -> Tensor:
        """The eigenvalues of AᵀA/n, in ascending order."""
        return torch.linalg.eigvalsh(self.rows.hessian())

    @cached_property
    def mu(self) -> Tensor:  # type: ignore[override]
        return self.spectrum[:, 0].clamp_min(0) + self.theta[NAME].detach().exp().min()

    @cached_property
    def lipschitz(self) -> Tensor:
        return self.spectrum[:, -1] + self.theta[NAME].detach().exp().max()

    def start(self) -> Tensor:
        return self.rows.b.new_zeros(len(self.rows.b), self.rows.a.shape[-1])

    def energy(self, x: Tensor) -> Tensor:
        ridge = self.theta[NAME].exp() * x
        return 0.5 * self.rows.misfit(x).square().mean(1) + 0.5 * dot(ridge, x)

    def mixed_each(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """By formula, since hundreds of copies of a task would take as many backward passes."""
        self.counter.mixed_products += len(x)
        return {NAME: self.theta[NAME].exp() * x * q}

    def take(self, index: Tensor) -> Self:
        return replace(self, ids=self.ids[index], rows=self.rows.take(index))

    def numbered(self, ids: Tensor) -> Self:
        """The same folds as other tasks, so that copies of one fold have draws of their own."""
        return replace(self, ids=ids)

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.rows.b.shape[1]

    def block(self, j: Tensor) -> Self:
        return replace(self, rows=self.rows.block(j))

    def hessian(self) -> Tensor:
        return self.rows.hessian() + torch.diag(self.theta[NAME].exp())

    def solution(self) -> Tensor:
        """x̂."""
        right = -self.rows.gradient(self.start())
        return torch.linalg.solve(self.hessian(), right.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class RegressionLoss(Upper):
    """g of some folds."""

    rows: Rows
    infimum: float = 0.0

    @property
    def lipschitz(self) -> Tensor:  # type: ignore[override]
        return torch.linalg.eigvalsh(self.rows.hessian())[:, -1]

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * self.rows.misfit(x).double().square().mean(1)

    def gradient(self, x: Tensor) -> Tensor:
        return self.rows.gradient(x)

    def take(self, index: Tensor) -> RegressionLoss:
        return replace(self, rows=self.rows.take(index))

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.rows.b.shape[1]

    def block(self, j: Tensor) -> RegressionLoss:
        return replace(self, rows=self.rows.block(j))


def regression(
    tasks: int,
    rows: int = 4,
    features: int = 3,
    dtype: torch.dtype = torch.float64,
    spread: float | None = None,
) -> tuple[RegressionLower, RegressionLoss]:
    """Random folds: fold i depends on i alone. With ``spread`` its rows differ from a common one by about that much, so
    that single blocks say more about their mean."""
    levels = []
    for level in ("training", "validation"):
        drawn = [_rows(level, i, rows, features, spread) for i in range(tasks)]
        levels.append(Rows(*(torch.stack(values).to(dtype) for values in zip(*drawn, strict=True))))
    theta = {NAME: torch.linspace(-1.0, -0.3, features, dtype=dtype)}
    return RegressionLower(torch.arange(tasks), theta, levels[0]), RegressionLoss(levels[1])


def _rows(level: str, task: int, rows: int, features: int, spread: float | None) -> tuple[Tensor, Tensor]:
    generator = keyed_generator("regression", level, task)
    a = torch.randn(rows, features, dtype=torch.float64, generator=generator)
    b = torch.randn(rows, dtype=torch.float64, generator=generator)
    if spread is not None:
        a, b = a[:1] + spread * a, b[:1] + spread * b
    return a / a.norm(dim=1, keepdim=True), b


def regression_gradient(lower: RegressionLower, upper: RegressionLoss, weights: Tensor) -> dict[str, Tensor]:
    """Σ_i w_i ∇f_i(θ)."""
    x = lower.solution()
    q = torch.linalg.solve(lower.hessian(), upper.gradient(x).unsqueeze(-1)).squeeze(-1)
    return {NAME: -(weights.unsqueeze(1) * lower.theta[NAME].exp() * x * q).sum(0)}
