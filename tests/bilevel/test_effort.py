"""Effort in numbers of iterations: what is done, what is kept between calls, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers import SHAPE, initial, kept, lower_level, noisy, oracle_for, small_foe
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.minres import MINRES
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.mm import MemoryGradient
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Accuracy, Ask, Batch, Estimate, Rows, Status, Steps, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.errors import BltError, NumericalError
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images
from bltoolbox.training.checkpoint import Checkpoints

THETA = {"regularizer.log_weight": torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)}


def tikhonov_oracle(
    solver: LowerSolver, estimator: HypergradientEstimator | None = None, count: int = 3, **options: object
) -> BilevelOracle:
    return make_oracle(
        smooth_images(count, (3, 6, 7)),
        Tikhonov(condition=10),
        solver,
        estimator or CGIFT(),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("solver", [AGD, GradientDescent, LBFGS, MemoryGradient])
def test_steps_are_a_status_and_the_residuals_reached_are_reported(solver: Callable[[], LowerSolver]) -> None:
    """Neither the iteration limit nor the tolerances of ``strict`` and ``at_floor`` apply to a number of steps."""
    oracle = tikhonov_oracle(solver(), iteration_limit=1, strict=True)
    result = oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(4), Steps(3))
    assert result.value.short == {"steps": 3} and result.value.iterations == 4 and result.iterations == 3
    assert not result.at_floor
    assert oracle.cost.lower_iterations == 12 and oracle.cost.linear_iterations == 9
    lower, upper = oracle.tasks.at(THETA, oracle.counter).on(range(3))
    x, q = kept(oracle.solutions, range(3)), kept(oracle.store("memory.adjoint"), range(3))
    residual = float(lower.residual(x).max())
    adjoint = float((upper.gradient(x) - lower.linearize(x).hvp(q)).flatten(1).norm(dim=1).max())
    assert result.value.residual == pytest.approx(residual, rel=1e-6)
    assert result.certificate["lower_residual"] == pytest.approx(residual, rel=1e-6)
    assert result.certificate["adjoint_residual"] == pytest.approx(adjoint, rel=1e-6)


@pytest.mark.parametrize("solver", [AGD, GradientDescent, LBFGS, MemoryGradient])
def test_an_accuracy_is_answered_by_its_parts_bit_for_bit(solver: Callable[[], LowerSolver]) -> None:
    """Solve, linear system and mixed derivative as a method with accuracies would write them; twice, the second time
    from warm starts at another θ."""
    oracle = tikhonov_oracle(solver())
    moved = {name: value + 0.1 for name, value in THETA.items()}
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    x, q = None, None
    for theta in (THETA, moved):
        result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-3), Accuracy(1e-2))
        lower, upper = oracle.tasks.at(theta, oracle.counter).on(range(3))
        start = lower.start() if x is None else x
        x = solve(solver(), lower, start, lower.gradient_tol(1e-3), limit=2000).x
        right = upper.gradient(x)
        tol = torch.full_like(lower.mu, 1e-2)
        before = torch.zeros_like(right) if q is None else q
        q, _, _ = solve_linear(ConjugateGradients(), lower.linearize(x), right, before, tol, 500)
        for name, part in lower.mixed(x, q, weights).items():
            assert torch.equal(result.gradient[name], -part)
        assert result.value.value == float(weights @ upper.value(x))


def test_steps_continue_where_the_last_call_ended() -> None:
    """Three calls of two steps of gradient descent are six steps: nothing but x is its state."""
    pieces, whole = tikhonov_oracle(GradientDescent()), tikhonov_oracle(GradientDescent())
    for _ in range(3):
        pieces.on(full_batch(pieces)).hypergradient(THETA, Steps(2), Steps(1))
    whole.on(full_batch(whole)).hypergradient(THETA, Steps(6), Steps(1))
    a, b = (kept(one.solutions, range(3)) for one in (pieces, whole))
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_only_nan_is_fatal_for_steps() -> None:
    class Unmeasured(GradientDescent):
        def step(self, lower: Lower, state: object) -> object:  # type: ignore[override]
            return replace(super().step(lower, state), residual=torch.full_like(lower.mu, self.claim))  # type: ignore[arg-type]

        claim = math.inf

    lower = lower_level(small_foe(), noisy(2))
    solution = solve(Unmeasured(), lower, lower.start(), 0.0, limit=3, ending=Status.STEPS)
    assert solution.status == (Status.STEPS,) * 2 and bool(torch.isinf(solution.residual).all())
    # To a tolerance, an iterate whose residual is never measured is no result.
    assert solve(Unmeasured(), lower, lower.start(), 1e-3, limit=3).status == (Status.NOT_FINITE,) * 2
    broken = Unmeasured()
    broken.claim = math.nan
    oracle = tikhonov_oracle(broken)
    with pytest.raises(NumericalError, match=r"samples 0, 1, 2: a NaN or Inf"):
        oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(2), Steps(1))


@pytest.mark.parametrize("estimator", [CGIFT, MINRES, Neumann])
def test_together_everything_moves_from_its_previous_value(
    estimator: Callable[[], HypergradientEstimator],
) -> None:
    """z from (x_k, q_k); q_{k+1} by linear iterations at x_k; x_{k+1} by lower iterations from x_k."""
    oracle = tikhonov_oracle(GradientDescent(), estimator())
    batch = full_batch(oracle)
    lower, upper = oracle.tasks.at(THETA, oracle.counter).on(range(3))
    x, q = lower.start(), torch.zeros_like(lower.start())
    weights = torch.full_like(lower.mu, 1 / 3)
    for k in range(3):
        result = oracle.on(batch).hypergradient(THETA, Steps(2), Steps(2), together=True)
        assert result.first is (k == 0) and result.bound is None
        z = lower.mixed(x, q, weights)
        for name, part in result.gradient.items():
            torch.testing.assert_close(part, -z[name], rtol=1e-12, atol=1e-14)
        ask = Ask(lower, upper, x, x, weights, Steps(2), {"adjoint": q})
        q = estimator().estimate(ask).memory["adjoint"]
        for _ in range(2):
            x = x - lower.gradient(x) / lower.lipschitz.view(-1, 1, 1, 1)
        torch.testing.assert_close(kept(oracle.solutions, range(3)), x, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(kept(oracle.store("memory.adjoint"), range(3)), q, rtol=1e-12, atol=1e-13)
        # The loss and its residual are those of the new x.
        assert result.value.value == pytest.approx(float(upper.value(x).mean()), rel=1e-12)


def test_only_the_first_visit_of_a_task_is_called_first() -> None:
    oracle = tikhonov_oracle(GradientDescent())

    def visit(*ids: int) -> bool:
        batch = Batch(ids, [1.0] * len(ids))
        return oracle.on(batch).hypergradient(THETA, Steps(1), Steps(1), together=True).first

    assert visit(0) and not visit(0) and visit(2) and not visit(0, 1) and not visit(1)
    assert not oracle.on(Batch([1], [1.0])).hypergradient(THETA, Steps(1), Steps(1)).first


@dataclass(frozen=True)
class CarriedState:
    """A state with one field that outlives a solve."""

    x: Tensor
    residual: Tensor
    total: Tensor
    scratch: Tensor | None = None


class Carrying(LowerSolver):
    """Gradient descent that adds up its iterations in a field that persists."""

    exact_residual = True

    def persists(self, lower: Lower) -> Rows:
        return {"total": lower.mu.new_empty(0, 2)}

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> CarriedState:
        total = kept.get("total", lower.mu.new_zeros(len(x0), 2))
        return CarriedState(x0, lower.residual(x0), total)

    def step(self, lower: Lower, state: CarriedState) -> CarriedState:
        x = state.x - lower.gradient(state.x) / lower.lipschitz.view(-1, 1, 1, 1)
        return CarriedState(x, lower.residual(x), state.total + 1)


def totals(oracle: BilevelOracle, ids: range = range(3)) -> list[float]:
    return kept(oracle.store("solver.total"), ids)[:, 0].tolist()


class TestPersists:
    def test_what_a_solver_persists_is_given_back_per_task(self) -> None:
        oracle = tikhonov_oracle(Carrying(), chunk=2)
        oracle.on(Batch([2], [1.0])).hypergradient(THETA, Steps(3), Steps(1))
        oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(2), Steps(1))
        assert totals(oracle) == [2.0, 2.0, 5.0]

    def test_it_is_put_together_after_samples_left_one_by_one(self) -> None:
        """Gradient descent in two pieces takes as many iterations as in one, and the warm sample leaves first."""
        oracle, whole = tikhonov_oracle(Carrying()), tikhonov_oracle(Carrying())
        oracle.on(Batch([2], [1.0])).hypergradient(THETA, Steps(7), Steps(1))
        for one in (oracle, whole):
            one.on(full_batch(one)).hypergradient(THETA, Accuracy(1e-6), Accuracy(1e-3))
        assert min(totals(whole)) > 7
        assert totals(oracle) == totals(whole)

    def test_trial_values_carry_it_only_when_they_are_accepted(self) -> None:
        oracle = tikhonov_oracle(Carrying())
        asked = oracle.on(full_batch(oracle))
        asked.hypergradient(THETA, Steps(2), Steps(1))
        value = asked.value(THETA, Steps(4))
        assert totals(oracle) == [2.0] * 3
        asked.accept(value)
        assert totals(oracle) == [6.0] * 3

    def test_a_failed_call_leaves_it_as_it_was(self) -> None:
        oracle = tikhonov_oracle(Carrying(), CGIFT(1), chunk=1)
        oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(2), Steps(1))
        with pytest.raises(NumericalError, match="reached the limit"):
            oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(2), Accuracy(1e-12))
        assert totals(oracle) == [2.0] * 3

    def test_it_is_in_checkpoints_and_in_the_journal_of_a_step(self, tmp_path: Path) -> None:
        before, after = tikhonov_oracle(Carrying()), tikhonov_oracle(Carrying())
        asked = before.on(full_batch(before))
        asked.hypergradient(THETA, Steps(2), Steps(1))
        value = asked.value(THETA, Steps(4))
        (tmp_path / "checkpoints").mkdir()
        run = {"run": {}, "lengths": {}}
        Checkpoints(tmp_path / "checkpoints", before.stores).save(run)
        Checkpoints(tmp_path / "checkpoints", after.stores).load()
        assert totals(after) == [2.0] * 3
        entries, trials = before.journal.pack(), before.journal.trials()
        after.journal.restore(entries, [trials], torch.device("cpu"))
        asked = after.on(full_batch(after))
        asked.hypergradient(THETA, Steps(2), Steps(1))
        again = asked.value(THETA, Steps(4))
        assert again == value
        asked.accept(again)
        assert totals(after) == [6.0] * 3

    def test_trials_of_earlier_journals_have_solutions_alone(self) -> None:
        oracle = tikhonov_oracle(GradientDescent())
        oracle.on(full_batch(oracle)).value(THETA, Steps(1))
        entries, trials = oracle.journal.pack(), oracle.journal.trials()
        bare = {number: [(ids, rows["solutions"]) for ids, rows in one] for number, one in trials.items()}
        oracle.journal.restore(entries, [bare], torch.device("cpu"), lambda sample: sample != 1)  # type: ignore[arg-type]
        asked = oracle.on(full_batch(oracle))
        asked.accept(replace(asked.value(THETA, Steps(1))))
        assert oracle.solutions.present.tolist() == [True, False, True]

    def test_a_field_of_another_shape_is_an_error(self) -> None:
        class Wrong(Carrying):
            def persists(self, lower: Lower) -> Rows:
                return {"total": lower.mu.new_empty(0, 5)}

            def init(self, lower: Lower, x0: Tensor, kept: Rows) -> CarriedState:
                return super().init(lower, x0, {})

        oracle = tikhonov_oracle(Wrong())
        with pytest.raises(BltError, match=r"'total' of shape \[3, 2\], but keeps \[3, 5\] of 3 tasks"):
            oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(1), Steps(1))


def test_a_state_of_changing_shape_cannot_be_put_together() -> None:
    class Growing(Carrying):
        def step(self, lower: Lower, state: CarriedState) -> CarriedState:
            moved = super().step(lower, state)
            return replace(moved, total=torch.cat([state.total, moved.residual[:, None]], dim=1))

    lower = lower_level(Tikhonov(condition=10), noisy(3) * torch.tensor([1e-3, 1, 1]).view(-1, 1, 1, 1))
    with pytest.raises(BltError, match="'total' of CarriedState changes its shape"):
        solve(Growing(), lower, lower.start(), 1e-6, with_state=True)


@pytest.mark.parametrize("solver", [AGD, GradientDescent, LBFGS, MemoryGradient])
def test_states_are_scattered_to_the_rows_of_their_samples(solver: Callable[[], LowerSolver]) -> None:
    y = noisy(4) * torch.tensor([0.1, 1.0, 3.0, 0.5], dtype=torch.float64).view(-1, 1, 1, 1)
    lower = lower_level(small_foe(), y)
    together = solve(solver(), lower, lower.start(), 1e-7, with_state=True)
    assert len(set(together.iterations.tolist())) > 1
    assert torch.equal(together.state.x, together.x)
    for i in range(4):
        part = lower.take(torch.tensor([i]))
        alone = solve(solver(), part, part.start(), 1e-7, with_state=True)
        for name in vars(alone.state):
            row = getattr(together.state, name)
            if isinstance(row, Tensor):
                torch.testing.assert_close(row[i : i + 1], getattr(alone.state, name), rtol=1e-4, atol=1e-6)


def test_the_inverse_of_lbfgs_satisfies_its_secant_equations() -> None:
    """B y = s for the newest pair of every sample, and B is symmetric."""
    lower = lower_level(small_foe(), noisy(3))
    solver = LBFGS(memory=5)
    state = solve(solver, lower, lower.start(), 1e-6, with_state=True).state
    image = lambda row: row.view(len(row), *SHAPE[1:], SHAPE[0]).movedim(-1, 1)  # noqa: E731
    torch.testing.assert_close(solver.inverse(state, image(state.y[:, -1])), image(state.s[:, -1]))
    u, v = noisy(3, seed=1), noisy(3, seed=2)
    left, right = ((a * solver.inverse(state, b)).flatten(1).sum(1) for a, b in ((u, v), (v, u)))
    torch.testing.assert_close(left, right)


class Recorder(HypergradientEstimator):
    """Keeps its questions, and answers with zero."""

    requires = {"lower_solver": ("inverse",)}  # noqa: RUF012
    gives_adjoint = False

    def __init__(self) -> None:
        self.asked: list[Ask] = []

    def estimate(self, ask: Ask) -> Estimate:
        self.asked.append(ask)
        zero = {name: torch.zeros_like(value) for name, value in ask.lower.theta.items()}
        count = torch.zeros(len(ask.solution), dtype=torch.long)
        return Estimate(zero, ask.lower.mu.new_zeros(len(count)), count)


def test_the_inverse_reaches_the_estimator_that_requires_it() -> None:
    for solver, offered in ((LBFGS(), True), (AGD(), False)):
        estimator = Recorder()
        oracle = tikhonov_oracle(solver, estimator, seed=7)
        oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(30), Accuracy(0.1))
        (ask,) = estimator.asked
        assert ask.seed == 7 and ask.lower_effort == Steps(30) and ask.effort == Accuracy(0.1)
        assert (ask.inverse is not None) is offered
        if ask.inverse is not None:
            v = torch.randn(
                ask.solution.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
            )
            error = ask.lower.linearize(ask.solution).hvp(ask.inverse(v)) - v
            assert float(error.norm()) < 0.9 * float(v.norm())


class Mover(HypergradientEstimator):
    """Takes gradient steps on x itself, and on another lower level through ``minimise``."""

    moves_x = True
    gives_adjoint = False
    reports = True

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        return {"visits": lower.mu.new_empty(0)}

    def estimate(self, ask: Ask) -> Estimate:
        assert isinstance(ask.lower_effort, Steps) and ask.minimise is not None
        x, count = ask.solution, ask.lower_effort.count
        for _ in range(count):
            x = x - ask.lower.gradient(x) / ask.lower.lipschitz.view(-1, 1, 1, 1)
        ask.minimise(ask.lower.tilted(ask.upper, 0.5), x, Steps(2))
        spent = torch.full((len(x),), count)
        return Estimate(
            {name: torch.zeros_like(value) for name, value in ask.lower.theta.items()},
            torch.zeros_like(ask.lower.mu),
            torch.zeros_like(spent),
            memory={"visits": ask.memory["visits"] + 1},
            x=x if self.reports else None,
            lower_iterations=spent,
            lower_residual=ask.lower.residual(x) if self.reports else None,
        )


class TestMovingEstimators:
    def test_the_lower_level_is_left_to_them(self) -> None:
        oracle = tikhonov_oracle(AGD(), Mover())
        for k in range(1, 4):
            result = oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(3), Steps(1))
            # Three of its own and two of ``minimise``, for each of three samples.
            assert oracle.cost.lower_iterations == 15 * k == oracle.cost.slowest
            assert kept(oracle.store("memory.visits"), range(3)).tolist() == [k] * 3
        plain = tikhonov_oracle(GradientDescent())
        value = plain.on(full_batch(plain)).hypergradient(THETA, Steps(9), Steps(1)).value
        assert result.value.value == pytest.approx(value.value, rel=1e-12)
        assert result.value.residual == pytest.approx(value.residual, rel=1e-9)
        assert result.value.short == {"steps": 3}

    def test_a_residual_that_was_not_measured_is_not_reported(self) -> None:
        class Silent(Mover):
            def estimate(self, ask: Ask) -> Estimate:
                return replace(super().estimate(ask), lower_residual=None)

        oracle = tikhonov_oracle(AGD(), Silent(), bound="estimated")
        result = oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(3), Steps(1))
        assert math.isinf(result.value.residual) and math.isinf(result.value.upper)
        assert math.isfinite(result.value.value)
        assert set(result.certificate) == {"adjoint_residual"}

    def test_one_that_returns_no_x_is_an_error(self) -> None:
        estimator = Mover()
        estimator.reports = False
        oracle = tikhonov_oracle(AGD(), estimator)
        with pytest.raises(BltError, match="declares moves_x, but its estimate has no x"):
            oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(1), Steps(1))


def test_the_ledger_counts_derivatives_in_theta() -> None:
    oracle = oracle_for(small_foe())
    theta: Theta = join(regularizer=initial(small_foe()))
    lower, _ = oracle.tasks.at(theta, oracle.counter).on([0, 2])
    lower.theta_gradient(lower.start(), torch.ones_like(lower.mu))
    assert oracle.counter.collect().theta_gradients == 2
