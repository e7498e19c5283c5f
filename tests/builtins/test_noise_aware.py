"""Potentials that know the noise level: the estimate, rescaling without tables, bounds, noise of many levels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import hessian, normal, slope, small_foe
from torch import Tensor
from toy_models import noisy_picture, toy_model

from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.noises.gaussian_range import GaussianRange
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.adaptive import Adaptive
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.general import GeneralExperts
from blt_builtins.regularizers.icnn import InputConvexNetwork
from blt_builtins.regularizers.noise_aware import NoiseAware, estimated_noise
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.plugin import Regularizer, Theta
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.tiles import Restorer
from bltoolbox.testing import Images, smooth_images, variational

SHAPE = (2, 9, 8)
LEVELS = torch.tensor([0.001, 5 / 255, 0.05, 0.1, 0.5], dtype=torch.float64)
BASES: dict[str, Any] = {
    "foe": lambda: small_foe("symmetric"),
    "general": lambda: GeneralExperts(4, layers=(3, 3), channels=(2,), components=2, nu=0.1),
    "wcfoe": lambda: WeaklyConvexExperts(filters=3, kernel_size=3, nu=0.05, weight=0.05),
}


@pytest.fixture(params=list(BASES))
def base(request: pytest.FixtureRequest) -> Regularizer:
    return BASES[request.param]()  # type: ignore[no-any-return]


def theta_of(aware: NoiseAware, spread: float = 0.4) -> dict[str, Tensor]:
    theta = aware.init_params(SHAPE, keyed_generator("aware"))
    moved = {name: spread * normal(*theta[name].shape, seed=k) for k, name in enumerate(_tables(theta))}
    return theta | moved


def _tables(theta: Theta) -> list[str]:
    return [name for name in theta if name.startswith("levels.")]


def at(aware: NoiseAware, theta: Theta, levels: Tensor) -> Theta:
    return aware.select(aware.prepare(theta), {"noise": levels})


@pytest.mark.parametrize("channels", [1, 3])
def test_the_estimate_is_the_level_of_the_noise(channels: int) -> None:
    images = smooth_images(2, (channels, 120, 128)).double()
    for k, level in enumerate((5 / 255, 0.1, 0.3)):
        found = estimated_noise(images + level * normal(*images.shape, seed=k))
        torch.testing.assert_close(found, torch.full((2,), level, dtype=torch.float64), rtol=0.05, atol=0)


def test_the_estimate_is_blind_to_shading_and_to_a_few_edges() -> None:
    rows = torch.linspace(0, 1, 40, dtype=torch.float64).view(1, 1, 40, 1)
    image = rows * torch.linspace(0, 3, 50, dtype=torch.float64) + rows
    assert float(estimated_noise(image)) < 1e-12
    image[:, :, 10:20, 10:20] += 1
    assert float(estimated_noise(image)) < 1e-12


def test_without_tables_it_is_the_rescaled_base(base: Regularizer) -> None:
    aware = NoiseAware(base)
    theta = aware.init_params(SHAPE, keyed_generator("aware"))
    own = {name.removeprefix("base."): value for name, value in theta.items() if name.startswith("base.")}
    x, v = 0.1 * normal(len(LEVELS), *SHAPE), normal(len(LEVELS), *SHAPE, seed=1)
    levelled = at(aware, theta, LEVELS)
    for k, level in enumerate(LEVELS):
        scaled = Rescaled(base, float(level) / aware.reference)
        row = slice(k, k + 1)
        for name in ("energy", "gradient"):
            found, expected = getattr(aware, name)(levelled, x)[row], getattr(scaled, name)(own, x[row])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        found = aware.linearize(levelled, x)(v)[row]
        torch.testing.assert_close(found, scaled.linearize(own, x[row])(v[row]), rtol=1e-8, atol=1e-12)


def test_derivatives_match_finite_differences_at_every_level(base: Regularizer) -> None:
    aware = NoiseAware(base)
    theta, x = at(aware, theta_of(aware), LEVELS[1:]), 0.1 * normal(4, *SHAPE)
    v, q = 0.02 * normal(4, *SHAPE, seed=1), normal(4, *SHAPE, seed=2)
    along = slope(lambda z: aware.energy(theta, z).sum(), x, v)
    torch.testing.assert_close(dot(aware.gradient(theta, x), v).sum(), along, rtol=1e-6, atol=1e-9)
    bent = slope(lambda z: dot(aware.gradient(theta, z), q).sum(), x, v)
    torch.testing.assert_close(dot(aware.linearize(theta, x)(v), q).sum(), bent, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(aware.pairing(theta, x, q), dot(aware.gradient(theta, x), q))


def test_the_majorant_lies_above_the_potential(base: Regularizer) -> None:
    aware = NoiseAware(base)
    theta = at(aware, theta_of(aware), LEVELS)
    t = 0.2 * aware.analyse(theta, normal(len(LEVELS), *SHAPE))
    weights, value = aware.majorant(theta, t), aware.potential(theta, t)
    for scale in (0.0, 0.5, 0.99, 1.01, 2.0, 10.0):
        parabola = value + 0.5 * weights * ((scale * t).square() - t.square())
        assert bool((parabola >= aware.potential(theta, scale * t) - 1e-12).all())


def test_bounds_hold_at_every_level(base: Regularizer) -> None:
    aware = NoiseAware(base)
    theta = theta_of(aware)
    highest, lowest = (float(bound(theta, SHAPE)) for bound in (aware.lipschitz, aware.strong_convexity))
    for level in LEVELS:
        for contrast in (0.0, 0.3):
            one = at(aware, theta, level.view(1))
            matrix = hessian(aware, one, contrast * level * normal(*SHAPE))
            values = torch.linalg.eigvalsh(matrix)
            assert lowest - 1e-10 <= float(values[0]) and float(values[-1]) <= highest
    assert lowest == 0 if aware.convex else lowest < 0


def test_tables_are_linear_between_knots_and_constant_beyond() -> None:
    aware = NoiseAware(small_foe(), least=0.01, most=0.16, knots=5)
    levels = torch.tensor([1e-3, 0.01, 0.02 * math.sqrt(2), 0.16, 1.0], dtype=torch.float64)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    expected[0, 0] = expected[1, 0] = expected[3, 4] = expected[4, 4] = 1
    expected[2, 1:3] = 0.5
    torch.testing.assert_close(aware._hats(levels), expected)


def test_samples_have_levels_of_their_own() -> None:
    aware = NoiseAware(small_foe())
    theta = aware.prepare(theta_of(aware))
    y = torch.cat([0.02 * normal(1, *SHAPE), 0.2 * normal(1, *SHAPE, seed=1)])
    together = aware.energy(aware.select(theta, aware.guide(theta, y)), y)
    for k in range(2):
        one = y[k : k + 1]
        alone = aware.energy(aware.select(theta, aware.guide(theta, one)), one)
        torch.testing.assert_close(together[k : k + 1], alone, rtol=1e-12, atol=0)
    assert float(aware.guide(theta, y)["noise"][0]) < 0.3 * float(aware.guide(theta, y)["noise"][1])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: NoiseAware(InputConvexNetwork()), "has no"),
        (lambda: NoiseAware(Adaptive(small_foe())), "adapts to images"),
        (lambda: NoiseAware(FieldOfExperts(), least=0.1, most=0.1), "use a range"),
        (lambda: GaussianRange(0.2, 0.1), "exchange them"),
    ],
)
def test_what_cannot_be_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()


def test_noise_of_a_range_has_one_level_per_image() -> None:
    noise, flat = GaussianRange(0.02, 0.2), torch.zeros(1, 60, 70, dtype=torch.float64)
    images = torch.stack([noise.sample(flat, keyed_generator("range", k)) for k in range(300)])
    levels = images.flatten(1).std(1)
    assert 0.019 < float(levels.min()) < 0.025 and 0.17 < float(levels.max()) < 0.21
    halves = images.flatten(1).split(2100, dim=1)
    torch.testing.assert_close(halves[0].std(1), halves[1].std(1), rtol=0.15, atol=0)
    shares = (levels / 0.02).log() / math.log(10)
    assert float((shares.sort().values - torch.linspace(0, 1, 300)).abs().max()) < 0.1, "uniform in log σ"


def test_known_levels_are_used_instead_of_estimates() -> None:
    """Those of the samples in training, and one that is stated."""
    aware, noise = NoiseAware(small_foe()), GaussianRange(0.02, 0.2)
    operator, data = Identity(), smooth_images(4, SHAPE)
    samples = Samples(Images(data), operator, noise, dtype=torch.float64)
    sample = samples.batch(range(4))
    levels = sample.context["noise"]
    assert len(set(levels.tolist())) == 4
    drawn = (sample.y - data.double()).flatten(1)
    torch.testing.assert_close(drawn.norm(dim=1) / drawn.shape[1] ** 0.5, levels, rtol=0.25, atol=0)
    problem, theta = variational(operator, aware), theta_of(aware)
    at = problem.at({f"regularizer.{name}": value for name, value in theta.items()}, SHAPE)
    torch.testing.assert_close(at.on(sample.y, sample.context).guide["noise"], levels)
    read = at.on(sample.y).guide["noise"]
    torch.testing.assert_close(read, estimated_noise(sample.y))
    assert not torch.allclose(read, levels, rtol=1e-3)
    stated = aware.at_noise(0.07)
    torch.testing.assert_close(stated.guide(theta, sample.y)["noise"], torch.full_like(levels, 0.07))
    twice = Rescaled(aware, 0.5).at_noise(0.07)
    assert isinstance(twice, Rescaled) and twice.base.level == 0.14  # type: ignore[attr-defined]


def test_noise_without_levels_of_its_own_has_none_in_the_context() -> None:
    samples = Samples(Images(smooth_images(2, SHAPE)), Identity(), Gaussian(0.1))
    assert samples.batch(range(2)).context == {}
    assert Gaussian(0.1).level_of(keyed_generator(0)) == 0.1


@pytest.mark.parametrize("noise", [0.03, 0.2, "auto"])
def test_pictures_are_restored_at_the_level_that_is_given_or_estimated(noise: float | str) -> None:
    regularizer = {"name": "noise-aware", "base": {"name": "foe", "filters": 3, "kernel_size": 3}}
    model = toy_model(regularizer=regularizer, noise={"name": "gaussian-range"}, color="gray")
    tables = {
        name: normal(*value.shape, dtype=torch.float32) if "levels" in name else value
        for name, value in model.theta.items()
    }
    model, picture = replace(model, theta=tables), noisy_picture(40, 44, 1)
    restored, report = Restorer(model, tol=1e-5).run(picture, noise)
    assert report.estimated == (noise == "auto") and report.noise is not None
    assert report.noise == noise or 0.09 < report.noise < 0.11
    aware = model.problem.regularizer
    assert isinstance(aware, NoiseAware)
    problem = replace(model.problem, regularizer=aware.at_noise(report.noise))
    y = torch.from_numpy(picture).permute(2, 0, 1)[None]
    x = solve_cold(MemoryGradient(), problem.at(model.theta, y.shape[1:]).on(y), 1e-3, 5000).x
    np.testing.assert_allclose(restored, x[0].permute(1, 2, 0), atol=2e-3)


@pytest.mark.parametrize("wrap", [NoiseAware, lambda base: Adaptive(base, features=2, layers=0)])
def test_no_strong_convexity_is_claimed_that_flatter_potentials_would_lose(wrap: Any) -> None:
    class Steep(FieldOfExperts):
        def strong_convexity(self, theta: Theta, shape: Any) -> float:
            return 0.5

    wrapped = wrap(Steep(2, 3, "symmetric"))
    theta = wrapped.prepare(wrapped.init_params(SHAPE, keyed_generator("steep")))
    assert float(wrapped.strong_convexity(theta, SHAPE)) == 0
