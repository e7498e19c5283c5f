"""The one lower-level loop: how each sample ends, and that no solver is believed more than its residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import REGULARIZERS, SOLVERS, lower_level, noisy, small_foe
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Rows, Status, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import expand, norm
from bltoolbox.testing import Tikhonov

every_solver = pytest.mark.parametrize("name", SOLVERS)
every_regularizer = pytest.mark.parametrize("prior", REGULARIZERS)


@every_solver
@every_regularizer
@pytest.mark.parametrize("tol", [1.0, 1e-2, 1e-4, 1e-5, 1e-6, 1e-8, 0.0])
def test_float32_never_claims_more_than_it_reached(name: str, prior: str, tol: float) -> None:
    y = noisy(3).float()
    lower = lower_level(REGULARIZERS[prior](), y)
    solution = solve(SOLVERS[name](), lower, lower.start(), tol, limit=5000)
    true = lower.residual(solution.x)
    torch.testing.assert_close(solution.residual, true, rtol=1e-3, atol=1e-6)
    for status, residual in zip(solution.status, true.tolist(), strict=True):
        assert status in (Status.CONVERGED, Status.STALLED)
        assert status is not Status.CONVERGED or residual <= tol + 1e-7


@every_solver
@every_regularizer
def test_a_tolerance_below_the_floor_of_the_dtype_ends_as_stalled(name: str, prior: str) -> None:
    for dtype, tol, floor in ((torch.float32, 1e-9, 1e-3), (torch.float64, 1e-18, 1e-12)):
        lower = lower_level(REGULARIZERS[prior](), noisy(2).to(dtype))
        solution = solve(SOLVERS[name](), lower, lower.start(), tol, limit=20_000)
        assert set(solution.status) == {Status.STALLED}
        assert (solution.residual < floor).all(), "stalled at the floor, not before"


@every_solver
def test_the_iteration_limit_ends_as_limit(name: str) -> None:
    lower = lower_level(small_foe(), noisy(3))
    solution = solve(SOLVERS[name](), lower, torch.zeros_like(lower.y), 1e-10, limit=3)
    assert set(solution.status) == {Status.LIMIT}
    assert solution.iterations.tolist() == [3, 3, 3]
    torch.testing.assert_close(solution.residual, norm(lower.gradient(solution.x)), rtol=1e-10, atol=0)


@every_solver
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_data_ends_as_not_finite_and_leaves_the_others_alone(name: str, bad: float) -> None:
    y = noisy(3)
    healthy = solve(SOLVERS[name](), lower := lower_level(small_foe(), y), lower.start(), 1e-8)
    y[1, 0, 2, 3] = bad
    lower = lower_level(small_foe(), y)
    solution = solve(SOLVERS[name](), lower, lower.start(), 1e-8)
    assert solution.status == (Status.CONVERGED, Status.NOT_FINITE, Status.CONVERGED)
    for i in (0, 2):
        torch.testing.assert_close(solution.x[i], healthy.x[i], rtol=0, atol=1e-12)


class TooSmallAConstant(Tikhonov):
    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return super().lipschitz(theta, shape) / 100


def test_a_wrong_lipschitz_constant_ends_as_diverged() -> None:
    lower = lower_level(TooSmallAConstant(weight=100), noisy(2))
    solution = solve(AGD(), lower, lower.start(), 1e-6)
    assert set(solution.status) == {Status.DIVERGED}


@dataclass(frozen=True)
class Claim:
    x: Tensor
    residual: Tensor


class Optimist(LowerSolver):
    """Gradient descent that reports a fixed part of its residual."""

    def __init__(self, part: float, broken: bool = False) -> None:
        self.part = part
        self.broken = broken

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> Claim:
        return Claim(x0, self.part * norm(lower.gradient(x0)))

    def step(self, lower: Lower, state: Claim) -> Claim:
        assert lower.bounded
        step = lower.gradient(state.x) / expand(lower.lipschitz, state.x)
        x = state.x if self.broken else state.x - step
        return replace(state, x=x, residual=self.part * norm(lower.gradient(x)))


def test_a_residual_that_flatters_is_recomputed_before_a_sample_may_leave() -> None:
    lower = lower_level(small_foe(), noisy(3))
    solution = solve(Optimist(0.01), lower, lower.start(), 1e-6)
    assert set(solution.status) == {Status.CONVERGED}
    assert (norm(lower.gradient(solution.x)) <= 1e-6).all()


def test_a_solver_that_only_claims_ends_as_stalled() -> None:
    lower = lower_level(small_foe(), noisy(3))
    solution = solve(Optimist(0.0, broken=True), lower, lower.start(), 1e-6)
    assert set(solution.status) == {Status.STALLED}
    torch.testing.assert_close(solution.residual, norm(lower.gradient(lower.start())), rtol=1e-12, atol=0)


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_a_claim_contradicted_at_the_iteration_limit_ends_as_limit(limit: int) -> None:
    lower = lower_level(small_foe(), noisy(3))
    solution = solve(Optimist(1e-9), lower, lower.start(), 1e-6, limit=limit)
    assert set(solution.status) <= {Status.LIMIT, Status.STALLED}
    torch.testing.assert_close(solution.residual, norm(lower.gradient(solution.x)), rtol=1e-12, atol=0)


@every_solver
def test_looking_less_often_gives_the_same_minimiser(name: str) -> None:
    lower = lower_level(small_foe(), noisy(3))
    often, seldom = (
        solve(SOLVERS[name](), lower, lower.start(), 1e-9, check_every=every) for every in (1, 7)
    )
    assert all(iterations % 7 == 0 for iterations in seldom.iterations.tolist())
    assert set(seldom.status) == {Status.CONVERGED}
    torch.testing.assert_close(often.x, seldom.x, rtol=0, atol=2e-9)


@every_solver
def test_tolerances_are_per_sample(name: str) -> None:
    lower = lower_level(small_foe(), noisy(3))
    tol = torch.tensor([1e-1, 1e-8, 1e-4], dtype=torch.float64)
    solution = solve(SOLVERS[name](), lower, torch.zeros_like(lower.y), tol)
    assert (solution.residual <= tol).all()
    order = solution.iterations.argsort().tolist()
    assert order == [0, 2, 1]


def test_inputs_are_left_alone() -> None:
    lower = lower_level(small_foe(), noisy(2))
    x0, y = torch.zeros_like(lower.y), lower.y.clone()
    for solver in SOLVERS.values():
        solve(solver(), lower, x0, 1e-6)
        assert not x0.any() and torch.equal(lower.y, y)
