"""The ledger is exact: every count equals what instrumented components saw."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers import kept
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox import resume, run
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Batch, Cost, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.results import RunResult
from bltoolbox.restoration.theta import join
from bltoolbox.testing import make_oracle, smooth_images


class CountingFoE(FieldOfExperts):
    """Counts samples that pass through each of its methods."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__(filters=3, kernel_size=3, nu=0.05, weight=0.05, start="random")
        self.seen = seen

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        self.seen["gradients"] += len(x)
        return super().gradient(theta, x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        self.seen["gradients"] += len(t)
        return super().synthesise(theta, t, shape)

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        self.seen["linearisations"] += len(x)
        return CountingProduct(super().linearize(theta, x), self.seen)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        self.seen["mixed_products"] += len(x)
        return super().pairing(theta, x, q)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        self.seen["mixed_products"] += len(x)
        return super().pairing_gradients(theta, x, q)


class CountingProduct:
    def __init__(self, product: Callable[[Tensor], Tensor], seen: Counter[str]) -> None:
        self.product, self.seen = product, seen

    def __call__(self, v: Tensor) -> Tensor:
        self.seen["hessian_products"] += len(v)
        return self.product(v)

    def take(self, index: Tensor) -> CountingProduct:
        return CountingProduct(self.product.take(index), self.seen)  # type: ignore[attr-defined]


def counting(solver: type[LowerSolver], seen: Counter[str]) -> LowerSolver:
    """The solver, counting the samples in each of its steps."""

    class Counting(solver):  # type: ignore[misc, valid-type]
        def step(self, lower: Lower, state: object) -> object:
            seen["lower_iterations"] += len(lower.y)
            return super().step(lower, state)

    return Counting()  # type: ignore[no-any-return]


@pytest.mark.parametrize("solver", [AGD, MemoryGradient])
@pytest.mark.parametrize("chunk", [2, 5])
def test_every_count_is_what_the_components_saw(solver: type[LowerSolver], chunk: int) -> None:
    seen: Counter[str] = Counter()
    foe = CountingFoE(seen)
    images = smooth_images(5, (3, 9, 10))
    oracle = make_oracle(images, foe, counting(solver, seen), CGIFT(), chunk=chunk)
    theta = join(regularizer=foe.init_params((3, 8, 8), keyed_generator(0)))
    asked = oracle.on(Batch(range(5), [1.0] * 5))
    asked.hypergradient(theta, Accuracy(1e-3), Accuracy(1e-3))
    asked.hypergradient(theta, Accuracy(1e-5), Accuracy(1e-4), bound=True)
    asked.value({name: value + 0.01 for name, value in theta.items()}, Accuracy(1e-3))
    asked.scales(theta)
    ledger = oracle.cost.as_dict()
    for name in ("lower_iterations", "gradients", "hessian_products", "linearisations", "mixed_products"):
        assert ledger[name] == seen[name], name
    assert ledger["hypergradients"] == 2 and ledger["values"] == 1
    assert ledger["power_iterations"] == 0, "the strong convexity is known"
    assert ledger["computations"] == ledger["lower_iterations"] + ledger["linear_iterations"]
    assert ledger["slowest"] >= ledger["computations"]


def test_line_search_is_in_and_evaluation_is_out(tmp_path: Path) -> None:
    recipe = {
        "data": {"name": "dead-leaves", "count": 6, "size": 16},
        "evaluation": {"name": "photos", "size": 16},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "sampler": "full",
        "upper_optimizer": {"name": "maid", "step": 1.0, "tol": 0.05},
        "validation": {"count": 2},
        "budget": {"steps": 3},
    }
    plain = run(recipe_from_dict(recipe), out=tmp_path / "plain")
    cost = plain.cost
    assert 0 < cost.line_search < cost.lower_iterations
    assert cost.evaluation_iterations > 0
    bare = run(recipe_from_dict(recipe | {"evaluation": None, "validation": {"count": 2, "checks": 1}}))
    assert bare.cost.computations == cost.computations
    assert bare.cost.evaluation_iterations < cost.evaluation_iterations
    last = json.loads((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: last[name] for name in ("computations", "line_search", "gradients")} == {
        name: cost.as_dict()[name] for name in ("computations", "line_search", "gradients")
    }
    assert plain.as_dict()["hessian_products"] == cost.hessian_products


COUNTED = ("lower_iterations", "gradients", "hessian_products", "linearisations", "mixed_products")


class Prepared:
    """An oracle of five counting samples in two chunks, asked once, so that it has warm starts."""

    def __init__(self, limit: int = 2000, adjoint_limit: int = 500) -> None:
        self.seen: Counter[str] = Counter()
        foe = CountingFoE(self.seen)
        self.solver = counting(AGD, self.seen)
        images = smooth_images(5, (3, 9, 10))
        self.oracle = make_oracle(images, foe, self.solver, CGIFT(), chunk=3)
        self.theta = join(regularizer=foe.init_params((3, 16, 16), keyed_generator(0)))
        self.asked = self.oracle.on(Batch(range(5), [1.0] * 5))
        self.asked.hypergradient(self.theta, Accuracy(1e-2), Accuracy(1e-2))
        self.oracle.iteration_limit, self.oracle.hypergradient = limit, CGIFT(adjoint_limit)
        self.before, self.warm = self.oracle.cost, kept(self.oracle.solutions, range(5))
        self.seen.clear()

    def assert_charged(self, cost: Cost) -> None:
        """What was spent is what the components saw, and no warm start has changed."""
        assert {name: getattr(cost, name) for name in COUNTED} == {name: self.seen[name] for name in COUNTED}
        assert cost.computations > 0
        assert torch.equal(kept(self.oracle.solutions, range(5)), self.warm)


def test_a_trial_value_that_fails_is_charged() -> None:
    case = Prepared(limit=4)
    value = case.asked.value({name: one + 0.5 for name, one in case.theta.items()}, Accuracy(1e-9))
    assert value.value == float("inf")
    spent = case.oracle.cost - case.before
    case.assert_charged(spent)
    assert spent.values == 1 and spent.line_search == spent.lower_iterations == 3 * 4
    assert spent.slowest == 3 * 4, "the first chunk failed, and the second was not begun"


@pytest.mark.parametrize(("limit", "adjoint_limit"), [(4, 500), (2000, 1)])
def test_a_hypergradient_that_fails_is_charged(limit: int, adjoint_limit: int) -> None:
    case = Prepared(limit, adjoint_limit)
    with pytest.raises(NumericalError, match="limit"):
        case.asked.hypergradient(case.theta, Accuracy(1e-7), Accuracy(1e-9))
    spent = case.oracle.cost - case.before
    case.assert_charged(spent)
    assert spent.hypergradients == 1 and spent.slowest >= spent.computations
    assert spent.linear_iterations == case.seen["hessian_products"]
    assert case.oracle.interrupted == Cost()


@pytest.mark.parametrize("when", ["lower", "adjoint"])
def test_an_interrupted_call_is_charged_apart(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Prepared()
    if when == "lower":
        step = type(case.solver).step

        def stop(self: LowerSolver, lower: Lower, state: object) -> object:
            if case.seen["lower_iterations"] >= 20:
                raise Interrupted(signal.SIGINT)
            return step(self, lower, state)

        monkeypatch.setattr(type(case.solver), "step", stop)
    else:
        monkeypatch.setattr(Lower, "mixed", lambda *_: (_ for _ in ()).throw(Interrupted(signal.SIGINT)))
    with pytest.raises(Interrupted):
        case.asked.hypergradient(case.theta, Accuracy(1e-6), Accuracy(1e-6))
    assert case.oracle.cost == case.before, "it will be repeated"
    if when == "lower":
        # The iteration that the signal met is counted, as it had begun.
        case.seen["lower_iterations"] += 3
    case.assert_charged(case.oracle.interrupted)


FAILING = {
    "data": {"name": "dead-leaves", "count": 4, "size": 16},
    "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
    "validation": {"count": 0},
    "device": "cpu",
    "checkpoint": {"every": 0},
}


def test_steps_that_fail_use_up_the_budget() -> None:
    settings = FAILING | {
        "hypergradient": {"name": "cg-ift", "iteration_limit": 1},
        "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 1e-3, "adjoint_tol": 1e-9},
        "sampler": {"name": "epoch", "size": 2},
        "on_divergence": "skip-batch",
        "budget": {"computations": 150},
    }
    result = run(recipe_from_dict(settings))
    assert result.status == "budget spent" and result.steps == 0
    assert result.cost.computations >= 150


def test_interruptions_leave_the_ledger_of_a_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = FAILING | {
        # So long a first step that the first trial values fail.
        "upper_optimizer": {"name": "maid", "step": 30.0, "tol": 0.05},
        "iteration_limit": 100,
        "sampler": {"name": "full"},
        "budget": {"steps": 3},
    }
    whole = run(recipe_from_dict(settings), out=tmp_path / "whole")
    assert whole.as_dict()["interrupted_computations"] == 0
    stops, step = iter([20, 200, 3, 300, 400]), AGD.step
    left = [next(stops)]

    def stop(self: AGD, lower: Lower, state: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            left[0] = next(stops, 0)
            raise Interrupted(signal.SIGINT)
        return step(self, lower, state)

    monkeypatch.setattr(AGD, "step", stop)
    result = run_in_pieces(settings, tmp_path / "pieces")
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "pieces")]
    assert metrics[0] == metrics[1] and result.cost == whole.cost
    assert result.as_dict()["interrupted_computations"] == result.interrupted.lower_iterations > 0
    assert "will be repeated" in (tmp_path / "pieces" / "log.txt").read_text()


def run_in_pieces(settings: dict[str, object], path: Path) -> RunResult:
    """Start, and resume after every interruption; at least one."""
    for attempt in range(100):
        try:
            result = resume(path) if attempt else run(recipe_from_dict(settings), out=path)
        except Interrupted:
            continue
        assert attempt > 1
        return result
    raise AssertionError("no progress between interruptions")
