"""The penalty P(θ) of f: added once, exact, with its gradient before z is projected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_penalties
from helpers import directions, flat, relative_error, slope_theta
from processes import on_ranks
from torch import Tensor
from toy_penalties import BoxedWeight, PricedGain, PricedRidge

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.upper_optimizers.hoag import HOAG
from blt_builtins.upper_optimizers.isgd_ls import ISGDLineSearch
from blt_builtins.upper_optimizers.maid import MAID
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Cost, Theta
from bltoolbox.bilevel.tensors import theta_norm
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, NumericalError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.variational import Variational, VariationalTasks
from bltoolbox.testing import Gain, Images, SquaredLoss, SquaredMisfit, full_batch, smooth_images
from bltoolbox.testing.problems import White
from bltoolbox.testing.recipe_check import check_recipe
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in, run_in
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory

TIGHT = Accuracy(1e-11)
ROLES = ("regularizer", "operator", "data_term")


def problem(*priced: str, **options: Any) -> Variational:
    """All three components learn; those named have a penalty."""
    prices = {role: {} if role in priced else {"price": 0.0} for role in ROLES}
    operator = PricedGain(**prices["operator"])
    samples = Samples(
        Images(smooth_images(5, (2, 6, 7))), operator, noise=White(0.1), seed=0, dtype=torch.float64
    )
    regularizer = PricedRidge(**prices["regularizer"], **options)
    term = BoxedWeight(**prices["data_term"])
    return Variational(operator, regularizer, term, SquaredLoss(), samples={"training": samples})


def oracle_of(one: Variational, ranks: Ranks = ALONE, **options: Any) -> BilevelOracle:
    tasks = VariationalTasks(one, one.samples["training"])
    return BilevelOracle(one, tasks, AGD(), CGIFT(5000), iteration_limit=50_000, ranks=ranks, **options)


def initial(one: Variational) -> dict[str, Tensor]:
    return one.init_params(torch.Generator())


def by_hand(theta: Theta, *priced: str) -> float:
    weight, gain, trust = (
        theta[name] for name in ("regularizer.log_weight", "operator.log_gain", "data_term.weight")
    )
    parts = {
        "regularizer": 0.3 * (weight.sin() + weight.square()).sum(),
        "operator": 0.5 * gain.cosh().sum(),
        "data_term": 0.2 * trust.pow(3).sum(),
    }
    return float(sum(parts[role] for role in priced))


@pytest.mark.parametrize("priced", [*((role,) for role in ROLES), ROLES], ids=[*ROLES, "all"])
class TestDerivative:
    def test_value_and_bounds_contain_the_penalty(self, priced: tuple[str, ...]) -> None:
        plain, one = problem(), problem(*priced)
        theta, batch = initial(one), Batch([3, 1], [2.0, 0.5])
        for tol in (1.0, 1e-2):
            expected = oracle_of(plain).on(batch).value(theta, Accuracy(tol))
            found = oracle_of(one).on(batch).value(theta, Accuracy(tol))
            penalty = by_hand(theta, *priced)
            assert expected.penalty is None
            assert found.penalty == pytest.approx(penalty, rel=1e-14)
            for name in ("value", "lower", "upper"):
                assert getattr(found, name) == pytest.approx(getattr(expected, name) + penalty, rel=1e-13)
            assert found.certified == expected.certified

    def test_z_is_the_derivative_of_the_value(self, priced: tuple[str, ...]) -> None:
        one = problem(*priced)
        theta, batch = initial(one), Batch([0, 4, 2], [0.4, 1.7, 0.9])
        result = oracle_of(one, chunk=2).on(batch).hypergradient(theta, TIGHT, TIGHT)

        def value(moved: dict[str, Tensor]) -> float:
            return oracle_of(one).on(batch).value(moved, TIGHT).value

        for d in directions(theta, 2):
            expected = float(slope_theta(value, theta, d))
            assert float(flat(result.gradient) @ flat(d)) == pytest.approx(expected, rel=1e-7)

    def test_neither_cost_nor_error_bound_change(self, priced: tuple[str, ...]) -> None:
        theta = initial(problem())
        found = []
        for one in (problem(), problem(*priced)):
            oracle = oracle_of(one)
            result = oracle.on(full_batch(oracle)).hypergradient(
                theta, Accuracy(1e-2), Accuracy(1e-2), bound=True
            )
            found.append((result.bound, oracle.cost))
        assert found[0] == found[1]


def test_the_gradient_of_the_penalty_is_projected_with_z() -> None:
    theta = initial(problem())
    oracle = oracle_of(problem(*ROLES, tied=True))
    z = oracle.on(full_batch(oracle)).hypergradient(theta, TIGHT, TIGHT).gradient
    assert float(z["regularizer.log_weight"].sum()) == pytest.approx(0, abs=1e-12)
    free = oracle_of(problem(*ROLES))
    expected = free.on(full_batch(free)).hypergradient(theta, TIGHT, TIGHT).gradient["regularizer.log_weight"]
    assert float(expected.sum().abs()) > 1e-3
    torch.testing.assert_close(z["regularizer.log_weight"], expected - expected.mean())


def test_an_empty_batch_has_the_penalty_alone() -> None:
    one = problem(*ROLES)
    theta, oracle = initial(one), oracle_of(one)
    result = oracle.on(Batch([], [])).hypergradient(theta, TIGHT, TIGHT)
    assert result.value.value == result.value.lower == result.value.upper == result.value.penalty
    expected = 0.5 * theta["operator.log_gain"].sinh()
    torch.testing.assert_close(result.gradient["operator.log_gain"], expected)


def test_it_is_computed_in_float64_whatever_the_dtype() -> None:
    one = problem(*ROLES)
    theta = {name: value.float() for name, value in initial(one).items()}
    samples = replace_dtype(one.samples["training"])
    oracle = oracle_of(replace(one, samples={"training": samples}))
    result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(0.1), Accuracy(0.1))
    exact = by_hand({name: value.double() for name, value in theta.items()}, *ROLES)
    assert result.value.penalty == pytest.approx(exact, rel=1e-15)
    assert {part.dtype for part in result.gradient.values()} == {torch.float32}


def replace_dtype(samples: Samples) -> Samples:
    return Samples(samples.data, samples.operator, noise=White(0.1), seed=0, dtype=torch.float32)


class Broken(PricedRidge):
    """A penalty of the given kind."""

    def __init__(self, penalty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._penalty = penalty

    def penalty(self, theta: Theta) -> Tensor | None:
        return self._penalty(theta["log_weight"])


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_where_it_is_not_finite_no_step_leads(number: float) -> None:
    one = replace(problem(), regularizer=Broken(lambda weight: weight.sum() * 0 + number))
    oracle = oracle_of(one)
    value = oracle.on(full_batch(oracle)).value(initial(one), Accuracy(1.0))
    assert value.value == value.upper == math.inf and not value.certified
    with pytest.raises(NumericalError, match=r"the penalty P\(θ\) is not finite; use a smaller step"):
        oracle.on(full_batch(oracle)).hypergradient(initial(one), Accuracy(1.0), Accuracy(1.0))


def test_it_is_one_number() -> None:
    one = replace(problem(), regularizer=Broken(lambda weight: weight.square()))
    oracle = oracle_of(one)
    with pytest.raises(
        BltError, match=r"the penalty of regularizer Broken has shape \[2\], but must be one number"
    ):
        oracle.on(full_batch(oracle)).value(initial(one), Accuracy(1.0))


def test_a_constant_has_no_derivative() -> None:
    one = replace(problem(), regularizer=Broken(lambda weight: torch.tensor(7.0)))
    theta = initial(one)
    found = [oracle_of(p).on(Batch([1], [1.0])).hypergradient(theta, TIGHT, TIGHT) for p in (problem(), one)]
    assert relative_error(found[1].gradient, found[0].gradient) == 0
    assert found[1].value.value == pytest.approx(found[0].value.value + 7)


class TestOptimizers:
    @pytest.mark.parametrize(
        "optimizer", [MAID(), HOAG(step=0.05), ISGDLineSearch()], ids=lambda o: type(o).__name__
    )
    def test_line_searches_descend_on_f_with_its_penalty(self, optimizer: Any) -> None:
        one = problem(*ROLES)
        oracle, theta = oracle_of(one), initial(one)
        state = optimizer.init(theta)

        def exact(theta: Theta) -> float:
            return oracle_of(one).on(full_batch(oracle)).value(theta, TIGHT).value

        values = [exact(theta)]
        for _ in range(6):
            step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
            if step.finished:
                break
            at = theta if isinstance(optimizer, ISGDLineSearch) else step.theta
            assert step.penalty == pytest.approx(by_hand(at, *ROLES), rel=1e-12)
            theta, state = step.theta, step.state
            values.append(exact(theta))
        assert len(values) > 3 and all(b < a for a, b in itertools.pairwise(values)), values

    def test_maid_compares_the_error_bound_with_the_norm_of_the_whole_gradient(self) -> None:
        """Where a penalty nearly cancels z, z must be more accurate; where it dominates z, any is accurate enough."""
        base = replace(problem(), operator=Gain(), data_term=SquaredMisfit())
        theta, batch = initial(base), full_batch(oracle_of(base))
        z = oracle_of(base).on(batch).hypergradient(theta, TIGHT, TIGHT).gradient["regularizer.log_weight"]

        def attempts(factor: float) -> int:
            """Hypergradients before the first trial step, of which each but the last was not accurate enough."""
            one = replace(base, regularizer=Broken(lambda weight: (factor * z * weight).sum()))
            optimizer, oracle = MAID(step=1e-3, tol=0.3, adjoint_tol=0.3), oracle_of(one)
            count = []

            def before_call(cost: Cost) -> None:
                if cost.values == 0:
                    count.append(cost.hypergradients)

            oracle.before_call = before_call
            step = optimizer.step(theta, oracle.on(batch), optimizer.init(theta))
            length = theta_norm(((1 + factor) * z,))
            assert step.metrics["gradient_norm"] == pytest.approx(length, abs=float(step.metrics["bound"]))
            return max(count)

        assert attempts(-0.999) > attempts(0.0) >= attempts(1e3) == 1


def recipe(**changes: object) -> Recipe:
    settings: dict[str, object] = {
        "data": {"name": "dead-leaves", "count": 9, "size": 12},
        "dtype": "float64",
        "color": "gray",
        "operator": "priced-gain",
        "regularizer": "priced-ridge",
        "data_term": "boxed-weight",
        "lower_solver": "agd",
        "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 0.1},
        "sampler": {"name": "epoch", "size": 3},
        "validation": {"count": 2, "checks": 2},
        "checkpoint": {"every": 0.0},
        "budget": {"steps": 5},
    }
    return recipe_from_dict(settings | changes, registry=registry())


def registry() -> Any:
    return load_registry([Path(toy_penalties.__file__)])


def run_to(out: Path, one: Recipe, ranks: Ranks = ALONE) -> None:
    run_in(RunDirectory(out, ranks=ranks), assemble(one, registry(), ranks))


class TestRuns:
    def test_the_penalty_is_logged_apart(self, tmp_path: Path) -> None:
        run_to(tmp_path / "run", recipe())
        history = assemble(recipe(), registry()).run().history
        assert all("penalty" in record and record["penalty"] < record["loss"] for record in history)
        log = (tmp_path / "run" / "log.txt").read_text()
        assert all(", penalty " in line for line in log.splitlines() if "validation PSNR" in line)
        free = {
            "operator": {"name": "priced-gain", "price": 0},
            "regularizer": {"name": "priced-ridge", "price": 0},
        }
        without = recipe(**free, data_term={"name": "boxed-weight", "price": 0})
        assert not any("penalty" in record for record in assemble(without, registry()).run().history)

    @pytest.mark.parametrize("method", ["isgd", "maid"])
    def test_on_two_ranks_as_on_one(self, method: str, tmp_path: Path) -> None:
        full = {"upper_optimizer": {"name": "maid", "step": 1e-2, "tol": 0.05}, "sampler": "full"}
        one = recipe(**full if method == "maid" else {})

        def work(ranks: Ranks) -> list[Any]:
            result = assemble(one, registry(), ranks).run()
            return [flat(result.last).tolist(), [record["penalty"] for record in result.history]]

        expected, (first, second) = work(ALONE), on_ranks(tmp_path, 2, work)
        assert first == second
        for found, wanted in zip(first, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-12)

    @pytest.mark.parametrize("call", [2, 4])
    def test_resumed_in_the_middle_of_a_step(self, call: int, tmp_path: Path) -> None:
        one = recipe(
            upper_optimizer={"name": "maid", "step": 1e-2, "tol": 0.05}, sampler="full", budget={"steps": 3}
        )
        run_to(tmp_path / "whole", one)
        with pytest.raises(KeyboardInterrupt):
            experiment = assemble(one, registry())
            interrupt(experiment.oracle, call)
            run_in(RunDirectory(tmp_path / "cut"), experiment)
        with reopen(tmp_path / "cut", [], registry()) as reopened:
            resume_in(reopened.directory, reopened.experiment)
        whole, cut = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut"))
        assert whole == cut

    @pytest.mark.parametrize("low", [0.5, 0.9])
    def test_a_box_of_the_data_term_is_kept(self, low: float) -> None:
        """The weight leaves the box without its projection, and with it the loss still falls."""
        term = {"name": "boxed-weight", "low": low, "price": 50.0}
        one = recipe(
            data_term=term, upper_optimizer={"name": "isgd", "step": 5e-3, "tol": 0.1}, budget={"steps": 8}
        )
        result = assemble(one, registry()).run()
        weight = float(result.last["data_term.weight"])
        assert low <= weight < 1 and (low == 0.5 or weight == pytest.approx(0.9))
        assert result.history[-1]["penalty"] < result.history[0]["penalty"]

    def test_blt_check_includes_the_penalty(self) -> None:
        found = check_recipe(recipe(), registry())
        assert found.passed, found
        assert {link.place for link in found.links} >= {"penalty"}
        assert {row.direction for row in found.rows} >= set(assemble(recipe(), registry()).theta)

    def test_a_run_that_only_the_penalty_moves_fails(self) -> None:
        """As without a penalty: the adjoint system is never iterated."""
        loose = {"name": "isgd", "step": 1e-4, "tol": 0.1, "adjoint_tol": 1e6}
        with pytest.raises(
            NumericalError, match=r"steps 1 to 10: .*so only the penalty moves θ: .*adjoint_tol"
        ):
            assemble(recipe(upper_optimizer=loose, budget={"steps": 20}), registry()).run()

    def test_certified_bounds_are_refused_where_more_than_the_regularizer_learns(self) -> None:
        certified = {"certificates": {"bound": "certified"}}
        with pytest.raises(
            BltError, match=r"no certified error bound where the operator 'priced-gain' has parameters"
        ):
            assemble(recipe(**certified), registry())
        with pytest.raises(
            BltError, match=r"where the data term 'boxed-weight' has parameters; use bound: estimated"
        ):
            assemble(recipe(**certified, operator="identity"), registry())
        assemble(recipe(**certified, operator="identity", data_term="least-squares"), registry())


def interrupt(oracle: BilevelOracle, call: int) -> None:
    """Ctrl-C in the given call of the oracle."""
    solve, count = oracle.ask, [0]

    def asked(question: str, compute: Callable[[], Any]) -> Any:
        count[0] += 1
        if count[0] == call:
            raise KeyboardInterrupt
        return solve(question, compute)

    oracle.ask = asked  # type: ignore[method-assign, assignment]
