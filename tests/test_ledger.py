"""The ledger is exact: every count equals what instrumented components saw."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers import kept, small_foe
from torch import Tensor

from blt_hypergradients.cg_ift import CGIFT
from blt_regularizers.foe import FieldOfExperts
from blt_solvers.agd import AGD
from blt_solvers.mm import MemoryGradient
from bltoolbox import run
from bltoolbox.interfaces import LowerSolver, Theta
from bltoolbox.problem import LowerLevel, join
from bltoolbox.recipe import recipe_from_dict
from bltoolbox.results import Batch
from bltoolbox.tensors import keyed_generator
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
        def step(self, lower: LowerLevel, state: object) -> object:
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
    theta = join(regularizer=foe.init_params(3, keyed_generator(0)))
    asked = oracle.on(Batch(range(5), [1.0] * 5))
    asked.hypergradient(theta, 1e-3, 1e-3)
    asked.hypergradient(theta, 1e-5, 1e-4, bound=True)
    asked.value({name: value + 0.01 for name, value in theta.items()}, 1e-3)
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


def test_a_call_that_fails_costs_nothing() -> None:
    foe = small_foe()
    oracle = make_oracle(smooth_images(2, (3, 9, 10)), foe, AGD(), CGIFT())
    theta = join(regularizer=foe.init_params(3, keyed_generator(0)))
    asked = oracle.on(Batch(range(2), [1.0, 1.0]))
    asked.hypergradient(theta, 1e-2, 1e-2)
    before, warm = oracle.cost, kept(oracle.solutions, range(2))
    broken = {name: torch.full_like(value, torch.nan) for name, value in theta.items()}
    with pytest.raises(Exception, match="NaN or Inf"):
        asked.hypergradient(broken, 1e-2, 1e-2)
    assert oracle.cost == before
    assert torch.equal(kept(oracle.solutions, range(2)), warm)
