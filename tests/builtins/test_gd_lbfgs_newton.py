"""gd, lbfgs and newton-cg: honest residuals, optimality, independence of the batch, and the rates they promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import pytest
import torch
from helpers import initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.line_search import Point, line_search
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Bound, Rows, Status, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import dot, norm, take
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.testing import Gain, Tikhonov

SOLVERS: dict[str, Callable[[], LowerSolver]] = {
    "gd": GradientDescent,
    "lbfgs": LBFGS,
    "lbfgs of memory 1": lambda: LBFGS(memory=1),
    "newton-cg": NewtonCG,
    "newton-cg of 2 products": lambda: NewtonCG(cg_limit=2),
}
every_solver = pytest.mark.parametrize("solver", [make() for make in SOLVERS.values()], ids=list(SOLVERS))


class Blurred(Gain):
    """An operator without known constants: a mean of neighbours, so that h is barely convex and L is to be found."""

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return 0.5 * x + 0.25 * (x.roll(1, -1) + x.roll(-1, -1))

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        return 0.0, None


class Concave(Regularizer):
    """R(x) = −‖x‖², which leaves h no minimiser."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"unused": torch.zeros(1, dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return -dot(x, x)


def foe_problem(count: int = 3, seed: int = 0, **options: object) -> Lower:
    return lower_level(small_foe(nu=0.01), noisy(count, seed=seed), **options)


def mixed_batch() -> Lower:
    """Samples of very different difficulty, which finish at different iterations."""
    scale = torch.tensor([1.0, 1e-2, 10.0, 1.0, 0.0], dtype=torch.float64).view(-1, 1, 1, 1)
    return lower_level(small_foe(nu=0.01), scale * noisy(5))


@every_solver
@pytest.mark.parametrize("condition", [1.0, 50.0])
def test_reaches_the_closed_form_of_a_quadratic(solver: LowerSolver, condition: float) -> None:
    regularizer = Tikhonov(weight=10, condition=condition)
    y = noisy(3)
    theta = initial(regularizer)
    solution = solve(solver, lower_level(regularizer, y), y, 1e-9)
    assert set(solution.status) == {Status.CONVERGED}
    # Strong convexity is at least 1.
    assert bool((norm(solution.x - regularizer.solution(theta, y)) <= 1e-9).all())


@every_solver
@pytest.mark.parametrize("regularizer", [small_foe(nu=0.01), small_tv()], ids=["foe", "tv"])
@pytest.mark.parametrize("operator", [Gain(), Blurred()], ids=["identity", "blur"])
def test_the_residual_is_honest_and_meets_the_tolerance(
    solver: LowerSolver, regularizer: Regularizer, operator: Gain
) -> None:
    ridge = 0.0 if type(operator) is Gain else 0.1
    lower = lower_level(regularizer, noisy(3), operator, strong_convexity=ridge)
    solution = solve(solver, lower, lower.start(), 1e-7, limit=50_000)
    assert set(solution.status) == {Status.CONVERGED}
    assert bool((solution.residual <= 1e-7).all())
    torch.testing.assert_close(norm(lower.gradient(solution.x)), solution.residual, rtol=1e-6, atol=1e-14)


@every_solver
def test_no_perturbation_improves_the_solution(solver: LowerSolver) -> None:
    lower = foe_problem()
    x = solve(solver, lower, lower.start(), 1e-9, limit=20_000).x
    for seed in range(5):
        d = 1e-3 * normal(*x.shape, seed=seed)
        assert bool((lower.energy(x + d) > lower.energy(x)).all())


@every_solver
def test_alone_or_in_a_batch_is_the_same(solver: LowerSolver) -> None:
    lower = mixed_batch()
    together = solve(solver, lower, lower.start(), 1e-6, limit=20_000)
    assert len(set(together.iterations.tolist())) > 2, "the samples were meant to finish at different times"
    for i in range(len(together.x)):
        one = lower.take(torch.tensor([i]))
        alone = solve(solver, one, one.start(), 1e-6, limit=20_000)
        assert alone.iterations.item() == together.iterations[i].item()
        torch.testing.assert_close(alone.x[0], together.x[i], rtol=0, atol=1e-9)


@every_solver
def test_a_state_can_be_compacted(solver: LowerSolver) -> None:
    lower, index = mixed_batch(), torch.tensor([3, 0])
    state = solver.init(lower, lower.start(), {})
    for _ in range(4):
        state = solver.step(lower, state)
    after, before = take(solver.step(lower, state), index), solver.step(lower.take(index), take(state, index))
    for field in fields(state):
        rows = getattr(state, field.name)
        assert isinstance(rows, Tensor) and len(rows) == 5, f"{field.name} has no sample dimension"
        torch.testing.assert_close(getattr(after, field.name), getattr(before, field.name))


@every_solver
def test_leaves_its_arguments_alone_and_repeats_itself(solver: LowerSolver) -> None:
    lower = foe_problem()
    x0 = lower.start()
    state = solver.step(lower, solver.init(lower, x0, {}))
    copies = {field.name: getattr(state, field.name).clone() for field in fields(state)}
    start, y = x0.clone(), lower.y.clone()
    first, second = solver.step(lower, state), solver.step(lower, state)
    assert torch.equal(first.x, second.x)
    assert torch.equal(x0, start) and torch.equal(lower.y, y)
    assert all(torch.equal(getattr(state, name), value) for name, value in copies.items())


@every_solver
def test_float32_stalls_below_its_floor_and_never_claims_more(solver: LowerSolver) -> None:
    lower = lower_level(small_foe(nu=0.05), noisy(2).float())
    solution = solve(solver, lower, lower.start(), 1e-9, limit=3000)
    assert solution.x.dtype == torch.float32
    assert set(solution.status) == {Status.STALLED}
    assert bool((solution.residual < 1e-4).all())


@every_solver
def test_the_energy_never_rises(solver: LowerSolver) -> None:
    lower = foe_problem()
    state = solver.init(lower, lower.start(), {})
    energy = lower.energy(state.x)
    for _ in range(40):
        state = solver.step(lower, state)
        fallen = lower.energy(state.x)
        assert bool((fallen <= energy * (1 + 1e-14)).all())
        energy = fallen


@pytest.mark.parametrize("known", [True, False], ids=["L known", "L unknown"])
@pytest.mark.parametrize("constraint", ["box", "nonnegative"])
def test_gd_keeps_to_a_constraint(known: bool, constraint: str) -> None:
    operator = Gain() if known else Blurred()
    ridge = 0.0 if known else 0.1
    y = 2 * noisy(3) - 0.5
    lower = lower_level(small_foe(), y, operator, constraint=constraint, strong_convexity=ridge)
    solution = solve(GradientDescent(), lower, lower.start(), 1e-8, limit=20_000)
    assert set(solution.status) == {Status.CONVERGED}
    assert bool((solution.x == lower.project(solution.x)).all())
    # x = P_C(x − ∇h), the condition of optimality, with some pixels held and some free.
    moved = lower.project(solution.x - lower.gradient(solution.x))
    torch.testing.assert_close(moved, solution.x, rtol=0, atol=1e-7)
    held = ~lower.free(solution.x, lower.gradient(solution.x))
    assert bool(held.any()) and not bool(held.all())
    reference = solve(AGD(), lower, lower.start(), 1e-8, limit=20_000)
    torch.testing.assert_close(solution.x, reference.x, rtol=0, atol=1e-5)


def test_gd_contracts_by_its_rate() -> None:
    regularizer, y = Tikhonov(weight=20, condition=100), noisy(2)
    lower = lower_level(regularizer, y)
    assert lower.bounded
    exact = regularizer.solution(initial(regularizer), y)
    solver = GradientDescent()
    state = solver.init(lower, y, {})
    for _ in range(30):
        before = norm(state.x - exact)
        state = solver.step(lower, state)
        assert bool((norm(state.x - exact) <= (1 - lower.mu / lower.lipschitz) * before * (1 + 1e-12)).all())


def test_curvature_saves_iterations() -> None:
    lower = foe_problem()
    spent = {
        name: float(solve(solver, lower, lower.start(), 1e-8, limit=20_000).iterations.double().mean())
        for name, solver in {"gd": GradientDescent(), "lbfgs": LBFGS(), "newton": NewtonCG()}.items()
    }
    assert spent["newton"] < spent["lbfgs"] < 0.2 * spent["gd"]


def test_lbfgs_with_a_full_memory_finishes_a_quadratic() -> None:
    """Nearly exact line searches apart, n distinct eigenvalues take about n iterations."""
    regularizer = Tikhonov(weight=5)
    theta = {"log_weight": torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)}
    lower = lower_level(regularizer, noisy(2), theta=theta)
    solution = solve(LBFGS(), lower, lower.start(), 1e-10)
    assert int(solution.iterations.max()) <= 15


def test_lbfgs_takes_no_pair_of_negative_curvature() -> None:
    """One sample of a double well starts where it is concave; its neighbour's history is not touched."""

    class DoubleWell(Concave):
        def energy(self, theta: Theta, x: Tensor) -> Tensor:
            return (x.square() - 1).square().sum((1, 2, 3)) - 0.5 * x.square().sum((1, 2, 3))

    y = torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    x0 = torch.stack([0.01 + 0.01 * normal(1, 3, 3).abs(), 2 + 0.1 * normal(1, 3, 3)])
    lower = lower_level(DoubleWell(), y)
    solution = solve(LBFGS(), lower, x0, 1e-9)
    assert set(solution.status) == {Status.CONVERGED}
    torch.testing.assert_close(solution.x.abs(), torch.ones_like(solution.x), rtol=0, atol=1e-8)
    alone = solve(LBFGS(), lower.take(torch.tensor([1])), x0[1:], 1e-9)
    assert alone.iterations.item() == solution.iterations[1].item()


@pytest.mark.parametrize(("forcing", "order"), [(1.0, 2.0), (0.5, 1.5)])
def test_newton_converges_with_its_order(forcing: float, order: float) -> None:
    lower = lower_level(small_foe(nu=0.05), noisy(2))
    solver = NewtonCG(forcing=forcing)
    state = solver.init(lower, lower.start(), {})
    history = [state.residual]
    while bool((history[-1] > 1e-9).any()):
        state = solver.step(lower, state)
        history.append(state.residual)
        assert len(history) < 20
    # r_{k+1} ≤ C r_k^order once the steps are full: the last two steps, C from the quadratic model of the energy.
    for before, after in (history[-3:-1], history[-2:]):
        above_floor = after > 1e-13
        assert bool((after <= 10 * before.pow(order))[above_floor].all())


def test_newton_says_who_met_negative_curvature() -> None:
    lower = lower_level(Concave(), noisy(1))
    with pytest.raises(NumericalError, match="newton-cg encountered a direction of non-positive curvature"):
        solve(NewtonCG(), lower, lower.start(), 1e-6)


@pytest.mark.parametrize("length", [1e-6, 1e-2, 1.0, 1e2, 1e6])
def test_the_line_search_corrects_a_direction_of_any_length(length: float) -> None:
    lower = foe_problem()
    start = Point.at(lower, lower.start())
    direction = -length * start.gradient
    found, moved = line_search(lower, start, direction)
    assert bool(moved.all())
    slope, slope_start = dot(found.gradient, direction), dot(start.gradient, direction)
    assert bool((found.energy < start.energy).all())
    assert bool((slope >= 0.9 * slope_start).all())
    torch.testing.assert_close(found.energy, lower.energy(found.x))


def test_a_direction_that_rises_is_refused() -> None:
    lower = foe_problem()
    start = Point.at(lower, solve(LBFGS(), lower, lower.start(), 1e-8).x)
    found, moved = line_search(lower, start, normal(*start.x.shape))
    refused = ~moved
    assert torch.equal(found.x[refused], start.x[refused])
    assert bool((found.energy <= start.energy * (1 + 1e-14)).all())
