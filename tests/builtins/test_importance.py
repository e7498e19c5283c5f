"""Importance sampling: moments by enumeration, probabilities that follow what was seen."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from blt_builtins.samplers.importance import Importance, batch_of
from bltoolbox.bilevel.records import Batch
from bltoolbox.testing.checks.sampler import reload

M = 4


def state_with(sampler: Importance, scores: list[float | None], seed: int = 0) -> dict[str, Any]:
    """After the samples with a score were seen."""
    state = sampler.init(len(scores), seed)
    known = [(i, score) for i, score in enumerate(scores) if score is not None]
    seen = torch.tensor([score for _, score in known], dtype=torch.float64)
    return sampler.observe(state, Batch([i for i, _ in known], [1.0] * len(known)), {sampler.wants: seen})


SCORES: list[list[float | None]] = [
    [1.0, 1.0, 1.0, 1.0],
    [5.0, 0.1, 0.0, 2.0],
    [1e9, 1e-9, 3.0, 0.0],
    [0.0, 0.0, 0.0, 0.0],
    [None, 4.0, None, 1.0],
    [None, None, None, None],
]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("mix", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_moments_of_the_weights_by_enumeration(size: int, mix: float, scores: list[float | None]) -> None:
    """Over all sequences of draws: E[v_i] = 1 and E[v_i²] = 1 − 1/S + 1/(S p_i)."""
    sampler = Importance(size, mix=mix)
    p = sampler.probabilities(state_with(sampler, scores))
    first, second = torch.zeros(M, dtype=torch.float64), torch.zeros(M, dtype=torch.float64)
    for drawn in product(range(M), repeat=size):
        chance = math.prod(float(p[i]) for i in drawn)
        v = torch.zeros(M, dtype=torch.float64)
        batch = batch_of(drawn, p)
        v[list(batch.ids)] = torch.tensor(list(batch.weights), dtype=torch.float64)
        first += chance * v
        second += chance * v.square()
    torch.testing.assert_close(first, torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(second, 1 - 1 / size + 1 / (size * p))
    assert (second <= 1 - 1 / size + M / (size * mix) + 1e-9).all()


@pytest.mark.parametrize("scores", SCORES)
def test_draws_have_these_probabilities(scores: list[float | None]) -> None:
    sampler, count = Importance(1, mix=0.2), 4000
    counts: Counter[int] = Counter()
    for seed in range(count):
        state = state_with(sampler, scores, seed)
        batch, _ = sampler.next(state)
        counts.update(batch.ids)
        p = sampler.probabilities(state)
        assert batch.weights == [1 / float(p[i]) for i in batch.ids]
    for i in range(M):
        expected = count * float(p[i])
        assert abs(counts[i] - expected) < 5 * (expected * (1 - float(p[i]))) ** 0.5 + 1


def test_probabilities_follow_what_was_seen() -> None:
    sampler = Importance(2, mix=0.4)
    p = sampler.probabilities(state_with(sampler, [3.0, 1.0, None, 0.0]))
    # Of the third nothing is known: it counts as the mean of the others, 4/3.
    scores = torch.tensor([3.0, 1.0, 4 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(p, 0.6 * scores / scores.sum() + 0.1)
    assert float(p.sum()) == pytest.approx(1)


def test_only_the_last_number_counts_and_its_sign_does_not() -> None:
    sampler = Importance(2)
    state = state_with(sampler, [3.0, 1.0, 2.0, 5.0])
    again = sampler.observe(state, Batch([2, 0], [1.0, 1.0]), {"loss": torch.tensor([-7.0, 4.0]).double()})
    assert again["scores"].tolist() == [4.0, 1.0, 7.0, 5.0]
    assert state["scores"].tolist() == [3.0, 1.0, 2.0, 5.0]


def test_nothing_seen_is_uniform_sampling() -> None:
    sampler = Importance(3)
    p = sampler.probabilities(sampler.init(M, 0))
    assert p.tolist() == [0.25] * M


@pytest.mark.parametrize("by", ["loss", "slope", "gradient"])
def test_it_wants_what_it_goes_by(by: Any) -> None:
    assert Importance(by=by).wants == by


def test_a_state_can_be_saved_and_continues() -> None:
    sampler = Importance(3)
    state = sampler.init(9, 5)
    restored = None
    for k in range(12):
        if k == 5:
            restored = reload(state)
        batch, state = sampler.next(state)
        seen: dict[str, Tensor] = {
            "loss": torch.tensor([float(i * k) for i in batch.ids], dtype=torch.float64)
        }
        state = sampler.observe(state, batch, seen)
        if restored is not None:
            again, restored = Importance(3).next(restored)
            assert again == batch
            restored = Importance(3).observe(restored, again, seen)


def test_the_variance_is_least_where_probabilities_follow_the_gradients() -> None:
    """E‖z − ∇f‖² of one draw, enumerated: lower than uniform, and least of all for λ → 0."""
    z = torch.tensor([[4.0, 0.0], [0.0, 0.3], [0.2, 0.2], [-0.5, 0.1]], dtype=torch.float64)
    mean = z.mean(0)

    def variance(mix: float) -> float:
        sampler = Importance(1, by="gradient", mix=mix)
        p = sampler.probabilities(state_with(sampler, z.norm(dim=1).tolist()))
        return float((p * (z / (M * p.view(-1, 1)) - mean).square().sum(1)).sum())

    assert variance(0.01) < variance(0.5) < variance(1.0)
