"""Losses that need no true images: what they estimate, how they split measurements, and what they refuse."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_models import noisy_picture, toy_model

from blt_builtins.data_terms.huber import Huber
from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.inpainting import Inpainting
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.upper_losses.recorrupted import Recorrupted
from blt_builtins.upper_losses.whiteness import Whiteness
from bltoolbox import resume, run
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import RecipeError
from bltoolbox.plugin import Operator, Upper
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.image_upper import BoundOperator
from bltoolbox.restoration.model import read_theta
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import Sample
from bltoolbox.restoration.tiles import Restorer
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import Gain, Images, smooth_images, variational
from bltoolbox.testing.problems import Tikhonov
from bltoolbox.training.assemble import assemble

SHAPE = (2, 8, 9)
SIGMA = 0.1


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=keyed_generator("draw", seed))


# Recorrupted


@pytest.mark.parametrize("log_gain", [0.0, -0.5])
@pytest.mark.parametrize("alpha", [0.3, 1.0, 2.0])
def test_the_mean_of_the_loss_is_the_error_and_a_constant(alpha: float, log_gain: float) -> None:
    """On a problem with a closed form, x̂(y₁) = a y₁/(a² + w) for A = a."""
    draws, weight, scale = 4000, 0.5, 3.0
    gain, loss = math.exp(log_gain), Recorrupted(alpha, scale=scale)
    truth = smooth_images(1, SHAPE).double()
    y = gain * truth + SIGMA * normal(draws, *SHAPE)
    split = [loss.split(one, SIGMA, keyed_generator("split", k)) for k, one in enumerate(y)]
    y1, y2 = (torch.stack([pair[k] for pair in split]) for k in (0, 1))  # type: ignore[misc]
    problem = replace(variational(Gain(log_gain=log_gain), Tikhonov(weight)), upper_loss=loss)
    theta = {"regularizer.log_weight": torch.full((SHAPE[0],), math.log(weight), dtype=torch.float64)}
    lower = problem.at(theta, SHAPE).on(y1)
    x = gain * y1 / (gain**2 + weight)
    assert float(lower.residual(x).max()) < 1e-12
    value = loss.bind(Sample(range(draws), y1, None, y2), BoundOperator(lower)).value(x)
    error = (gain * (x - truth)).square().flatten(1).sum(1)
    constant = truth.numel() * SIGMA**2 * (1 + 1 / alpha**2)
    excess = value / scale - error - constant
    assert abs(float(excess.mean())) <= 5 * float(excess.std()) / draws**0.5
    # The test would notice one percent of the constant.
    assert 5 * float(excess.std()) / draws**0.5 < 0.05 * constant


def test_the_two_noises_are_independent_and_of_the_levels_given() -> None:
    loss, y = Recorrupted(0.5), SIGMA * normal(40, 50, 50)
    split = [loss.split(one, SIGMA, keyed_generator("split", k)) for k, one in enumerate(y)]
    y1, y2 = (torch.stack([pair[k] for pair in split]).flatten() for k in (0, 1))  # type: ignore[misc]
    count = y1.numel()
    for part, level in ((y1, loss.noise_gain), (y2, math.sqrt(1 + 1 / 0.25))):
        assert float(part.std()) / SIGMA == pytest.approx(level, rel=5 / math.sqrt(2 * count))
    correlation = float((y1 * y2).mean() / (y1.std() * y2.std()))
    assert abs(correlation) <= 5 / math.sqrt(count)


def samples_of(loss: Any, operator: Operator | None = None, **options: Any) -> Samples:
    return Samples(
        Images(smooth_images(5, SHAPE)),
        operator or Identity(),
        Gaussian(SIGMA),
        loss=loss,
        dtype=torch.float64,
        **options,
    )


def test_only_training_is_split() -> None:
    loss = Recorrupted(0.5)
    plain = samples_of(loss).batch(range(5))
    assert plain.target is None
    assert torch.equal(plain.y, samples_of(None).batch(range(5)).y)
    train = samples_of(loss, training=True).batch(range(5))
    assert train.target is not None
    # y = (y₁ + α² y₂)/(1 + α²)
    torch.testing.assert_close((train.y + 0.25 * train.target) / 1.25, plain.y, rtol=0, atol=1e-14)
    assert not bool(((train.y - plain.y).abs() < 1e-12).any())


def test_the_split_of_a_sample_depends_on_its_id_alone() -> None:
    loss = Recorrupted(0.5)
    expected = samples_of(loss, training=True).batch(range(5))
    assert expected.target is not None
    for order, workers in itertools.product(([3], [4, 0, 2]), (0, 2)):
        found = samples_of(loss, training=True, workers=workers).batch(order)
        assert found.target is not None
        assert torch.equal(found.y, expected.y[order]) and torch.equal(found.target, expected.target[order])
    held_out = samples_of(loss, ids=[1, 4])
    other = held_out.as_in_training
    assert other is held_out.as_in_training and other.as_in_training is other
    assert torch.equal(other.batch([0, 1]).y, expected.y[[1, 4]])
    assert held_out.batch([0, 1]).target is None
    assert samples_of(Whiteness()).as_in_training.batch([0]).target is None


def test_what_is_not_measured_is_not_split() -> None:
    operator, loss = Inpainting(missing=0.4), Recorrupted(0.5)
    sample = samples_of(loss, operator, training=True).batch(range(5))
    mask = (operator.measured(sample.y, {}) != 0).expand_as(sample.y)
    assert sample.target is not None
    for part in (sample.y, sample.target):
        assert not bool(part[~mask].any())
        assert bool((part[mask] != 0).all())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"noise": "poisson"},
            "recorrupted: the noise of the measurements has no known level; give it as sigma",
        ),
        ({"noise": 0}, "recorrupted: the measurements have no noise; use another loss, or give noise"),
        (
            {"noise": 0, "upper_loss": "whiteness"},
            "whiteness: the measurements have no noise that could be white",
        ),
    ],
)
def test_measurements_that_a_loss_cannot_use_are_refused(settings: dict[str, Any], sentence: str) -> None:
    recipe = {
        "data": {"name": "dead-leaves", "count": 4, "size": 16},
        "regularizer": "tv",
        "upper_loss": "recorrupted",
        "sampler": "full",
        "validation": {"count": 0},
        "budget": {"steps": 1},
    }
    with pytest.raises(RecipeError) as caught:
        assemble(recipe_from_dict(recipe | settings))
    assert f"upper_loss: {sentence}" in str(caught.value)
    known = {"upper_loss": {"name": "recorrupted", "sigma": 0.05}}
    assemble(recipe_from_dict(recipe | settings | known))


def test_samples_that_were_not_split_are_refused() -> None:
    problem = replace(variational(Gain(), Tikhonov()), upper_loss=Recorrupted())
    theta = {"regularizer.log_weight": torch.zeros(2, dtype=torch.float64)}
    lower = problem.at(theta, SHAPE).on(normal(1, *SHAPE))
    with pytest.raises(ValueError, match="compares with measurements that it has split, and these are whole"):
        problem.upper_loss.bind(Sample([0], lower.y, None), BoundOperator(lower))


def test_restoring_carries_the_regularizer_back_to_the_noise_of_the_measurements() -> None:
    loss = Recorrupted(0.75)
    parts = Identity(), TotalVariation()
    problem = Variational(*parts, LeastSquares(), loss)
    restoring = problem.restoring
    assert isinstance(restoring.regularizer, Rescaled)
    assert restoring.regularizer.scale == pytest.approx(0.8)
    assert restoring is problem.restoring
    for other in (
        Variational(*parts, Huber(), loss),
        Variational(*parts, LeastSquares(), Whiteness()),
    ):
        assert other.restoring is other
    theta = {f"regularizer.log_{name}": torch.full((1,), -2.0) for name in ("weight", "smoothing")}
    theta = {name: value.double() for name, value in theta.items()}
    y = smooth_images(1, SHAPE).double() + 0.1 * normal(1, *SHAPE)
    # x̂ scales along: what is restored from y at the lower level is 0.8 times what is restored from y/0.8 as trained.
    scaled, trained = (
        solve(NewtonCG(), lower, lower.start(), 1e-10, limit=100).x
        for lower in (restoring.at(theta, SHAPE).on(y), problem.at(theta, SHAPE).on(y / 0.8))
    )
    torch.testing.assert_close(scaled, 0.8 * trained, rtol=0, atol=1e-8)


def test_models_restore_measurements_as_they_are() -> None:
    """`Model.solve` and pictures of any size alike, also at another noise level."""
    settings = {"regularizer": {"name": "tv", "weight": 0.2}, "dtype": "float64"}
    settings |= {"color": "gray", "noise": 0.1, "upper_loss": {"name": "recorrupted", "alpha": 0.75}}
    model, plain = toy_model(**settings), toy_model(**settings | {"upper_loss": "squared-error"})
    image = noisy_picture(24, 20, 1).astype(np.float64)
    y = torch.from_numpy(image).permute(2, 0, 1)
    for noise, scale in ((None, 0.8), (0.1, 0.8), (0.05, 0.4)):
        rescaled = replace(plain.problem, regularizer=Rescaled(plain.problem.regularizer, scale))
        expected = replace(plain, problem=rescaled).solve(y, 1e-6).permute(1, 2, 0).numpy()
        found, _ = Restorer(model, tol=1e-8).run(image, noise)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        if noise is None:
            np.testing.assert_allclose(model.solve(y, 1e-6).permute(1, 2, 0).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("loss", [{"name": "recorrupted", "alpha": 0.5}, "whiteness"], ids=str)
def test_a_resumed_run_is_the_same_run(loss: Any, tmp_path: Path) -> None:
    def start(steps: int) -> dict[str, Any]:
        return {
            "data": {"name": "dead-leaves", "count": 6, "size": 16},
            "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
            "lower_solver": "mm",
            "upper_loss": loss,
            "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 0.1},
            "sampler": {"size": 2},
            "validation": {"count": 2, "checks": 2, "metric": "loss"},
            "budget": {"steps": steps},
            "checkpoint": {"keep_finished": True},
        }

    run(recipe_from_dict(start(4)), out=tmp_path / "whole")
    run(recipe_from_dict(start(2)), out=tmp_path / "part")
    resume(tmp_path / "part", ["budget.steps=4"])
    one, other = (
        read_theta(tmp_path / name / "checkpoints" / "last.safetensors")[0] for name in ("whole", "part")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())


# Whiteness


def whiteness(y: Tensor, operator: Operator | None = None, shape: tuple[int, ...] | None = None) -> Upper:
    problem = replace(variational(operator or Gain(), Tikhonov()), upper_loss=Whiteness())
    shape = shape or tuple(y.shape[1:])
    theta = {"regularizer.log_weight": torch.zeros(shape[0], dtype=torch.float64)}
    lower = problem.at(theta, shape).on(y)
    return problem.upper_loss.bind(Sample(range(len(y)), y, None), BoundOperator(lower))


def test_the_value_is_the_sum_of_squared_correlations() -> None:
    r = normal(2, *SHAPE)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    energy = r.square().sum((2, 3))
    for lag in itertools.product(range(8), range(9)):
        if lag != (0, 0):
            expected += ((r * r.roll(lag, (2, 3))).sum((2, 3)) / energy).square()
    torch.testing.assert_close(whiteness(torch.zeros_like(r)).value(r), expected.mean(1))


def test_the_gradient_is_that_of_the_value() -> None:
    x, y = normal(2, *SHAPE, seed=1), normal(2, *SHAPE, seed=2)
    upper = whiteness(y)
    torch.testing.assert_close(upper.gradient(x), Upper.gradient(upper, x), rtol=1e-10, atol=1e-12)
    v = normal(2, *SHAPE, seed=3)
    difference = (upper.value(x + 1e-5 * v) - upper.value(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close((upper.gradient(x) * v).flatten(1).sum(1), difference, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("side", "expected"), [((8, 10), 1.0), ((7, 9), 62 / 65)])
def test_white_noise_has_a_value_of_about_one(side: tuple[int, int], expected: float) -> None:
    """Exactly (N − 1)/(N + 2) where both sides are odd, and 1 where both are even."""
    draws = 4000
    values = whiteness(torch.zeros(draws, 1, *side, dtype=torch.float64)).value(normal(draws, 1, *side))
    error = float(values.std()) / draws**0.5
    assert abs(float(values.mean()) - expected) <= 5 * error
    assert error < 0.01


def test_the_size_of_the_residual_does_not_count() -> None:
    r = normal(2, *SHAPE)
    upper = whiteness(torch.zeros_like(r))
    for factor in (1e-3, -1.0, 1e4):
        torch.testing.assert_close(upper.value(factor * r), upper.value(r))
        torch.testing.assert_close(factor * upper.gradient(factor * r), upper.gradient(r))
    along = (upper.gradient(r) * r).flatten(1).sum(1)
    torch.testing.assert_close(along, torch.zeros_like(along), rtol=0, atol=1e-12)


def test_extreme_residuals() -> None:
    flat = torch.zeros(1, *SHAPE, dtype=torch.float64)
    upper, count = whiteness(flat), SHAPE[1] * SHAPE[2]
    point = flat.clone()
    point[..., 3, 4] = 2.0
    values = [float(upper.value(x)) for x in (point, flat + 0.3, flat)]
    assert values == pytest.approx([0.0, count - 1, count - 1], abs=1e-9)
    assert torch.equal(upper.gradient(flat), flat)


def test_what_is_left_of_the_image_is_seen() -> None:
    noise, image = 0.1 * normal(3, *SHAPE), smooth_images(3, SHAPE).double()
    upper = whiteness(torch.zeros_like(noise))
    assert bool((upper.value(noise + 0.2 * image) > upper.value(noise) + 1).all())
