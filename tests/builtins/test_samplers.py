"""Samplers: unbiased weights with the second moments of theory, coverage, and states that can be saved anywhere."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations

import pytest
import torch

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.samplers.epoch import Epoch
from blt_builtins.samplers.full import Full
from blt_builtins.samplers.independent import Independent
from blt_builtins.samplers.nice import Nice
from blt_builtins.upper_optimizers.isgd import ISGD
from bltoolbox.bilevel.records import Accuracy, Batch
from bltoolbox.bilevel.roles import Sampler
from bltoolbox.testing import Tikhonov, make_oracle, smooth_images

M = 5
SAMPLERS: dict[str, Sampler] = {
    "epoch": Epoch(2),
    "epoch-whole": Epoch(M),
    "nice": Nice(2),
    "independent": Independent(1.5),
    "full": Full(),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def draws(sampler: Sampler, m: int = M, seed: int = 0) -> Iterator[Batch]:
    state = sampler.init(m, seed)
    while True:
        batch, state = sampler.next(state)
        yield batch


def weights(batch: Batch, m: int = M) -> torch.Tensor:
    v = torch.zeros(m, dtype=torch.float64)
    for i, weight in zip(batch.ids, batch.weights, strict=True):
        v[i] += weight
    return v


@pytest.mark.parametrize(
    ("name", "second"), [("nice", M / 2), ("independent", M / 1.5), ("full", 1.0), ("epoch-whole", 1.0)]
)
def test_moments_of_the_weights(name: str, second: float) -> None:
    """E[v_i] = 1 and E[v_i²] = 1/P(i in the batch)."""
    count = 4000
    v = torch.stack([weights(batch) for batch in islice(draws(SAMPLERS[name]), count)])
    # Five standard errors of the known law: a correct sampler fails once in 10⁶ seeds.
    assert (v.mean(0) - 1).abs().max() <= 5 * ((second - 1) / count) ** 0.5
    # v_i is 0 or one value w, so that E[v_i²] = w E[v_i] = w.
    torch.testing.assert_close(v[v > 0], torch.full_like(v[v > 0], second))


def test_nice_takes_every_subset_equally_often() -> None:
    count = 4000
    seen = Counter(frozenset(batch.ids) for batch in islice(draws(SAMPLERS["nice"]), count))
    assert len(seen) == 10  # 5 over 2
    expected = count / 10
    chi_squared = sum((number - expected) ** 2 / expected for number in seen.values())
    assert chi_squared < 40  # 9 degrees of freedom: exceeded once in 10⁵ seeds


def test_independent_takes_every_subset_with_its_probability() -> None:
    count, p = 4000, 1.5 / 3
    seen = Counter(frozenset(batch.ids) for batch in islice(draws(Independent(1.5), 3), count))
    assert len(seen) == 8  # every subset of three, the empty one too
    for subset, number in seen.items():
        expected = count * p ** len(subset) * (1 - p) ** (3 - len(subset))
        assert abs(number - expected) < 5 * expected**0.5


@pytest.mark.parametrize("position", [0, 1, 2])
def test_epoch_is_unbiased_at_each_of_its_steps_by_enumeration(position: int) -> None:
    """Over all orders of 5 samples in batches of 2: E[v_i] = 1 and E[v_i²] = m/|batch|, the short last one too."""
    size = min(2, M - 2 * position)
    v = torch.stack(
        [
            weights(Batch(order[2 * position : 2 * position + size], [M / size] * size))
            for order in permutations(range(M))
        ]
    )
    torch.testing.assert_close(v.mean(0), torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(v.square().mean(0), torch.full((M,), M / size, dtype=torch.float64))
    # ... and these are the weights that the sampler gives.
    batch = next(islice(draws(SAMPLERS["epoch"]), position, None))
    assert batch.weights == [M / size] * size


def test_epoch_orders_are_uniform() -> None:
    """Every sample is equally likely at every place of an epoch."""
    count = 2000
    sampler, places = Epoch(1), torch.zeros(M, M)
    for k, batch in enumerate(islice(draws(sampler), count * M)):
        places[k % M, batch.ids[0]] += 1
    assert (places - count / M).abs().max() < 5 * (count / M * (1 - 1 / M)) ** 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_an_epoch_holds_every_sample_exactly_once(size: int) -> None:
    steps = -(-M // size)
    source = draws(Epoch(size))
    orders = []
    for _ in range(4):
        batches = list(islice(source, steps))
        ids = [i for batch in batches for i in batch.ids]
        assert sorted(ids) == list(range(M))
        assert all(len(batch.ids) == size for batch in batches[:-1])
        orders.append(tuple(ids))
    assert len(set(orders)) > 1, "a new order each epoch"


@every_sampler
def test_a_batch_names_each_sample_once_with_a_positive_weight(name: str) -> None:
    for batch in islice(draws(SAMPLERS[name]), 50):
        assert len(batch.ids) == len(batch.weights) == len(set(batch.ids))
        assert all(0 <= i < M and isinstance(i, int) for i in batch.ids)
        assert all(weight > 0 for weight in batch.weights)


@every_sampler
def test_same_seed_same_draws_and_another_seed_others(name: str) -> None:
    first, again, other = (
        [(list(b.ids), list(b.weights)) for b in islice(draws(SAMPLERS[name], seed=seed), 30)]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert name == "full" or first != other


@every_sampler
def test_draws_do_not_depend_on_the_global_generator(name: str) -> None:
    torch.manual_seed(0)
    first = [list(b.ids) for b in islice(draws(SAMPLERS[name]), 10)]
    torch.manual_seed(1)
    assert first == [list(b.ids) for b in islice(draws(SAMPLERS[name]), 10)]


@every_sampler
def test_a_saved_state_continues_the_same_draws_from_anywhere(name: str) -> None:
    sampler = SAMPLERS[name]
    state = sampler.init(M, 7)
    expected = [list(b.ids) for b in islice(draws(sampler, seed=7), 20)]
    for k in range(8):
        restored = json.loads(json.dumps(state))  # plain numbers, so that any file format can hold them
        kept = copy.deepcopy(state)
        found = []
        for _ in range(20 - k):
            batch, restored = type(sampler).next(sampler, restored)
            found.append(list(batch.ids))
        assert found == expected[k:]
        _, following = sampler.next(state)
        assert state == kept, "a state is returned, never changed"
        state = following


@pytest.mark.parametrize("sampler", [Epoch(6), Nice(6), Independent(6.0)])
def test_a_batch_larger_than_the_data_is_refused(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="6 is larger than the 5 training samples"):
        sampler.init(M, 0)


def test_an_empty_draw_is_a_zero_step() -> None:
    sampler = Independent(0.3)
    empty = next(batch for batch in draws(sampler) if not batch.ids)
    prior = Tikhonov()
    oracle = make_oracle(smooth_images(M), prior, AGD(), CGIFT())
    theta = {"regularizer.log_weight": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}
    optimizer = ISGD(step=1.0)
    step = optimizer.step(theta, oracle.on(empty), optimizer.init(theta))
    assert torch.equal(step.theta["regularizer.log_weight"], theta["regularizer.log_weight"])
    assert step.state["k"] == 1
    assert oracle.cost.computations == 0


def test_sampled_hypergradients_average_to_the_full_one() -> None:
    oracle = make_oracle(smooth_images(4), Tikhonov(), AGD(), CGIFT(), noise=0.3)
    theta = {"regularizer.log_weight": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}
    full = (
        oracle.on(Batch(range(4), [1.0] * 4)).hypergradient(theta, Accuracy(1e-10), Accuracy(1e-10)).gradient
    )
    pairs = [Batch([i, j], [2.0, 2.0]) for i in range(4) for j in range(i)]  # all subsets that nice may draw
    mean = sum(
        oracle.on(pair)
        .hypergradient(theta, Accuracy(1e-10), Accuracy(1e-10))
        .gradient["regularizer.log_weight"]
        for pair in pairs
    ) / len(pairs)
    torch.testing.assert_close(mean, full["regularizer.log_weight"], rtol=1e-8, atol=1e-10)
