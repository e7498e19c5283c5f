"""isgd-ls: whatever the first step, the length it finds, what it asks for, and where it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import flat
from test_hoag_iadam import START, Parabola, minimiser, parabola_start, run, tikhonov_oracle

from blt_builtins.upper_optimizers.isgd import ISGD
from blt_builtins.upper_optimizers.isgd_ls import ISGDLineSearch
from bltoolbox import run as run_recipe
from bltoolbox.bilevel.records import HypergradientResult, Theta, Value
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import NumericalError

#: On a parabola of curvature c a step keeps 1 − αc/2 of its promise.
LOW, HIGH = 0.3, 0.7


@pytest.mark.parametrize("curvature", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("step", [1e-12, 1e-6, 1e-2, 1.0, 1e4])
def test_any_first_step_leads_to_one_that_keeps_a_fair_part_of_its_promise(
    step: float, curvature: float
) -> None:
    oracle, theta, optimizer = Parabola(curvature), parabola_start(), ISGDLineSearch(step=step)
    taken = optimizer.step(theta, oracle, optimizer.init(theta))
    kept = 1 - float(taken.metrics["step_size"]) * curvature / 2
    assert LOW <= kept <= HIGH
    values = [tol for kind, tol in oracle.asked if kind == "value"]
    assert len(values) == taken.metrics["trials"] <= 40
    assert set(values) == {0.2 * 0.1}, "both sides of a comparison have the same accuracy"


def test_a_step_too_small_to_be_seen_is_lengthened_without_asking() -> None:
    """f is wrong by more than a step of 1e-9 can gain; measured, its gain would be nonsense."""
    oracle, theta = Parabola(error=0.5), parabola_start()
    optimizer = ISGDLineSearch(step=1e-9)
    taken = optimizer.step(theta, oracle, optimizer.init(theta))
    assert float(taken.metrics["step_size"]) > 0.1
    assert len(oracle.asked) < 15


class Deaf(Parabola):
    """f with a gradient, and values that do not change with θ: the lower level is solved too coarsely."""

    def value(self, theta: Any, effort: Any) -> Any:
        return super().value(parabola_start(), effort)


def test_a_loss_that_does_not_follow_theta_is_reported() -> None:
    theta, optimizer = parabola_start(), ISGDLineSearch(step=1.0)
    with pytest.raises(NumericalError, match=r"no step, however short, .* decrease upper_optimizer.tol"):
        optimizer.step(theta, Deaf(), optimizer.init(theta))


def test_a_stationary_theta_is_not_an_error() -> None:
    """Once the predicted decrease is lost in rounding, there is nothing to measure."""
    theta = {"a": 1e-9 * parabola_start()["a"]}
    optimizer = ISGDLineSearch(step=1.0)
    state = optimizer.step(parabola_start(), Parabola(), optimizer.init(theta)).state
    taken = optimizer.step(theta, Raised(), state)
    assert float(taken.theta["a"].norm()) <= float(theta["a"].norm())


class Raised(Parabola):
    """A loss with a large constant."""

    def value(self, theta: Any, effort: Any) -> Any:
        return replace(super().value(theta, effort), value=1.0)


def test_between_measurements_it_is_isgd() -> None:
    theta, optimizer = parabola_start(), ISGDLineSearch(step=0.9, every=7)
    state, asked = optimizer.init(theta), []
    for _ in range(30):
        oracle = Parabola()
        taken = optimizer.step(theta, oracle, state)
        plain = ISGD(step=float(taken.metrics["step_size"]))
        same = plain.step(theta, Parabola(), plain.init(theta))
        assert torch.equal(taken.theta["a"], same.theta["a"])
        asked.append(any(kind == "value" for kind, _ in oracle.asked))
        theta, state = taken.theta, taken.state
    assert [k for k, one in enumerate(asked) if one] == [0, 1, 2, 7, 14, 21, 28]


def test_a_step_that_would_lead_further_than_the_last_one_measured_is_measured_first() -> None:
    """The curvature is suddenly a hundred times what it was."""
    theta, optimizer = parabola_start(), ISGDLineSearch(step=0.5, every=1000)
    state = optimizer.init(theta)
    for _ in range(4):
        theta, state = (taken := optimizer.step(theta, Parabola(0.7), state)).theta, taken.state
    steeper = Parabola(curvature=100.0)
    taken = optimizer.step(theta, steeper, state)
    assert LOW <= 1 - float(taken.metrics["step_size"]) * 100 / 2 <= 1
    assert float(taken.theta["a"].norm()) < float(theta["a"].norm())


@pytest.mark.parametrize("step", [1e-6, 1e-2, 1e2])
def test_it_reaches_the_known_minimiser_from_any_step(step: float) -> None:
    oracle = tikhonov_oracle()
    theta, _ = run(ISGDLineSearch(step=step, tol=1e-3, tol_decay=1.0, every=3), oracle, 60, START)
    torch.testing.assert_close(theta["regularizer.log_weight"], minimiser(oracle), rtol=0, atol=5e-3)


class Sample(Parabola):
    """f_i(θ) = ½c(θ − a)², a batch of one sample."""

    def __init__(self, curvature: float, minimiser: float) -> None:
        super().__init__(curvature)
        self.minimiser = minimiser

    def _value(self, theta: Theta, tol: float) -> Value:
        return super()._value({"a": theta["a"] - self.minimiser}, tol)

    def hypergradient(self, theta: Theta, *efforts: Any, **options: Any) -> HypergradientResult:
        result = super().hypergradient({"a": theta["a"] - self.minimiser}, *efforts, **options)
        return replace(result, value=self._value(theta, 0.0))


def test_steps_are_unbiased_unless_their_length_is_measured_on_their_own_batch() -> None:
    """At the minimiser of f = ½(f_1 + f_2) the two batches pull equally; the flatter one gets the longer step."""
    samples, theta = [Sample(1.0, 8.0), Sample(8.0, -1.0)], {"a": torch.zeros(1, dtype=torch.float64)}
    optimizer = ISGDLineSearch(every=10)

    def mean_move(k: int, reach: float) -> float:
        state = {"k": k, "step": 0.5, "reach": reach, "tol": 0.1, "adjoint_tol": 0.1}
        return sum(float(optimizer.step(theta, one, state).theta["a"]) for one in samples) / 2

    assert mean_move(11, reach=100.0) == 0, "between measurements"
    # α = 1 and ⅛, each the best step of its batch, times z = −8 and 8.
    assert mean_move(10, reach=100.0) == 3.5, "at a measurement"
    assert mean_move(11, reach=0.1) == 3.5, "at a step that would go too far"


def test_a_step_that_fails_is_shortened_when_asked() -> None:
    optimizer, theta = ISGDLineSearch(step=1.0), parabola_start()
    assert optimizer.shorten(optimizer.init(theta), 0.5) == {"k": 0}
    after = optimizer.step(theta, Parabola(), optimizer.init(theta)).state
    assert optimizer.shorten(after, 0.5)["step"] == 0.5 * after["step"]


def test_nothing_to_descend_moves_nothing() -> None:
    theta, optimizer = {"a": torch.zeros(2, dtype=torch.float64)}, ISGDLineSearch(step=0.1)
    taken = optimizer.step(theta, Parabola(), optimizer.init(theta))
    assert torch.equal(taken.theta["a"], theta["a"]) and taken.metrics["trials"] == 0


@pytest.mark.parametrize("step", [1e-6, 1e4])
def test_an_empty_draw_at_the_start_leaves_the_search_for_later(step: float) -> None:
    optimizer, nothing = ISGDLineSearch(step=step), {"a": torch.zeros(2, dtype=torch.float64)}
    state = optimizer.init(nothing)
    for _ in range(5):
        state = optimizer.step(nothing, Parabola(), state).state
    assert set(state) == {"k", "tol", "adjoint_tol"}
    taken = optimizer.step(parabola_start(), Parabola(), state)
    assert LOW <= 1 - float(taken.metrics["step_size"]) / 2 <= HIGH


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"low 0\.8 is not below high 0\.5"):
        ISGDLineSearch(low=0.8, high=0.5)


def test_a_run_learns_as_much_from_a_step_a_million_times_too_short_or_long() -> None:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 24, "size": 20},
        "regularizer": {"name": "foe", "filters": 4, "kernel_size": 3},
        "lower_solver": "mm",
        "sampler": {"size": 8},
        "validation": {"count": 0},
        "certificates": {"bound": "none"},
        "budget": {"steps": 12},
    }
    ends = []
    for step in (1e-8, 1e-2, 1e4):
        optimizer = {"name": "isgd-ls", "step": step, "tol": 0.1}
        result = run_recipe(recipe_from_dict(settings | {"upper_optimizer": optimizer}))
        losses = [record["loss"] for record in result.history]
        ends.append(sum(losses[-3:]) / sum(losses[:3]))
        assert bool(torch.isfinite(flat(result.theta)).all())
    assert max(ends) < 0.8, ends
    assert max(ends) - min(ends) < 0.1, ends


def test_a_loss_that_cannot_be_computed_is_an_error_and_not_an_endless_step() -> None:
    class Unreachable(Parabola):
        def value(self, *arguments: Any, **options: Any) -> Any:
            return replace(super().value(*arguments, **options), value=math.inf)

    theta, optimizer = parabola_start(), ISGDLineSearch()
    with pytest.raises(NumericalError, match=r"upper_optimizer\.tol or value_tol"):
        optimizer.step(theta, Unreachable(), optimizer.init(theta))
