"""Upper-level optimizers: known minimisers, exact schedules, certified decrease, and what a step may touch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from helpers import (
    REGULARIZERS,
    SOLVERS,
    flat,
    initial,
    kept,
    measured,
    oracle_for,
    relative_error,
    small_foe,
)
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.samplers.epoch import Epoch
from blt_builtins.upper_optimizers.isgd import ISGD
from blt_builtins.upper_optimizers.maid import MAID
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Cost, HypergradientResult, Step, Theta, Value
from bltoolbox.bilevel.roles import Oracle, UpperOptimizer
from bltoolbox.bilevel.tensors import norm, theta_norm
from bltoolbox.errors import BudgetExhausted
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images

NAME = "regularizer.log_weight"


def quadratic(
    dtype: torch.dtype = torch.float64, count: int = 4
) -> tuple[BilevelOracle, dict[str, Tensor], Tensor]:
    """A bilevel quadratic, a start, and its minimiser."""
    oracle = make_oracle(
        smooth_images(count), prior := Tikhonov(), SOLVERS["mm"](), CGIFT(), noise=0.4, dtype=dtype
    )
    x_true, y = measured(oracle)
    best = prior.minimiser(y.double(), x_true.double())["log_weight"]
    return oracle, {NAME: torch.tensor([1.5, -3.0, 0.0], dtype=dtype)}, best


def run(optimizer: UpperOptimizer, oracle: BilevelOracle, theta: Theta, steps: int) -> list[Step]:
    """Full-batch steps until the optimizer says that it is finished."""
    state, done, theta = optimizer.init(theta), [], dict(theta)
    while len(done) < steps and not (done and done[-1].finished):
        done.append(optimizer.step(theta, oracle.on(full_batch(oracle)), state))
        theta, state = done[-1].theta, done[-1].state
    return done


def true_value(oracle: BilevelOracle, theta: Theta) -> float:
    """f(θ) to 1e-10, by a solve that shares nothing with the oracle under test."""
    fresh = BilevelOracle(
        oracle.problem, oracle.tasks, SOLVERS["mm"](), oracle.hypergradient, iteration_limit=50_000
    )
    return fresh.on(full_batch(fresh)).value(theta, Accuracy(1e-11)).value


@dataclass
class Parabola:
    """f(θ) = ½ Σ c θ² that remembers what it was asked; f is exact, its bounds are ``spread``·ε away from it."""

    curvature: Tensor
    spread: float = 0.0
    started: list[tuple[Value | None, float]] = field(default_factory=list)
    asked: list[tuple[float, ...]] = field(default_factory=list)
    tried: list[Tensor] = field(default_factory=list)
    accepted: list[Value] = field(default_factory=list)

    def _value(self, theta: Theta, tol: float) -> Value:
        f, error = 0.5 * float((self.curvature * theta["t"].square()).sum()), self.spread * tol
        return Value(f, f - error, f + error, True, 0.0, 0.0, trial=theta["t"])

    def value(
        self,
        theta: Theta,
        effort: Accuracy,
        *,
        bound: bool = False,
        towards: Value | None = None,
        fraction: float = 1.0,
    ) -> Value:
        self.asked.append((effort.tol,))
        self.tried.append(theta["t"])
        self.started.append((towards, fraction))
        return self._value(theta, effort.tol)

    def hypergradient(
        self, theta: Theta, effort: Accuracy, adjoint: Accuracy, *, bound: bool = False
    ) -> HypergradientResult:
        self.asked.append((effort.tol, adjoint.tol))
        gradient = {"t": self.curvature * theta["t"]}
        return HypergradientResult(gradient, self._value(theta, effort.tol), 0.0, 0.0, 0.0 if bound else None)

    def accept(self, value: Value) -> None:
        self.accepted.append(value)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return dict(theta)


class Line(Parabola):
    """f(θ) = −t, without curvature."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(1))

    def _value(self, theta: Theta, tol: float) -> Value:
        f = -float(theta["t"])
        return Value(f, f, f, True, 0.0, 0.0, trial=theta["t"])

    def hypergradient(
        self, theta: Theta, effort: Accuracy, adjoint: Accuracy, *, bound: bool = False
    ) -> HypergradientResult:
        result = super().hypergradient(theta, effort, adjoint, bound=bound)
        return replace(result, gradient={"t": -torch.ones_like(theta["t"])})


def run_on_parabola(optimizer: UpperOptimizer, oracle: Oracle, theta: Theta, count: int) -> list[Step]:
    state, steps = optimizer.init(theta), []
    for _ in range(count):
        steps.append(optimizer.step(theta, oracle, state))
        theta, state = steps[-1].theta, steps[-1].state
    return steps


class TestISGD:
    def test_reaches_the_known_minimiser_of_a_bilevel_quadratic(self) -> None:
        oracle, theta, best = quadratic()
        optimizer = ISGD(step=0.1, tol=1e-2, tol_decay=2.0)
        steps = run(optimizer, oracle, theta, 120)
        torch.testing.assert_close(steps[-1].theta[NAME], best, rtol=0, atol=1e-4)
        values = [true_value(oracle, theta), *(true_value(oracle, s.theta) for s in steps[:4])]
        assert all(later < earlier for earlier, later in pairwise(values))

    def test_decreasing_steps_on_mini_batches_reach_it_on_average(self) -> None:
        oracle, theta, best = quadratic()
        optimizer, sampler = ISGD(step=0.2, step_decay=0.7, tol=1e-3), Epoch(2)
        state, draw = optimizer.init(theta), sampler.init(4, 0)
        for _ in range(200):
            batch, draw = sampler.next(draw)
            step = optimizer.step(theta, oracle.on(batch), state)
            theta, state = step.theta, step.state
        assert (theta[NAME] - best).abs().max() < 0.05

    @pytest.mark.parametrize(("a", "b"), [(0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (1.0, 0.6)])
    def test_schedules_are_the_powers_they_say(self, a: float, b: float) -> None:
        oracle = Parabola(torch.tensor([2.0, 0.1], dtype=torch.float64))
        optimizer = ISGD(step=0.3, step_decay=a, tol=0.2, tol_decay=b, adjoint_tol=0.7)
        theta: dict[str, Tensor] = {"t": torch.tensor([1.0, -3.0], dtype=torch.float64)}
        state = optimizer.init(theta)
        for k in range(6):
            step = optimizer.step(theta, oracle, state)
            alpha = 0.3 * (k + 1) ** -a
            assert oracle.asked[-1] == (0.2 * (k + 1) ** -b, 0.7 * (k + 1) ** -b)
            assert torch.equal(step.theta["t"], theta["t"] - alpha * (oracle.curvature * theta["t"]))
            assert step.metrics["step_size"] == alpha
            theta, state = step.theta, step.state

    def test_same_accuracy_for_the_adjoint_unless_given(self) -> None:
        oracle = Parabola(torch.ones(1, dtype=torch.float64))
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = ISGD(tol=0.05)
        optimizer.step(theta, oracle, optimizer.init(theta))
        assert oracle.asked == [(0.05, 0.05)]


class TestMAID:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_reaches_the_known_minimiser_and_stops_at_the_precision_of_the_dtype(
        self, dtype: torch.dtype
    ) -> None:
        oracle, theta, best = quadratic(dtype)
        steps = run(MAID(step=1.0, tol=1.0), oracle, theta, 300)
        assert (steps[-1].finished or "").startswith("converged-to-precision")
        reached = 1e-5 if dtype == torch.float64 else 3e-3
        assert (steps[-1].theta[NAME].double() - best).abs().max() < reached
        assert torch.equal(steps[-1].theta[NAME], steps[-2].theta[NAME]), "the last word changes nothing"

    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("prior", REGULARIZERS)
    @pytest.mark.parametrize("tol", [3.0, 0.1])
    def test_never_accepts_an_increase_of_the_true_f(self, prior: str, solver: str, tol: float) -> None:
        oracle = oracle_for(REGULARIZERS[prior](), solver, shape=(3, 8, 9), noise=0.1)
        optimizer = MAID(step=1.0, tol=tol)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        before, tightenings = true_value(oracle, theta), 0
        for step in run(optimizer, oracle, theta, 5):
            after = true_value(oracle, step.theta)
            moved = theta_norm(step.theta[name] - theta[name] for name in theta)
            # Not only no increase: the decrease that the acceptance test promises.
            assert after - before <= -(optimizer.eta**2) * moved**2 / float(step.metrics["step_size"]) + 1e-10
            assert 0 < float(step.metrics["decrease"]) <= before - after + 1e-10
            assert step.metrics["decrease_kind"] == "certified" and step.metrics["certified"] == 1
            theta, before = step.theta, after
            tightenings += int(step.metrics["tightenings"])
        assert tightenings, "some steps are meant to be rejected by their error bounds first"

    def test_keeps_the_constraint_on_theta(self) -> None:
        oracle = oracle_for(small_foe(), noise=0.1)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        for step in run(MAID(step=1.0), oracle, theta, 3):
            assert relative_error(oracle.problem.project(step.theta), step.theta) < 1e-15

    def test_the_backtracked_step_is_the_one_applied(self) -> None:
        oracle = Parabola(torch.tensor([2.0, 5.0], dtype=torch.float64))
        theta = {"t": torch.tensor([1.0, -3.0], dtype=torch.float64)}
        optimizer = MAID(step=3.0, tol=0.1, shrink=0.5, grow=1.2, trials=8)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        trials, alpha = int(step.metrics["trials"]), float(step.metrics["step_size"])
        assert trials > 1, "the first step is meant to be too long"
        assert alpha == 3.0 * 0.5 ** (trials - 1)
        assert torch.equal(step.theta["t"], theta["t"] - alpha * oracle.curvature * theta["t"])
        assert torch.equal(oracle.tried[-1], step.theta["t"]) and len(oracle.tried) == trials
        assert [value.trial is oracle.tried[-1] for value in oracle.accepted] == [True]
        assert step.state["alpha"] == pytest.approx(1.2 * alpha, rel=1e-15)

    def test_first_accepted_length_is_the_longest_that_decreases_enough(self) -> None:
        c, eta = 4.0, 0.5
        oracle = Parabola(torch.tensor([c], dtype=torch.float64))
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        for first in (0.1, 0.45, 0.8, 1.7):
            optimizer = MAID(step=first, tol=0.1, eta=eta, trials=9)
            alpha = float(optimizer.step(theta, oracle, optimizer.init(theta)).metrics["step_size"])
            # ½c(1 − αc)² − ½c ≤ −η² α c²  ⟺  α ≤ 2(1 − η²)/c
            assert alpha <= 2 * (1 - eta**2) / c < 2 * alpha or alpha == first <= 2 * (1 - eta**2) / c

    def test_accuracies_are_tightened_until_the_bound_suffices_and_loosened_after(self) -> None:
        oracle = oracle_for(small_foe(), noise=0.1)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        optimizer = MAID(step=0.1, tol=10.0, tighten=0.25, loosen=2.0)
        step = optimizer.step(theta, oracle.on(full_batch(oracle)), optimizer.init(theta))
        count, more = int(step.metrics["attempts"]), int(step.metrics["tightenings"])
        tol, adjoint_tol = float(step.metrics["tol"]), float(step.metrics["adjoint_tol"])
        assert count > 1 and adjoint_tol == pytest.approx(10 * 0.25 ** (count - 1))
        assert tol == pytest.approx(10 * 0.25 ** (count - 1 + more)), "that of values, which z does not need"
        assert float(step.metrics["bound"]) <= (1 - optimizer.eta) * float(step.metrics["gradient_norm"])
        assert step.state["tol"] == pytest.approx(2 * tol)
        assert step.state["adjoint_tol"] == pytest.approx(2 * adjoint_tol)

    def test_a_step_that_only_its_bounds_reject_is_kept_and_computed_more_accurately(self) -> None:
        oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=3.0)
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=0.25, tol=1.0)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        # f falls from 1 to ¼, and must fall by 0.01: at ε = ⅛ the errors of both values add up to ¾, at ε = 1/16 to ⅜.
        assert step.metrics["step_size"] == 0.25 and step.metrics["trials"] == 1
        assert step.metrics["tol"] == 1 / 16 and step.metrics["tightenings"] == 4
        assert float(step.theta["t"]) == 0.5
        assert step.metrics["decrease"] == 0.75 - 2 * 3 / 16
        assert oracle.asked[:2] == [(1.0, 1.0), (1.0,)], "z and the first trial"
        assert oracle.asked[2:] == [(0.5**k,) for k in (1, 1, 2, 2, 3, 3, 4, 4)], "f alone, at θ and at θ⁺"
        assert [float(one) for one in oracle.tried] == [0.5, *[1.0, 0.5] * 4]
        assert [start is None for start, _ in oracle.started] == [True, *[True, False] * 4]
        assert all(float(start.trial) == 0.5 and share == 1 for start, share in oracle.started[2::2] if start)
        assert step.state["tol"] == 1.25 / 16 and step.state["adjoint_tol"] == 1.25, "z was accurate enough"

    def test_the_published_line_search_shortens_it_instead(self) -> None:
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=0.25, tol=1.0, line_search="paper")
        # The second state is that of a run of earlier versions, which had no other.
        for method, state in ((optimizer, {}), (MAID(), {"alpha": 0.25, "tol": 1.0, "adjoint_tol": 1.0})):
            oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=3.0)
            step = method.step(theta, oracle, state)
            lengths = [(1 - float(one)) / 2 for one in oracle.tried[:5]]
            assert lengths == [0.25 * 0.5**k for k in range(5)]
            assert int(step.metrics["attempts"]) > 1 and step.metrics["tightenings"] == 0
            assert all(start is None for start, _ in oracle.started)
            assert step.state["line_search"] == "paper"

    def test_a_step_that_is_too_long_is_shortened_at_the_same_accuracy(self) -> None:
        oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=1e-3)
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=6.0, tol=1.0)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        assert (step.metrics["step_size"], step.metrics["trials"]) == (0.75, 4)
        assert step.metrics["tol"] == 1.0 and step.metrics["tightenings"] == 0
        for (start, share), rejected in zip(oracle.started[1:], oracle.tried, strict=False):
            assert start is not None and torch.equal(start.trial, rejected) and share == 0.5

    def test_a_search_that_fails_restarts_at_the_longest_step_that_may_be_short_enough(self) -> None:
        oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=1e-3)
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=64.0, tol=1.0, trials=2)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        assert [(1 - float(one)) / 2 for one in oracle.tried] == [64.0 * 0.5**k for k in range(8)]
        assert step.metrics["attempts"] == 3, "after two lengths, and three more"

    def test_the_next_step_has_the_length_of_barzilai_and_borwein(self) -> None:
        c = torch.tensor([2.0, 5.0], dtype=torch.float64)
        theta, oracle = {"t": torch.tensor([1.0, -3.0], dtype=torch.float64)}, Parabola(c)
        first, second = run_on_parabola(MAID(step=0.1, tol=0.1), oracle, theta, 2)
        s = first.theta["t"] - theta["t"]
        expected = float((s * c * s).sum() / (c * s).square().sum())
        assert float(second.metrics["step_size"]) == pytest.approx(expected, rel=1e-14)
        start = {"t": torch.ones(1, dtype=torch.float64)}
        cases = ((1e-3, 4.0, Parabola(torch.tensor([2.0], dtype=torch.float64))), (0.3, 1.5, Line()))
        for step, change, case in cases:  # far from 1/c; without curvature
            first, second = run_on_parabola(MAID(step=step, tol=0.1), case, start, 2)
            assert float(second.metrics["step_size"]) == pytest.approx(change * step, rel=1e-14)

    def test_a_step_that_barely_decreases_is_shortened_rather_than_certified_at_any_cost(self) -> None:
        oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=0.1)
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=0.98, tol=1.0)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        # f falls by 0.0784 of the 3.92 that z predicts, 0.0392 more than it must, and the errors add up to 0.2.
        assert step.metrics["step_size"] == 0.49 and step.metrics["tol"] == 1.0

    def test_an_inaccurate_z_does_not_tighten_what_only_values_need(self) -> None:
        class Rough(Parabola):
            def hypergradient(
                self, theta: Theta, effort: Accuracy, adjoint: Accuracy, *, bound: bool = False
            ) -> HypergradientResult:
                result = super().hypergradient(theta, effort, adjoint, bound=bound)
                return replace(result, bound=2 * adjoint.tol)

        theta = {"t": torch.ones(1, dtype=torch.float64)}
        for tol, expected in ((1e-3, 1e-3), (4.0, 2.0)):
            oracle = Rough(torch.tensor([2.0], dtype=torch.float64))
            state = {"line_search": "adaptive", "alpha": 0.25, "tol": tol, "adjoint_tol": 1.0, "ratio": 4.0}
            step = MAID().step(theta, oracle, state)
            assert oracle.asked[:2] == [(tol, 1.0), (expected, 0.5)], "ω = 2δ must be at most 0.9·2"
            assert step.metrics["attempts"] == 2 and step.metrics["tol"] == expected

    def test_an_infinite_bound_is_not_taken_for_a_lack_of_accuracy(self) -> None:
        class NotConvexFarAway(Parabola):
            def _value(self, theta: Theta, tol: float) -> Value:
                value = super()._value(theta, tol)
                return replace(value, upper=math.inf) if float(theta["t"]) < 0.7 else value

        oracle = NotConvexFarAway(torch.tensor([2.0], dtype=torch.float64))
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=0.25, tol=1.0)
        step = optimizer.step(theta, oracle, optimizer.init(theta))
        assert step.metrics["step_size"] == 0.125 and step.metrics["tightenings"] == 0

    def test_plain_acceptance_takes_what_the_certificate_rejects_and_says_so(self) -> None:
        theta = {"t": torch.ones(1, dtype=torch.float64)}
        optimizer = MAID(step=0.25, tol=1.0, acceptance="plain")
        for spread, kind, decrease in ((3.0, "plain", 0.75), (0.1, "certified", 0.55)):
            oracle = Parabola(torch.tensor([2.0], dtype=torch.float64), spread=spread)
            metrics = optimizer.step(theta, oracle, optimizer.init(theta)).metrics
            assert len(oracle.tried) == 1 and metrics["tol"] == 1.0
            assert metrics["decrease_kind"] == kind and metrics["certified"] == int(kind == "certified")
            assert metrics["decrease"] == pytest.approx(decrease)

    def test_a_trial_where_nothing_can_be_computed_is_rejected(self) -> None:
        oracle = oracle_for(small_foe(), noise=0.1)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        optimizer = MAID(step=1e9, shrink=1e-3, tol=1e-2, trials=30)  # the first weights overflow
        batch = oracle.on(full_batch(oracle))
        step = optimizer.step(theta, batch, optimizer.init(theta))
        assert int(step.metrics["trials"]) > 1
        assert true_value(oracle, step.theta) < true_value(oracle, theta)
        too_far = dict(theta) | {"regularizer.log_scale": theta["regularizer.log_scale"] + 1e9}
        assert batch.value(too_far, Accuracy(1e-2)).upper == math.inf

    def test_a_tolerance_above_the_right_hand_side_is_not_taken_for_convergence(self) -> None:
        oracle = oracle_for(small_foe(), noise=0.1)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e3), Accuracy(1e3), bound=True)
        assert flat(result.gradient).norm() == 0, "the adjoint is meant to be zero"
        assert result.bound is not None and result.bound > 0
        step = run(MAID(step=0.1, tol=1e3), oracle, theta, 1)[-1]
        assert step.finished is None and float(step.metrics["decrease"]) > 0

    def test_warm_starts_are_those_of_the_accepted_step(self) -> None:
        oracle = oracle_for(small_foe(), noise=0.1)
        theta = join(regularizer=initial(oracle.problem.regularizer))
        optimizer = MAID(step=10.0, tol=1e-3, trials=30)
        step = optimizer.step(theta, oracle.on(full_batch(oracle)), optimizer.init(theta))
        assert int(step.metrics["trials"]) > 1
        reference = oracle_for(small_foe(), noise=0.1)
        reference.on(full_batch(reference)).hypergradient(step.theta, Accuracy(1e-11), Accuracy(1e-11))
        found, exact = (kept(o.solutions, range(3)) for o in (oracle, reference))
        assert (norm(found - exact) <= float(step.metrics["tol"])).all()


@pytest.mark.parametrize("optimizer", [ISGD(step=1e-2, tol=1e-7), MAID(step=10.0, tol=1.0, trials=30)])
def test_budget_is_checked_between_oracle_calls_and_theta_survives(optimizer: UpperOptimizer) -> None:
    limit, seen = 150, []

    def stop(cost: Cost) -> None:
        seen.append(cost.computations)
        if cost.computations >= limit:
            raise BudgetExhausted("spent")

    oracle = oracle_for(small_foe(), noise=0.1, before_call=stop)
    theta = join(regularizer=initial(oracle.problem.regularizer))
    before = flat(theta)
    with pytest.raises(BudgetExhausted):
        run(optimizer, oracle, theta, 1000)
    assert all(spent < limit for spent in seen[:-1])
    assert oracle.cost.computations == seen[-1] >= limit, "nothing is spent after the budget is found empty"
    assert torch.equal(flat(theta), before)


@pytest.mark.parametrize("make", [lambda: ISGD(step=0.01), lambda: MAID(step=0.5, tol=0.1)])
def test_a_saved_state_continues_the_same_steps(make: Callable[[], UpperOptimizer]) -> None:
    theta = {"t": torch.tensor([1.0, -3.0], dtype=torch.float64)}

    def steps(optimizer: UpperOptimizer, theta: Theta, state: dict[str, object], count: int) -> Step:
        oracle: Oracle = Parabola(torch.tensor([2.0, 5.0], dtype=torch.float64))
        for _ in range(count):
            step = optimizer.step(theta, oracle, state)
            theta, state = step.theta, step.state
        return step

    whole = steps(make(), theta, make().init(theta), 6)
    half = steps(make(), theta, make().init(theta), 3)
    assert torch.equal(steps(make(), half.theta, half.state, 3).theta["t"], whole.theta["t"])
