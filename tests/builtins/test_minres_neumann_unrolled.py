"""neumann, unrolled, one-step and minres: against closed forms and finite differences, with the errors they
promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from helpers import (
    directions,
    estimate_at,
    flat,
    initial,
    lower_level,
    noisy,
    normal,
    relative_error,
    slope_theta,
    small_foe,
)
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.minres import MINRES, MinimalResiduals
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Estimate, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.bilevel.tensors import norm
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Constraint
from bltoolbox.testing import (
    Gain,
    SquaredDistance,
    Tikhonov,
    full_batch,
    make_oracle,
    smooth_images,
    variational,
)

#: With limits that leave the tolerance in charge.
EXACT: dict[str, Callable[[], HypergradientEstimator]] = {
    "minres": lambda: MINRES(5000),
    "neumann": lambda: Neumann(5000),
    "unrolled": lambda: Unrolled(800),
}
every_exact = pytest.mark.parametrize("estimator", [make() for make in EXACT.values()], ids=list(EXACT))
every_one = pytest.mark.parametrize(
    "estimator", [*(make() for make in EXACT.values()), OneStep()], ids=[*EXACT, "one-step"]
)
#: One curvature a channel, 2, 1.4 and 1.1, the first of which is L.
THETA = {"log_weight": torch.tensor([1.0, 0.4, 0.1], dtype=torch.float64).log()}
WEIGHTS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


class Nameless(Tikhonov):
    """A regularizer that knows no Lipschitz constant."""

    def lipschitz(self, theta: Theta, shape: object) -> None:  # type: ignore[override]
        return None


def quadratic(count: int = 3) -> tuple[ImageLower, SquaredDistance, Tensor]:
    """A Tikhonov problem at its minimiser."""
    y = noisy(count)
    lower = lower_level(Tikhonov(), y, theta=THETA)
    return lower, SquaredDistance(smooth_images(count, y.shape[1:]).double()), Tikhonov().solution(THETA, y)


def foe_at_minimiser(constraint: str = "none", count: int = 3) -> tuple[ImageLower, SquaredDistance, Tensor]:
    y = noisy(count)
    lower = lower_level(small_foe(), y, constraint=constraint)
    x = solve(AGD(), lower, lower.start(), 1e-12, limit=5000).x
    return lower, SquaredDistance(smooth_images(count, y.shape[1:]).double()), x


def estimate(
    estimator: HypergradientEstimator,
    case: tuple[ImageLower, SquaredDistance, Tensor],
    tol: float = 1e-11,
    weights: Tensor = WEIGHTS,
    warm: Tensor | None = None,
) -> Estimate:
    lower, upper, x = case
    return estimate_at(estimator, lower, upper, x, tol, weights[: len(x)], warm)


def part(
    case: tuple[ImageLower, SquaredDistance, Tensor], index: Tensor
) -> tuple[ImageLower, SquaredDistance, Tensor]:
    lower, upper, x = case
    return lower.take(index), upper.take(index), x[index]


def closed_form(case: tuple[ImageLower, SquaredDistance, Tensor]) -> Tensor:
    """Σ_i v_i ∇f_i of the quadratic problem."""
    lower, upper, _ = case
    gradient = Tikhonov().value_gradient(THETA, lower.y, upper.truth, WEIGHTS)["log_weight"]
    return gradient * len(lower.y)


@every_exact
def test_equals_the_closed_form(estimator: HypergradientEstimator) -> None:
    case = quadratic()
    found = estimate(estimator, case)
    assert bool((found.residual <= 1e-11).all())
    torch.testing.assert_close(
        found.gradient["regularizer.log_weight"], closed_form(case), rtol=1e-10, atol=1e-11
    )


@every_exact
@pytest.mark.parametrize("constraint", ["none", "box"])
def test_equals_finite_differences_of_f(estimator: HypergradientEstimator, constraint: Constraint) -> None:
    # Contrast enough that noise carries pixels out of the box.
    images = (1.2 * smooth_images(3, (3, 9, 8)) - 0.1).clamp(0, 1)
    oracle = make_oracle(images, small_foe(), AGD(), estimator, constraint=constraint, iteration_limit=20_000)
    theta = join(regularizer=initial(small_foe()))
    batch = full_batch(oracle)
    z = oracle.on(batch).hypergradient(theta, Accuracy(1e-11), Accuracy(1e-11)).gradient

    def value(moved: Theta) -> Tensor:
        return torch.tensor(oracle.on(batch).value(moved, Accuracy(1e-11)).value, dtype=torch.float64)

    for d in directions(theta, 3):
        d = oracle.problem.project_gradient(d)
        expected = slope_theta(value, theta, d, 1e-4)
        assert float(flat(z) @ flat(d)) == pytest.approx(float(expected), rel=1e-5, abs=1e-7)


@every_exact
@pytest.mark.parametrize("constraint", ["none", "nonnegative", "box"])
def test_agrees_with_conjugate_gradients(estimator: HypergradientEstimator, constraint: str) -> None:
    case = foe_at_minimiser(constraint)
    expected = estimate(CGIFT(5000), case)
    assert relative_error(estimate(estimator, case).gradient, expected.gradient) < 1e-8


def test_neumann_with_a_constraint_and_a_small_lipschitz_constant() -> None:
    """On held pixels the system is the identity, whatever L; here L = 0.04."""
    y, theta = 0.3 * noisy(2) - 0.05, {"log_weight": torch.full((3,), -5.0, dtype=torch.float64)}
    lower = lower_level(Tikhonov(), y, Gain(log_gain=-1.7), theta, constraint="nonnegative")
    assert lower.bounded and bool((lower.lipschitz < 0.05).all())
    x = solve(AGD(), lower, lower.start(), 1e-12).x
    case = (lower, SquaredDistance(smooth_images(2, y.shape[1:]).double()), x)
    assert bool((x == 0).any())
    found = estimate(Neumann(5000), case)
    assert bool((found.residual <= 1e-11).all())
    assert relative_error(found.gradient, estimate(CGIFT(), case).gradient) < 1e-9


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("kind", [Neumann, Unrolled])
def test_truncation_leaves_out_what_the_formula_says(
    kind: Callable[[int], HypergradientEstimator], count: int
) -> None:
    """On a quadratic z_c is short by exactly (1 − H_c/L)^K."""
    case = quadratic()
    found = estimate(kind(count), case, tol=0.0)
    curvature = 1 + THETA["log_weight"].exp()
    left = (1 - curvature / curvature.max()) ** count
    torch.testing.assert_close(
        found.gradient["regularizer.log_weight"], (1 - left) * closed_form(case), rtol=1e-9, atol=1e-12
    )
    expected = norm(case[1].gradient(case[2]) * left.view(-1, 1, 1))
    torch.testing.assert_close(found.residual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Neumann, Unrolled])
def test_the_error_shrinks_by_the_rate(kind: Callable[[int], HypergradientEstimator]) -> None:
    case = foe_at_minimiser()
    lower, upper, x = case
    assert lower.bounded
    exact = estimate(MINRES(5000), case, tol=1e-12).gradient
    errors = []
    for count in (5, 10, 20, 40):
        found = estimate(kind(count), case, tol=0.0)
        rate = (1 - lower.mu / lower.lipschitz) ** count
        assert bool((found.residual <= rate * norm(upper.gradient(x)) * (1 + 1e-9)).all())
        errors.append(relative_error(found.gradient, exact))
    assert all(after < before for before, after in pairwise(errors))
    assert errors[-1] < 0.05 * errors[0]


def test_one_step_is_one_term_and_one_unrolled_step() -> None:
    case = foe_at_minimiser()
    found = estimate(OneStep(), case)
    assert relative_error(found.gradient, estimate(Neumann(1), case, tol=0.0).gradient) < 1e-9
    assert relative_error(found.gradient, estimate(Unrolled(1), case, tol=0.0).gradient) < 1e-12
    assert found.adjoint is None and not OneStep.gives_adjoint


def test_the_bias_of_one_step_is_within_its_bound() -> None:
    case = foe_at_minimiser(count=1)
    lower, upper, x = case
    assert lower.bounded
    exact, biased = estimate(MINRES(5000), case, tol=1e-12), estimate(OneStep(), case)
    rows = [
        flat({name: p[0] for name, p in lower.mixed_each(x, unit.view_as(x)).items()})
        for unit in torch.eye(x.numel(), dtype=torch.float64)
    ]
    mixed = torch.linalg.matrix_norm(torch.stack(rows), 2) * WEIGHTS[0]
    bias = (flat(biased.gradient) - flat(exact.gradient)).norm()
    bound = (1 - lower.mu / lower.lipschitz) * mixed * norm(upper.gradient(x)) / lower.mu
    assert 0 < float(bias) <= float(bound)
    # It is no descent direction by accident: it keeps an angle with the truth.
    assert float(flat(biased.gradient) @ flat(exact.gradient)) > 0


@pytest.mark.parametrize("constraint", ["none", "box"])
def test_unrolled_is_the_derivative_of_the_algorithm(constraint: Constraint) -> None:
    """Far from the minimiser too: ∂_θ g(x_K(θ)) from a fixed start, by finite differences of the algorithm itself."""
    steps, y = 6, 1.3 * noisy(2) - 0.15
    theta = join(regularizer=initial(small_foe()))
    problem = variational(Gain(), small_foe(), constraint)
    lower, upper = (
        problem.at(theta, y.shape[1:]).on(y),
        SquaredDistance(smooth_images(2, y.shape[1:]).double()),
    )
    start, lipschitz = lower.project(y + 0.3 * normal(*y.shape, seed=4)), lower.lipschitz
    assert lower.bounded

    def loss(moved: Theta) -> Tensor:
        there, x = problem.at(moved, y.shape[1:]).on(y), start
        for _ in range(steps):
            x = there.project(x - there.gradient(x) / lipschitz.view(-1, 1, 1, 1))
        return WEIGHTS[:2] @ upper.value(x)

    z = estimate(Unrolled(steps), (lower, upper, start), tol=0.0).gradient
    for d in directions(theta, 3):
        expected = slope_theta(loss, theta, d, 1e-5)
        assert float(flat(z) @ flat(d)) == pytest.approx(float(expected), rel=1e-5)


@every_one
def test_alone_or_in_a_batch_is_the_same(estimator: HypergradientEstimator) -> None:
    scale = torch.tensor([1.0, 1e-3, 5.0], dtype=torch.float64).view(-1, 1, 1, 1)
    lower = lower_level(small_foe(), scale * noisy(3))
    x = solve(NewtonCG(), lower, lower.start(), 1e-12).x
    # Targets at very different distances, so that the samples finish at different iterations.
    case = (lower, SquaredDistance(x + scale * normal(*x.shape)), x)
    together = estimate(estimator, case, tol=1e-6)
    total = {name: torch.zeros_like(value) for name, value in together.gradient.items()}
    for i in range(3):
        alone = estimate(estimator, part(case, torch.tensor([i])), 1e-6, WEIGHTS[i : i + 1])
        assert alone.iterations.item() == together.iterations[i].item()
        torch.testing.assert_close(alone.residual[0], together.residual[i], rtol=1e-4, atol=1e-12)
        total = {name: value + alone.gradient[name] for name, value in total.items()}
    assert relative_error(together.gradient, total) < 1e-9


@every_one
def test_weights_enter_linearly_and_arguments_stay(estimator: HypergradientEstimator) -> None:
    case = foe_at_minimiser()
    x, y = case[2].clone(), case[0].y.clone()
    warm = 0.1 * normal(*x.shape)
    kept = warm.clone()
    one, two = (estimate(estimator, case, 1e-6, factor * WEIGHTS, warm) for factor in (1, 3))
    assert torch.equal(one.residual, two.residual)
    assert relative_error({name: 3 * value for name, value in one.gradient.items()}, two.gradient) < 1e-12
    assert torch.equal(case[2], x) and torch.equal(case[0].y, y) and torch.equal(warm, kept)


@pytest.mark.parametrize("estimator", [MINRES(5000), Neumann(5000)], ids=["minres", "neumann"])
def test_a_warm_start_pays_and_the_residual_is_recomputed(estimator: HypergradientEstimator) -> None:
    case = foe_at_minimiser()
    lower, upper, x = case
    cold = estimate(estimator, case, 1e-6)
    assert cold.adjoint is not None
    true = norm(upper.gradient(x) - lower.linearize(x).hvp(cold.adjoint))
    torch.testing.assert_close(cold.residual, true, rtol=1e-6, atol=1e-14)
    warm = estimate(estimator, case, 1e-8, warm=cold.adjoint)
    again = estimate(estimator, case, 1e-8)
    assert bool((warm.iterations < again.iterations).all())
    done = estimate(estimator, case, 1e-5, warm=cold.adjoint)
    assert bool((done.iterations == 0).all())


def test_a_truncated_series_ends_with_an_honest_residual() -> None:
    found = estimate(Neumann(3), foe_at_minimiser(), 1e-10)
    assert bool((found.iterations == 3).all()) and bool((found.residual > 1e-10).all())


@pytest.mark.parametrize("estimator", [MINRES(3), CGIFT(3)], ids=["minres", "cg-ift"])
def test_a_linear_solver_that_reaches_its_limit_says_so(estimator: HypergradientEstimator) -> None:
    with pytest.raises(NumericalError, match="3 samples reached the limit of 3 iterations"):
        estimate(estimator, foe_at_minimiser(), 1e-10)


def test_minres_needs_no_more_iterations_than_conjugate_gradients() -> None:
    case = foe_at_minimiser()
    assert bool((estimate(MINRES(), case, 1e-7).iterations <= estimate(CGIFT(), case, 1e-7).iterations).all())


@pytest.mark.parametrize("name", ["neumann", "unrolled", "one-step"])
def test_without_a_lipschitz_constant_they_say_what_to_use(name: str) -> None:
    estimator = {"neumann": Neumann(), "unrolled": Unrolled(), "one-step": OneStep()}[name]
    y = noisy(1)
    lower = lower_level(Nameless(), y)
    with pytest.raises(NumericalError, match=rf"^{name} takes steps of length 1/L.* is unknown; use cg-ift"):
        estimate(estimator, (lower, SquaredDistance(y), y))


@dataclass(frozen=True)
class Dense:
    """v ↦ H_i v for given matrices."""

    matrices: Tensor

    def hvp(self, v: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", self.matrices, v)

    def take(self, index: Tensor) -> Dense:
        return Dense(self.matrices[index])


def system_with(eigenvalues: Tensor) -> Dense:
    size = eigenvalues.shape[1]
    basis = torch.linalg.qr(normal(len(eigenvalues), size, size)).Q
    return Dense(basis @ torch.diag_embed(eigenvalues) @ basis.mT)


def test_minres_solves_indefinite_systems_and_cg_refuses_them() -> None:
    eigenvalues = torch.stack(
        [
            torch.linspace(-3, 3, 30, dtype=torch.float64),  # as many negative as positive
            torch.linspace(1, 2, 30, dtype=torch.float64),  # definite, done long before
            torch.linspace(-50, -1, 30, dtype=torch.float64),  # negative definite
        ]
    )
    system, rhs = system_with(eigenvalues), normal(3, 30, seed=1)
    tol = torch.tensor([1e-9, 1e-10, 1e-9], dtype=torch.float64)
    q, residual, iterations = solve_linear(MinimalResiduals(), system, rhs, torch.zeros_like(rhs), tol, 500)
    torch.testing.assert_close(q, torch.linalg.solve(system.matrices, rhs), rtol=0, atol=1e-7)
    torch.testing.assert_close(residual, norm(rhs - system.hvp(q)), rtol=1e-6, atol=1e-15)
    assert bool((residual <= tol).all()) and bool((iterations[1] < iterations[0]).all())
    with pytest.raises(NumericalError, match=r"^somebody encountered a direction of non-positive curvature"):
        solve_linear(ConjugateGradients("somebody"), system, rhs, torch.zeros_like(rhs), tol, 500)


def test_the_residual_of_minres_falls_monotonically() -> None:
    system, rhs = system_with(torch.linspace(-3, 4, 25, dtype=torch.float64).repeat(2, 1)), normal(2, 25)
    method = MinimalResiduals()
    state = method.init(system, rhs, torch.zeros_like(rhs), torch.zeros(2, dtype=torch.float64))
    for _ in range(20):
        before, state = state.residual, method.step(system, state)
        assert bool((state.residual <= before).all())
        torch.testing.assert_close(state.residual, norm(rhs - system.hvp(state.q)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", [MinimalResiduals(), ConjugateGradients()], ids=["minres", "cg"])
def test_as_many_iterations_as_distinct_eigenvalues(method: MinimalResiduals | ConjugateGradients) -> None:
    values = torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64).repeat_interleave(8).repeat(2, 1)
    system, rhs = system_with(values), normal(2, 24)
    tol = torch.full((2,), 1e-10, dtype=torch.float64)
    _, residual, iterations = solve_linear(method, system, rhs, torch.zeros_like(rhs), tol, 100)
    assert bool((residual <= tol).all()) and bool((iterations == 3).all())


@pytest.mark.parametrize("method", [MinimalResiduals(), ConjugateGradients()], ids=["minres", "cg"])
def test_a_zero_right_hand_side_costs_nothing(method: MinimalResiduals | ConjugateGradients) -> None:
    system, rhs = system_with(torch.ones(2, 4, dtype=torch.float64)), torch.zeros(2, 4, dtype=torch.float64)
    rhs[1, 0] = 1
    q, _, iterations = solve_linear(
        method, system, rhs, torch.zeros_like(rhs), torch.zeros(2, dtype=torch.float64), 10
    )
    assert iterations[0] == 0 and torch.equal(q[0], rhs[0])
    torch.testing.assert_close(q[1], rhs[1])
