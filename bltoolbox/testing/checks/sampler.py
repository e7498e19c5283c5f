"""Properties of samplers. Expectations are taken over seeds, at each of the first steps.

A sampler that observes is given numbers that depend on the sample alone, orders of magnitude apart, after each draw.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Batch
from bltoolbox.bilevel.roles import Sampler
from bltoolbox.testing.checks.base import NotApplicable, Subject, Untouched, fail, holds, require, same
from bltoolbox.testing.checks.hidden_state import stateless

KIND = "sampler"
#: Numbers of training samples, of which the first that the sampler accepts is used.
SIZES = (6, 40, 150, 600)
SEEDS = 1500
STEPS = 3
#: Probability that a correct sampler fails "E[v] = 1", over all statistics together; the seeds are fixed.
FALSE_ALARM = 1e-7


def _start(sampler: Sampler, seed: int = 0) -> tuple[int, dict[str, Any]]:
    reason = ""
    for m in SIZES:
        try:
            return m, sampler.init(m, seed)
        except ValueError as error:
            reason = str(error)
    raise NotApplicable(
        f"it accepts none of {SIZES} training samples ({reason}); let example() return options for fewer samples"
    )


def _draw(sampler: Sampler, seed: int, steps: int) -> list[Batch]:
    _, state = _start(sampler, seed)
    batches = []
    for k in range(steps):
        batch, state = sampler.next(state)
        state = _observed(sampler, state, batch, k)
        batches.append(batch)
    return batches


def _observed(sampler: Sampler, state: dict[str, Any], batch: Batch, step: int) -> dict[str, Any]:
    """The state after a step that saw something of its batch: of some samples nothing at all, of others much."""
    if not sampler.offers("observe"):
        return state
    exponents = [(7 * i + 3 * step) % 5 - 2 for i in batch.ids]
    seen = torch.tensor([10.0**k if k > -2 else 0.0 for k in exponents], dtype=torch.float64)
    return sampler.observe(state, batch, {sampler.wants: seen})


@holds(KIND, "ids are valid and weights positive")
def valid(subject: Subject) -> None:
    sampler = subject()
    m, _ = _start(sampler)
    for seed in range(5):
        for k, batch in enumerate(_draw(sampler, seed, 10)):
            ids, weights = list(batch.ids), list(batch.weights)
            where = f"step {k} with seed {seed} of {m} samples"
            require(len(ids) == len(weights), f"{where}: {len(ids)} ids but {len(weights)} weights")
            good = all(isinstance(i, int) and 0 <= i < m for i in ids)
            hint = "convert a tensor with tolist()"
            require(good, f"{where}: ids must be integers in 0 … {m - 1}, got {ids}; {hint}")
            hint = "list it once, with the sum of its weights"
            require(len(set(ids)) == len(ids), f"{where}: an id occurs twice in {ids}; {hint}")
            fine = all(isinstance(w, float | int) and 0 < w < math.inf for w in weights)
            hint = "omit ids of weight 0"
            require(fine, f"{where}: weights must be positive numbers, got {weights}; {hint}")


@holds(KIND, "E[v_i] = 1 at each step")
def unbiased(subject: Subject) -> None:
    sampler = subject()
    m, _ = _start(sampler)
    v = torch.zeros(SEEDS, STEPS, m, dtype=torch.float64)
    for seed in range(SEEDS):
        for k, batch in enumerate(_draw(sampler, seed, STEPS)):
            v[seed, k, list(batch.ids)] = torch.tensor(list(batch.weights), dtype=torch.float64)
    # Each sample at each step, and their mean, whose variance is smaller and often zero.
    statistics = torch.cat([v, v.mean(2, keepdim=True)], dim=2)
    mean, slack = statistics.mean(0), _slack(statistics)
    excess = ((mean - 1).abs() - slack).flatten()
    worst = int(excess.argmax())
    k, i = divmod(worst, m + 1)
    if float(excess[worst]) > 0:
        who = f"v of sample {i}" if i < m else f"the mean of v over all {m} samples"
        fail(
            f"E[v] ≠ 1: over {SEEDS} seeds {who} at step {k} has the mean {float(mean[k, i]):.4f}, but chance allows"
            f" only 1 ± {float(slack[k, i]):.4f}; v_i must be 1/P(i is drawn), also for a short last batch and after an"
            " observation; P must be fixed before the draw"
        )


def _slack(samples: Tensor) -> Tensor:
    """Empirical Bernstein bound (Maurer & Pontil 2009) on |mean − E|, plus rounding errors."""
    count = len(samples)
    log = math.log(4 * samples[0].numel() / FALSE_ALARM)
    spread = samples.amax(0) - samples.amin(0)
    return (2 * samples.var(0) * log / count).sqrt() + 7 * spread * log / (3 * (count - 1)) + 1e-9


@holds(KIND, "same seed, same draws")
def deterministic(subject: Subject) -> None:
    first, second = ([_plain(batch) for batch in _draw(subject(), 3, 8)] for _ in range(2))
    message = "two samplers with the same seed drew different batches; use a generator keyed by the seed"
    require(same(first, second), message)


@holds(KIND, "the state survives saving, and draws continue as before")
def restorable(subject: Subject) -> None:
    sampler = subject()
    _, state = _start(sampler, 5)
    for k in range(3):
        batch, state = sampler.next(state)
        state = _observed(sampler, state, batch, k)
    restored = reload(state)
    for k in range(5):
        (batch, state), (again, restored) = sampler.next(state), subject().next(restored)
        state = _observed(sampler, state, batch, k)
        restored = _observed(subject(), restored, again, k)
        require(
            same(_plain(batch), _plain(again)),
            f"draw {k + 1} after its state was saved and loaded is {_plain(again)} instead of {_plain(batch)};"
            " whatever evolves must be in the state, not in self",
        )


@stateless(KIND)
def use(subject: Subject, sampler: Sampler, problem: int) -> Iterator[tuple[str, Any]]:
    _, state = _start(sampler, seed=problem)
    for k in range(5):
        batch, state = sampler.next(state)
        yield f"draw {k + 1}", _plain(batch)
        state = _observed(sampler, state, batch, k)


@holds(KIND, "next and observe leave their state untouched")
def untouched(subject: Subject) -> None:
    sampler = subject()
    _, state = _start(sampler, 2)
    for k in range(4):
        guard = Untouched(state=state)
        batch, after = sampler.next(state)
        guard.verify("next")
        guard = Untouched(state=after)
        state = _observed(sampler, after, batch, k)
        guard.verify("observe")


@holds(KIND, "observe takes what it wants, in the order of the batch")
def observes(subject: Subject) -> None:
    sampler = subject()
    if not sampler.offers("observe"):
        raise NotApplicable("it does not observe steps")
    choices = ("loss", "slope", "gradient")
    require(sampler.wants in choices, f"wants must be one of {', '.join(choices)}, but is {sampler.wants!r}")
    _, state = _start(sampler, 1)
    batch, state = sampler.next(state)
    order = list(range(len(batch.ids)))[::-1]
    flipped = Batch([batch.ids[k] for k in order], [batch.weights[k] for k in order])
    seen = torch.linspace(1, 2, len(order), dtype=torch.float64)
    guard = Untouched(seen=seen)
    informed = sampler.observe(state, batch, {sampler.wants: seen})
    guard.verify("observe")
    other = sampler.observe(state, flipped, {sampler.wants: seen[order]})
    draws = [_plain(sampler.next(after)[0]) for after in (informed, other)]
    require(
        same(*draws),
        "the same numbers for the same samples in another order lead to other draws; entry k is about batch.ids[k]",
    )


@holds(KIND, "full as declared")
def full(subject: Subject) -> None:
    sampler = subject()
    if not subject.cls.full:
        raise NotApplicable("it declares full = False")
    m, _ = _start(sampler)
    for batch in _draw(sampler, 0, 3):
        complete = sorted(batch.ids) == list(range(m)) and all(w == 1 for w in batch.weights)
        require(complete, f"it declares full = True, but for {m} samples a batch is {_plain(batch)}")


def reload(state: Any) -> Any:
    """The state after ``torch.save`` and loading, as in a checkpoint: only plain numbers and tensors are allowed."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    except Exception as error:
        fail(
            f"the state cannot be saved and loaded again ({type(error).__name__}); use only numbers, text and tensors,"
            " and lists and dicts of them"
        )


def _plain(batch: Batch) -> list[list[Any]]:
    return [list(batch.ids), list(batch.weights)]
