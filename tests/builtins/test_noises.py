"""Noise: mean and variance against closed forms, and simulated measurements that depend on nothing but their id."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.noises.none import NoNoise
from blt_builtins.noises.poisson import PoissonNoise
from blt_builtins.noises.poisson_gaussian import PoissonGaussian
from blt_builtins.noises.salt_and_pepper import SaltAndPepper
from blt_builtins.noises.speckle import Speckle
from blt_builtins.noises.uniform import Uniform
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.inpainting import Inpainting
from blt_builtins.operators.mri import MRI
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.errors import BltError, UsageError
from bltoolbox.plugin import Noise, Operator
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.testing import Images, smooth_images

NOISES: dict[str, Noise] = {
    "gaussian": Gaussian(0.1),
    "poisson": PoissonNoise(peak=30.0, background=0.05),
    "poisson-gaussian": PoissonGaussian(peak=30.0, background=0.05, sigma=0.04),
    "salt-and-pepper": SaltAndPepper(0.2),
    "salt-and-pepper elsewhere": SaltAndPepper(0.3, low=-1.0, high=2.0),
    "uniform": Uniform(0.3),
    "speckle": Speckle(7.0),
    "none": NoNoise(),
}
#: Mean and variance at t.
MOMENTS: dict[str, Callable[[float], tuple[float, float]]] = {
    "gaussian": lambda t: (t, 0.1**2),
    "poisson": lambda t: (t + 0.05, (t + 0.05) / 30),
    "poisson-gaussian": lambda t: (t + 0.05, (t + 0.05) / 30 + 0.04**2),
    "salt-and-pepper": lambda t: (0.8 * t + 0.1, 0.2 * 0.8 * (t - 0.5) ** 2 + 0.2 / 4),
    "salt-and-pepper elsewhere": lambda t: (
        0.7 * t + 0.15,
        0.7 * t**2 + 0.15 * (1 + 4) - (0.7 * t + 0.15) ** 2,
    ),
    "uniform": lambda t: (t, 0.3**2 / 12),
    "speckle": lambda t: (t, t**2 / 7),
    "none": lambda t: (t, 0.0),
}
SHAPE = (2, 10, 12)
DRAWS = 100_000


@pytest.mark.parametrize("value", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("name", NOISES)
def test_mean_and_variance_are_those_of_the_closed_forms(name: str, value: float) -> None:
    noise, (mean, variance) = NOISES[name], MOMENTS[name](value)
    t = torch.full((DRAWS,), value, dtype=torch.float64)
    claims = noise.mean(t), noise.variance(t)
    assert claims[0] is not None and claims[1] is not None
    torch.testing.assert_close(claims[0], torch.full_like(t, mean))
    torch.testing.assert_close(claims[1], torch.full_like(t, variance))
    draws = noise.sample(t, keyed_generator("moments", name))
    centred = draws - mean
    assert abs(float(centred.mean())) <= 5 * (variance / DRAWS) ** 0.5
    spread = centred.square()
    assert abs(float(spread.mean()) - variance) <= 5 * float(spread.std()) / DRAWS**0.5


@pytest.mark.parametrize(("name", "level"), [("gaussian", 0.1), ("uniform", 0.3 / 12**0.5), ("none", 0.0)])
def test_levels(name: str, level: float) -> None:
    assert NOISES[name].level == pytest.approx(level)
    others = {
        other: one.level for other, one in NOISES.items() if MOMENTS[other](0.2)[1] != MOMENTS[other](0.9)[1]
    }
    assert set(others.values()) == {None}


def test_salt_and_pepper_takes_each_value_with_its_probability() -> None:
    t = torch.full((DRAWS,), 0.4, dtype=torch.float64)
    y = SaltAndPepper(0.3, low=-1.0, high=2.0).sample(t, keyed_generator("salt"))
    for value, probability in ((-1.0, 0.15), (2.0, 0.15), (0.4, 0.7)):
        error = (probability * (1 - probability) / DRAWS) ** 0.5
        assert abs(float((y == value).double().mean()) - probability) <= 5 * error
    assert set(y.tolist()) == {-1.0, 0.4, 2.0}
    everything = SaltAndPepper(1.0).sample(t, keyed_generator("salt"))
    assert set(everything.tolist()) == {0.0, 1.0}
    assert torch.equal(SaltAndPepper(0.0).sample(t, keyed_generator("salt")), t)
    with pytest.raises(ValueError, match="low 1 is not below high 0"):
        SaltAndPepper(low=1.0, high=0.0)


@pytest.mark.parametrize("noise", [PoissonNoise(10.0, 0.1), PoissonGaussian(10.0, 0.1, sigma=0.0)])
def test_counts(noise: Noise) -> None:
    t = torch.linspace(0, 1, 500, dtype=torch.float64)
    counts = 10 * noise.sample(t, keyed_generator("counts"))
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-12)
    assert float(counts.min()) >= 0
    with pytest.raises(ValueError, match=r"A x \+ background falls to -0.4; use gaussian noise"):
        noise.sample(t - 0.5, keyed_generator("counts"))
    # What rounding leaves below zero is zero.
    zero = torch.full((3,), -0.1 - 1e-9, dtype=torch.float64)
    assert not bool(noise.sample(zero, keyed_generator("counts")).any())


def test_negative_means_are_refused_by_the_name_of_the_data() -> None:
    samples = Samples(Images(smooth_images(2, SHAPE)), MRI(), PoissonNoise())
    with pytest.raises(BltError, match="a mean count cannot be negative"):
        samples.batch([0])


def measured(name: str, operator: Operator | None = None, workers: int = 0, **options: object) -> Samples:
    images = Images(smooth_images(5, SHAPE))
    settings = {"dtype": torch.float64, "seed": 3} | options
    return Samples(images, operator or Blur(size=3), NOISES[name], workers=workers, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NOISES)
def test_a_measurement_depends_on_its_id_alone(name: str) -> None:
    """Not on the batch, the order, the workers, the dtype of the run or what was measured before."""
    expected = measured(name).batch(range(5)).y
    for order in ([3], [4, 0, 2], [1, 1], range(5)):
        assert torch.equal(measured(name).batch(order).y, expected[list(order)])
        assert torch.equal(measured(name, workers=3).batch(order).y, expected[list(order)])
    again = measured(name)
    again.batch([2])
    assert torch.equal(again.batch(range(5)).y, expected)
    assert torch.equal(measured(name, ids=[4, 1]).batch([0, 1]).y, expected[[4, 1]])
    assert torch.equal(measured(name, dtype=torch.float32).batch(range(5)).y, expected.float())
    if name != "none":
        for other in ({"seed": 4}, {"stream": "evaluation"}):
            assert not torch.equal(measured(name, **other).batch(range(5)).y, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_measurements_are_kept_up_to_the_limit(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = measured("gaussian").batch(range(5)).y
    monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", str(max(1, 2 * kept * expected[0].nbytes)))  # with its image
    operator, simulated = Blur(size=3), []
    samples = measured("gaussian", operator)
    apply = operator.apply
    monkeypatch.setattr(operator, "apply", lambda *given: simulated.append(1) or apply(*given))
    for _ in range(2):
        assert torch.equal(samples.batch(range(5)).y, expected)
    assert len(simulated) == 5 + (5 - kept)


def test_a_limit_that_is_not_a_number_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", "256 MB")
    with pytest.raises(
        UsageError, match="BLT_KEPT_MEASUREMENTS=256 MB: give a positive whole number of bytes"
    ):
        measured("gaussian")


MASKED = {"inpainting": Inpainting(missing=0.4), "mri": MRI(acceleration=3.0)}


@pytest.mark.parametrize("operator", MASKED)
@pytest.mark.parametrize("name", NOISES)
def test_only_measurements_are_noisy(name: str, operator: str) -> None:
    if operator == "mri" and name.startswith("poisson"):
        pytest.skip("frequencies are not counts")
    sample = measured(name, MASKED[operator]).batch(range(5))
    assert sample.truth is not None
    exact = MASKED[operator].apply(sample.truth, {}, {})
    mask = _mask(MASKED[operator], sample.y)
    assert torch.equal(sample.y[~mask], exact[~mask])
    assert not bool(sample.y[~mask].any())
    changed = float((sample.y[mask] != exact[mask]).double().mean())
    least = {"none": 0.0, "salt-and-pepper": 0.1, "salt-and-pepper elsewhere": 0.2}.get(name, 0.9)
    assert changed >= least
    assert name != "none" or changed == 0


def _mask(operator: Operator, y: Tensor) -> Tensor:
    mask = operator.measured(y, {})
    assert mask is not None
    return (mask != 0).expand_as(y)


def test_gaussian_noise_of_one_sample_is_what_its_generator_draws() -> None:
    samples = Samples(
        Images(smooth_images(2, SHAPE)),
        Identity(),
        Gaussian(0.1),
        seed=7,
        dtype=torch.float64,
        stream="train",
    )
    sample = samples.batch([1])
    assert sample.truth is not None
    normal = torch.randn(SHAPE, dtype=torch.float64, generator=keyed_generator("noise", "train", 7, 1))
    torch.testing.assert_close(sample.y[0], sample.truth[0] + 0.1 * normal, rtol=0, atol=1e-15)
