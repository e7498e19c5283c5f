"""h + w g as a lower level: its derivatives, its bounds, and every solver on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import SHAPE, lower_level, noisy, normal, relative_error, slope, small_foe
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Bound, Status, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import norm
from bltoolbox.errors import NumericalError
from bltoolbox.testing import Tikhonov, smooth_images
from bltoolbox.testing.problems import SquaredDistance

WEIGHTS = torch.tensor([0.7, 0.0, -0.2], dtype=torch.float64)


@dataclass(frozen=True)
class Wavy(Upper):
    """g(x) = Σ cos(x − x*), not convex, with a derivative in θ that is ‖x‖² in every entry."""

    truth: Tensor
    theta: Theta
    convex: bool = False
    lipschitz: Bound = 1.0

    def value(self, x: Tensor) -> Tensor:
        return (x - self.truth).double().cos().flatten(1).sum(1)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        price = float((weights * norm(x).square()).sum())
        return {name: torch.full_like(value, price) for name, value in self.theta.items()}

    def take(self, index: Tensor) -> Wavy:
        return Wavy(self.truth[index], self.theta, self.convex, self.lipschitz)


def problem(wavy: bool = False, **options: object) -> tuple[Lower, Upper]:
    lower, truth = lower_level(small_foe(), noisy(3), **options), smooth_images(3, SHAPE).double()  # type: ignore[arg-type]
    return lower, Wavy(truth, lower.theta) if wavy else SquaredDistance(truth)


@pytest.mark.parametrize("wavy", [False, True])
def test_its_derivatives_are_those_of_its_energy(wavy: bool) -> None:
    lower, upper = problem(wavy)
    tilted = lower.tilted(upper, WEIGHTS)
    x, d, v = noisy(3, seed=1), normal(3, *SHAPE, seed=2), normal(3, *SHAPE, seed=3)
    torch.testing.assert_close(tilted.energy(x), lower.energy(x) + WEIGHTS * upper.value(x))
    along = slope(tilted.energy, x, d)
    torch.testing.assert_close((tilted.gradient(x) * d).flatten(1).sum(1), along, rtol=1e-7, atol=1e-7)
    product = slope(lambda point: (tilted.gradient(point) * v).flatten(1).sum(1), x, d, h=1e-4)
    hvp = (tilted.linearize(x).hvp(d) * v).flatten(1).sum(1)
    torch.testing.assert_close(hvp, product, rtol=1e-6, atol=1e-6)
    assert torch.equal(tilted.residual(x), norm(tilted.gradient(x)))


@pytest.mark.parametrize("wavy", [False, True])
def test_its_derivative_in_theta_is_that_of_h_and_g(wavy: bool) -> None:
    lower, upper = problem(wavy)
    x, weights = noisy(3, seed=1), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    found = lower.tilted(upper, WEIGHTS).theta_gradient(x, weights)
    expected = lower.theta_gradient(x, weights)
    for name, part in upper.theta_gradient(x, weights * WEIGHTS).items():
        expected[name] = expected[name] + part
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_mixed_derivatives_are_those_of_h_unless_g_depends_on_theta() -> None:
    x, q, weights = noisy(3, seed=1), noisy(3, seed=2), torch.ones(3, dtype=torch.float64)
    lower, upper = problem()
    assert relative_error(lower.tilted(upper, 0.3).mixed(x, q, weights), lower.mixed(x, q, weights)) < 1e-14
    lower, upper = problem(wavy=True)
    with pytest.raises(NotImplementedError, match="the loss depends on θ"):
        lower.tilted(upper, 0.3).mixed(x, q, weights)


def test_bounds_come_from_those_of_h_and_g() -> None:
    lower, upper = problem()
    tilted = lower.tilted(upper, WEIGHTS)  # 0 ≤ ∇²g ≤ 2
    torch.testing.assert_close(tilted.mu, lower.mu - torch.tensor([0.0, 0.0, 0.4], dtype=torch.float64))
    torch.testing.assert_close(tilted.lipschitz, lower.lipschitz + 2 * WEIGHTS.abs())
    lower, upper = problem(wavy=True)  # −1 ≤ ∇²g ≤ 1
    tilted = lower.tilted(upper, WEIGHTS)
    torch.testing.assert_close(tilted.mu, lower.mu - WEIGHTS.abs())
    assert tilted.bounded
    unknown = lower.tilted(Wavy(upper.truth, lower.theta, lipschitz=None), WEIGHTS)  # type: ignore[attr-defined]
    assert unknown.mu.tolist() == [-math.inf, float(lower.mu[1]), -math.inf]
    assert unknown.lipschitz.tolist() == [math.inf, float(lower.lipschitz[1]), math.inf]
    assert not unknown.bounded


@pytest.mark.parametrize("weight", [0.4, -0.3])
@pytest.mark.parametrize("solver", [AGD(), GradientDescent(), LBFGS(), NewtonCG(), MemoryGradient()])
def test_every_solver_minimises_it(solver: LowerSolver, weight: float) -> None:
    """A quadratic with a closed form: (c + 2w) x = y + 2w x*, c = 1 + e^θ d."""
    prior, y = Tikhonov(condition=10), noisy(3)
    lower, truth = lower_level(prior, y), smooth_images(3, SHAPE).double()
    tilted = lower.tilted(SquaredDistance(truth), weight)
    solution = solve(solver, tilted, tilted.start(), 1e-10)
    assert solution.status == (Status.CONVERGED,) * 3
    curvature = y / prior.solution({"log_weight": torch.zeros(3, dtype=torch.float64)}, y)
    expected = (y + 2 * weight * truth) / (curvature + 2 * weight)
    assert bool((norm(solution.x - expected) <= 1.01e-10 / tilted.mu).all())


def test_mm_refuses_a_loss_without_a_known_lipschitz_constant() -> None:
    lower, upper = problem(wavy=True)
    tilted = lower.tilted(Wavy(upper.truth, lower.theta, lipschitz=None), 0.1)  # type: ignore[attr-defined]
    with pytest.raises(NumericalError, match=r"a loss with a known Lipschitz constant.*use agd"):
        solve(MemoryGradient(), tilted, tilted.start(), 1e-3)


def test_mm_decreases_a_tilt_that_is_not_convex() -> None:
    lower, upper = problem(wavy=True)
    tilted, solver = (
        lower.tilted(upper, torch.tensor([0.5, -0.5, 0.9], dtype=torch.float64)),
        MemoryGradient(),
    )
    state = solver.init(tilted, tilted.start(), {})
    energy = tilted.energy(state.x)
    for _ in range(15):
        state = solver.step(tilted, state)
        after = tilted.energy(state.x)
        assert bool((after <= energy + 1e-12 * energy.abs()).all())
        energy = after


def test_a_constraint_holds_the_entries_that_the_tilted_gradient_presses_against_it() -> None:
    lower = lower_level(small_foe(), noisy(3) - 0.5, constraint="nonnegative")
    upper = SquaredDistance(smooth_images(3, SHAPE).double() - 0.5)
    tilted = lower.tilted(upper, 0.6)
    solution = solve(AGD(), tilted, tilted.start(), 1e-9)
    x, gradient = solution.x, tilted.gradient(solution.x)
    assert bool((x >= 0).all()) and solution.status == (Status.CONVERGED,) * 3
    assert float(norm(torch.where(x > 0, gradient, gradient.clamp_max(0))).max()) <= 1e-8
    free = tilted.linearize(x).free
    assert free is not None and torch.equal(free, (x > 0) | (gradient < 0))
    assert 0 < int(free.sum()) < free.numel()
    q, weights = normal(3, *SHAPE, seed=4), torch.ones(3, dtype=torch.float64)
    for name, value in lower.mixed(x, q * free, weights).items():
        torch.testing.assert_close(tilted.mixed(x, q, weights)[name], value)
        torch.testing.assert_close(tilted.mixed_each(x, q)[name].sum(0), value)


def test_a_part_of_it_is_that_of_its_samples() -> None:
    lower, upper = problem()
    tilted, index = lower.tilted(upper, WEIGHTS), torch.tensor([2, 0])
    x, v = noisy(3, seed=1), noisy(3, seed=2)
    part = tilted.take(index)
    torch.testing.assert_close(part.gradient(x[index]), tilted.gradient(x)[index])
    torch.testing.assert_close(
        tilted.linearize(x).take(index).hvp(v[index]), tilted.linearize(x).hvp(v)[index]
    )
    assert part.ids.tolist() == [2, 0] and part.counter is lower.counter
