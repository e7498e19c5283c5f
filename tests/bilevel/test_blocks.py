"""Blocks of a finite sum: reproducible draws, and a ledger that charges one of n blocks as 1/n."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from bltoolbox.bilevel.blocks import BlockDraws
from bltoolbox.bilevel.records import Cost, Counter
from bltoolbox.bilevel.tally import Tally, merge
from bltoolbox.testing.finite_sum import SumTasks, quadratic_sum

THETA = {"theta": torch.zeros(5, dtype=torch.float64)}


def test_a_draw_depends_on_its_task_and_not_on_the_others() -> None:
    ids = torch.tensor([7, 3, 11])
    together = BlockDraws(5, 2, ids).blocks("x", 6, 20)
    assert together.shape == (20, 3)
    for place, task in enumerate(ids):
        alone = BlockDraws(5, 2, task.view(1)).blocks("x", 6, 20)
        assert torch.equal(alone[:, 0], together[:, place])
    reverse = BlockDraws(5, 2, ids.flip(0)).blocks("x", 6, 20)
    assert torch.equal(reverse, together.flip(1))


def test_seeds_calls_tasks_and_purposes_draw_independently() -> None:
    rows = [
        BlockDraws(seed, call, torch.tensor([task])).blocks(purpose, 10**6, 8)
        for seed in (0, 1)
        for call in (0, 1)
        for task in (0, 1)
        for purpose in ("x", "q")
    ]
    assert len(torch.cat(rows).unique()) > 8 * len(rows) - 3


def test_blocks_are_uniform() -> None:
    draws = BlockDraws(0, 0, torch.arange(40)).blocks("x", 4, 500)
    counts = torch.bincount(draws.flatten(), minlength=4).double()
    # χ² with three degrees of freedom exceeds 16.3 with probability 0.001.
    assert float(((counts - 5000).square() / 5000).sum()) < 16.3


def test_one_block_costs_its_share() -> None:
    counter = Counter()
    lower, _ = SumTasks(quadratic_sum(tasks=2, blocks=3)).at(THETA, counter).on([0, 1])
    x, j = lower.start(), torch.tensor([2, 0])
    block = lower.sampled(j)
    block.gradient(x)
    block.linearize(x).hvp(x)
    block.mixed(x, x, torch.ones(2, dtype=torch.float64))
    lower.gradient(x)
    cost = counter.collect()
    share = Fraction(2, 3)
    assert (cost.gradients, cost.hessian_products, cost.mixed_products) == (2 + share, share, share)
    assert cost.as_dict()["gradients"] == pytest.approx(8 / 3, rel=1e-15)
    assert counter.collect() == Cost(), "collected once"
    assert type(cost.hypergradients) is int, "it numbers the calls, from which draws follow"


def test_a_sum_of_one_block_is_itself() -> None:
    lower, upper = SumTasks(quadratic_sum(blocks=1, upper_blocks=1)).at(THETA, Counter()).on([0])
    assert lower.sampled(torch.tensor([0])) is lower and upper.sampled(torch.tensor([0])) is upper


def test_the_sum_of_all_blocks_is_whole_again() -> None:
    counter, total = Counter(), Cost()
    for _ in range(7):
        counter.part(7).gradients += 1
        total = total + counter.collect()
    assert total == Cost(gradients=1)
    assert json.dumps(total.as_dict()) == json.dumps(Cost(gradients=1).as_dict()), "an integer, not 1.0"


def test_a_ledger_is_packed_without_rounding() -> None:
    cost = Cost(lower_iterations=Fraction(10**9, 7), gradients=Fraction(5, 5), slowest=3)
    packed = json.loads(json.dumps(cost.pack()))
    assert packed["lower_iterations"] == "1000000000/7" and packed["gradients"] == 1
    assert Cost.unpack(packed) == cost
    assert Cost.unpack({"gradients": 4}) == Cost(gradients=4), "as earlier checkpoints have it"


@pytest.mark.parametrize("entry", [0.5, None, "1/0", "x", "1/3/4", [1], "9" * 400 + "/7"])
def test_a_ledger_with_anything_else_is_refused(entry: object) -> None:
    with pytest.raises(ValueError, match="neither an integer nor a fraction"):
        Cost.unpack({"gradients": entry})  # type: ignore[dict-item]


def test_tallies_of_ranks_add_up_exactly_in_any_order() -> None:
    costs = [Cost(gradients=Fraction(k, 7), linear_iterations=k) for k in (1, 3, 10)]
    tallies = [Tally(cost=cost).totals() for cost in costs]
    expected = Cost(gradients=2, linear_iterations=14)
    assert merge(tallies).cost == merge(tallies[::-1]).cost == expected


def test_a_longer_run_of_draws_begins_with_the_shorter() -> None:
    """The k-th block of a purpose does not depend on how many are drawn."""
    draws = [BlockDraws(3, 1, torch.tensor([4, 9])).blocks("x", 5, count) for count in (1, 4, 16)]
    for short, long in pairwise(draws):
        assert torch.equal(long[: len(short)], short)
