"""Properties of noise: what is drawn, from which generator, and with which mean and variance.

Statistics use fixed seeds and allow six standard errors, so that a correct noise never fails by chance: a component
that passes once always passes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.restoration.roles import Noise
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    Untouched,
    holds,
    require,
    require_like,
    require_shape,
    same,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.problems import smooth_images

KIND = "noise"
SHAPES = ((3, 12, 14), (1, 5, 4), (2, 1, 7))
#: Values of t at which statistics are taken, and the measurements and draws at each.
VALUES = (0.05, 0.3, 0.6, 0.95)
MEASUREMENTS, SIDE = 64, 25
DRAWS = MEASUREMENTS * SIDE**2
#: In standard errors.
ALLOWED = 6.0


def exact(shape: tuple[int, ...]) -> Tensor:
    """What is measured: positive, as counts need it, and of every brightness."""
    return smooth_images(1, shape)[0].double().clamp_min(0.02)


def drawn(noise: Noise, t: Tensor, seed: int = 0) -> Tensor:
    return noise.sample(t, keyed_generator("noise", "check", seed))


@holds(KIND, "a measurement has the shape of t, in float64")
def shape_and_dtype(subject: Subject) -> None:
    noise = subject()
    for shape in SHAPES:
        t = exact(shape)
        y = drawn(noise, t)
        require_like(y, t, f"sample of t of shape {shape} in float64")
        require(bool(torch.isfinite(y).all()), f"sample of t of shape {shape} is not finite")


@holds(KIND, "only the generator is random")
def generator_only(subject: Subject) -> None:
    t = exact(SHAPES[0])
    before = _global_states()
    first = drawn(subject(), t)
    touched = not same(before, _global_states())
    require(not touched, "sample used a global generator; draw only from the generator it is given")
    require(
        same(first, drawn(subject(), t)),
        "sample with equal generators differed between two components built alike; draw only from the generator it is"
        " given",
    )
    if not same(first, t):
        require(
            not same(first, drawn(subject(), t, seed=1)),
            "sample was the same with another generator; draw from the generator it is given",
        )


@stateless(KIND)
def use(subject: Subject, noise: Noise, problem: int) -> Iterator[tuple[str, Any]]:
    t = exact(SHAPES[problem])
    for seed in range(2):
        yield "sample", drawn(noise, t, seed)
        yield "mean", noise.mean(t)
        yield "variance", noise.variance(t)


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    noise, t = subject(), exact(SHAPES[0])
    calls = {"sample": lambda: drawn(noise, t), "mean": lambda: noise.mean(t)}
    calls["variance"] = lambda: noise.variance(t)
    for name, call in calls.items():
        guard = Untouched(t=t)
        call()
        guard.verify(name)


@holds(KIND, "level is the standard deviation")
def level(subject: Subject) -> None:
    noise = subject()
    if noise.level is None:
        raise NotApplicable("it has no level")
    require(
        isinstance(noise.level, float) and 0 <= noise.level < float("inf"),
        f"level must be a finite number of at least 0, or None, got {noise.level!r}",
    )
    for value in VALUES:
        draws = _draws(noise, value)
        what = f"the standard deviation at t = {value:g}"
        _require_variance(draws, noise.level**2, f"{what} squared", "level claims it for every t")


@holds(KIND, "mean is that of many measurements")
def mean(subject: Subject) -> None:
    noise = subject()
    for value, claimed in _claims(noise, "mean"):
        measured, error = _mean(_draws(noise, value))
        require(
            abs(measured - claimed) <= ALLOWED * error + 1e-12,
            f"the mean at t = {value:g}: expected {claimed:.6g}, got {measured:.6g} ± {error:.1g} in {DRAWS} draws;"
            " the formula and the sample do not belong together",
        )


@holds(KIND, "variance is that of many measurements")
def variance(subject: Subject) -> None:
    noise = subject()
    for value, claimed in _claims(noise, "variance"):
        what = f"the variance at t = {value:g}"
        _require_variance(
            _draws(noise, value), claimed, what, "the formula and the sample do not belong together"
        )


def _global_states() -> list[Any]:
    """Of the generators that a component must not use."""
    numpy = np.random.get_state(legacy=False)["state"]
    return [torch.get_rng_state(), random.getstate(), numpy["key"].tolist(), numpy["pos"]]


def _claims(noise: Noise, name: str) -> list[tuple[float, float]]:
    """What a closed form says at each of VALUES."""
    t = torch.tensor(VALUES, dtype=torch.float64).view(1, 1, -1)
    claim = getattr(noise, name)(t)
    if claim is None:
        raise NotApplicable(f"it knows no {name}")
    require_shape(claim, t.shape, f"{name} of t of shape {tuple(t.shape)}")
    return list(zip(VALUES, claim.double().flatten().tolist(), strict=True))


def _draws(noise: Noise, value: float) -> Tensor:
    """Independent measurements of a constant, one per row; the entries of one may depend on each other."""
    t = torch.full((1, SIDE, SIDE), value, dtype=torch.float64)
    return torch.stack([drawn(noise, t, seed=2 + k).flatten() for k in range(MEASUREMENTS)])


def _mean(values: Tensor) -> tuple[float, float]:
    """The mean of all entries and its standard error, from the spread of the rows."""
    rows = values.mean(1)
    return float(rows.mean()), float(rows.std()) / len(rows) ** 0.5


def _require_variance(draws: Tensor, claimed: float, what: str, cause: str) -> None:
    """The variance of draws, within the error that the spread of the measurements shows."""
    centre, offset = _mean(draws)
    measured, error = _mean((draws - centre).square())
    # The mean of the draws is not that of the noise, which counts where the squares do not vary at all.
    shift = (ALLOWED * offset) ** 2
    require(
        abs(measured - claimed) <= ALLOWED * error + shift + 1e-12,
        f"{what}: expected {claimed:.6g}, got {measured:.6g} ± {error:.1g} in {DRAWS} draws; {cause}",
    )
