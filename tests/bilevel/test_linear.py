"""Warm starts of linear systems: what the best multiple of the last solution saves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import normal
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.tensors import norm

SIZE = 12


@dataclass(frozen=True)
class Matrices:
    """One symmetric matrix per sample, (B, n, n)."""

    of: Tensor

    def hvp(self, v: Tensor) -> Tensor:
        return (self.of @ v.unsqueeze(-1)).squeeze(-1)

    def take(self, index: Tensor) -> Matrices:
        return Matrices(self.of[index])


def definite(count: int = 3) -> Matrices:
    root = normal(count, SIZE, SIZE)
    return Matrices(root @ root.mT + torch.eye(SIZE, dtype=root.dtype))


def solved(
    system: Matrices, rhs: Tensor, start: Tensor, tol: float = 1e-8, limit: int = 200
) -> tuple[Tensor, Tensor, Tensor]:
    goal = torch.full((len(rhs),), tol, dtype=rhs.dtype)
    return solve_linear(ConjugateGradients(), system, rhs, start, goal, limit)


def test_a_system_that_is_only_multiplied_needs_no_iteration() -> None:
    system, rhs = definite(), normal(3, SIZE, seed=1)
    q, residual, iterations = solved(system, rhs, torch.zeros_like(rhs), tol=1e-10)
    assert (iterations > 0).all() and (residual <= 1e-10).all()
    factors = torch.tensor([2.0, 0.1, 1.0], dtype=rhs.dtype).unsqueeze(1)
    again, residual, iterations = solved(Matrices(factors.unsqueeze(2) * system.of), rhs, q)
    assert iterations.tolist() == [0, 0, 0] and (residual <= 1e-8).all()
    torch.testing.assert_close(again, q / factors)


def test_the_start_is_the_best_multiple_in_the_norm_of_the_system() -> None:
    system, rhs, start = definite(), normal(3, SIZE, seed=1), normal(3, SIZE, seed=2)
    start = torch.where((rhs * start).sum(1, keepdim=True) > 0, start, -start)
    q, _, iterations = solved(system, rhs, start, limit=0)
    assert iterations.tolist() == [0, 0, 0]
    exact = torch.linalg.solve(system.of, rhs)

    def error(point: Tensor) -> Tensor:
        return ((point - exact) * system.hvp(point - exact)).sum(1)

    for factor in (0.0, 0.5, 0.9, 1.1, 2.0):
        assert (error(q) <= error(factor * q) + 1e-12).all()
    assert (error(q) < 0.999 * error(start)).all()


@pytest.mark.parametrize("multiple", [0.0, -1.0])
def test_a_start_that_points_nowhere_or_away_is_left_as_it_is(multiple: float) -> None:
    system, rhs = definite(), normal(3, SIZE, seed=1)
    start = multiple * rhs
    q, residual, _ = solved(system, rhs, start, limit=0)
    assert torch.equal(q, start)
    torch.testing.assert_close(residual, norm(rhs - system.hvp(start)))
    _, residual, _ = solved(system, rhs, start)
    assert (residual <= 1e-8).all()
