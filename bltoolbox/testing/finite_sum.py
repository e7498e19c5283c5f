"""A finite-sum bilevel problem whose answers are known in closed form.

    h_ij(x, θ) = ½ xᵀ A_ij x + ½ Σ_p e^{θ_p} d_ijp x_p² − b_ijᵀ x,        h_i = 1/n Σ_j h_ij
    g_ik(x, θ) = ½ ‖x − t_ik‖² + ½ ρ_k ‖θ − θ*‖²,                         g_i = 1/m Σ_k g_ik

for tasks i, blocks j of the lower level and blocks k of the loss, all of them different. With Ā_i, d̄_i, b̄_i, t̄_i, ρ̄ the
means over blocks and H_i(θ) = Ā_i + diag(e^θ d̄_i),

    x̂_i(θ) = H_i⁻¹ b̄_i,        ∇f_i(θ)_p = −e^{θ_p} d̄_ip x̂_ip q_ip + ρ̄ (θ_p − θ*_p),        H_i q_i = x̂_i − t̄_i

The targets are chosen so that t̄_i = x̂_i(θ*), which makes θ* the minimiser of every f_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver, Problem
from bltoolbox.bilevel.tasks import BoundTasks, Tasks
from bltoolbox.bilevel.tensors import dot, keyed_generator


@dataclass(frozen=True)
class QuadraticSum:
    """A (B, n, s, s), d and b (B, n, s), t (B, m, s), ρ (B, m) and θ* (s,) of B tasks, s the size of x."""

    a: Tensor
    d: Tensor
    b: Tensor
    t: Tensor
    rho: Tensor
    best: Tensor

    def take(self, index: Tensor) -> QuadraticSum:
        """Of some of the tasks."""
        rows = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "best"}
        return replace(self, **rows)

    def lower_block(self, j: Tensor) -> QuadraticSum:
        """With block j of each task alone."""
        rows = torch.arange(len(j), device=j.device)
        a, d, b = (coefficients[rows, j].unsqueeze(1) for coefficients in (self.a, self.d, self.b))
        return replace(self, a=a, d=d, b=b)

    def upper_block(self, k: Tensor) -> QuadraticSum:
        """With block k of the loss of each task alone."""
        rows = torch.arange(len(k), device=k.device)
        return replace(self, t=self.t[rows, k].unsqueeze(1), rho=self.rho[rows, k].unsqueeze(1))

    def hessian(self, theta: Tensor) -> Tensor:
        """H_i(θ), (B, s, s)."""
        return self.a.mean(1) + torch.diag_embed(theta.exp() * self.d.mean(1))

    def solution(self, theta: Theta) -> Tensor:
        """x̂_i(θ)."""
        return torch.linalg.solve(self.hessian(theta["theta"]), self.b.mean(1))

    def adjoint(self, theta: Theta) -> Tensor:
        """q_i = H_i⁻¹ ∇g_i(x̂_i)."""
        return torch.linalg.solve(self.hessian(theta["theta"]), self.solution(theta) - self.t.mean(1))

    def value(self, theta: Theta) -> Tensor:
        """f_i(θ), (B,)."""
        spread = (self.solution(theta).unsqueeze(1) - self.t).square().sum(2).mean(1)
        return 0.5 * spread + 0.5 * self.rho.mean(1) * (theta["theta"] - self.best).square().sum()

    def value_gradient(self, theta: Theta) -> Tensor:
        """∇f_i(θ), (B, s)."""
        inner = theta["theta"].exp() * self.d.mean(1) * self.solution(theta) * self.adjoint(theta)
        return self.rho.mean(1, keepdim=True) * (theta["theta"] - self.best) - inner


def quadratic_sum(
    tasks: int = 3, blocks: int = 4, upper_blocks: int = 3, size: int = 5, seed: int = 0, rho: float = 0.1
) -> QuadraticSum:
    """Random positive definite blocks in float64, with Hessians of condition number about ten at θ*."""
    generator = keyed_generator("finite sum", seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    root = normal(tasks, blocks, size, size) / size**0.5
    a = root @ root.mT + 0.5 * torch.eye(size, dtype=torch.float64)
    d = 0.5 + torch.rand(tasks, blocks, size, dtype=torch.float64, generator=generator)
    best = 0.5 * normal(size)
    problem = QuadraticSum(
        a, d, 2 * normal(tasks, blocks, size), normal(tasks, upper_blocks, size), normal(0), best
    )
    centre = problem.solution({"theta": best}).unsqueeze(1)
    noise = 0.3 * (problem.t - problem.t.mean(1, keepdim=True))
    weights = rho * torch.linspace(0.5, 1.5, upper_blocks, dtype=torch.float64)
    if upper_blocks == 1:
        weights = weights.new_full((1,), rho)
    return replace(problem, t=centre + noise, rho=weights.expand(tasks, upper_blocks))


@dataclass(frozen=True)
class SumLower(Lower):
    """h_i of some tasks."""

    ids: Tensor
    theta: Theta
    counter: Counter
    sums: QuadraticSum
    bounded = True

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        return self._spectrum[:, 0]

    @property
    def lipschitz(self) -> Tensor:
        return self._spectrum[:, -1]

    @cached_property
    def _spectrum(self) -> Tensor:
        return torch.linalg.eigvalsh(self.sums.hessian(self.theta["theta"].detach()))

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.sums.a.shape[1]

    def start(self) -> Tensor:
        return torch.zeros_like(self.sums.b[:, 0])

    def energy(self, x: Tensor) -> Tensor:
        quadratic = (self.sums.hessian(self.theta["theta"]) @ x.unsqueeze(-1)).squeeze(-1)
        return 0.5 * dot(x, quadratic) - dot(x, self.sums.b.mean(1))

    def take(self, index: Tensor) -> SumLower:
        return replace(self, ids=self.ids[index], sums=self.sums.take(index))

    def block(self, j: Tensor) -> SumLower:
        return replace(self, sums=self.sums.lower_block(j))


@dataclass(frozen=True)
class SumUpper(Upper):
    """g_i of some tasks."""

    theta: Theta
    sums: QuadraticSum
    lipschitz = 1.0
    infimum = 0.0

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.sums.t.shape[1]

    def value(self, x: Tensor) -> Tensor:
        spread = (x.unsqueeze(1) - self.sums.t).square().sum(2).mean(1)
        distance = (self.theta["theta"] - self.sums.best).square().sum()
        return (0.5 * spread + 0.5 * self.sums.rho.mean(1) * distance).double()

    def gradient(self, x: Tensor) -> Tensor:
        return x - self.sums.t.mean(1)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return {"theta": (weights * self.sums.rho.mean(1)).sum() * (self.theta["theta"] - self.sums.best)}

    def take(self, index: Tensor) -> SumUpper:
        return replace(self, sums=self.sums.take(index))

    def block(self, j: Tensor) -> SumUpper:
        return replace(self, sums=self.sums.upper_block(j))


@dataclass(frozen=True)
class SumTasks(Tasks, BoundTasks):
    """All tasks of a ``QuadraticSum``, and those at one θ."""

    sums: QuadraticSum
    theta: Theta | None = None
    counter: Counter | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sums.b.shape[2:])

    @property
    def dtype(self) -> torch.dtype:
        return self.sums.b.dtype

    @property
    def device(self) -> torch.device:
        return self.sums.b.device

    def __len__(self) -> int:
        return len(self.sums.b)

    def at(self, theta: Theta, counter: Counter) -> SumTasks:
        return replace(self, theta=theta, counter=counter)

    def on(self, ids: Sequence[int]) -> tuple[SumLower, SumUpper]:
        assert self.theta is not None and self.counter is not None
        index = torch.tensor(list(ids))
        sums = self.sums.take(index)
        return SumLower(index, self.theta, self.counter, sums), SumUpper(self.theta, sums)


class SumProblem(Problem):
    """θ starts at zero."""

    def __init__(self, sums: QuadraticSum) -> None:
        self.sums = sums

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"theta": torch.zeros_like(self.sums.best)}

    def tasks(self, split: str, like: Tensor) -> SumTasks | None:
        return SumTasks(self.sums) if split == "training" else None


def make_sum_oracle(
    sums: QuadraticSum, solver: LowerSolver, hypergradient: HypergradientEstimator, **options: object
) -> BilevelOracle:
    """An oracle for all tasks of ``sums``; ``options`` are those of ``BilevelOracle``."""
    return BilevelOracle(SumProblem(sums), SumTasks(sums), solver, hypergradient, **options)  # type: ignore[arg-type]
