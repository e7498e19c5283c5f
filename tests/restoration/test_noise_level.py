"""The noise level of pictures: as people write it, and estimated."""

from __future__ import annotations

import numpy as np
import pytest
from skimage import data

from bltoolbox.errors import UsageError
from bltoolbox.restoration.noise_level import FLOOR, estimate_noise, parse_noise, show_noise

LEVELS = (5, 10, 25, 50)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("25/255", 25 / 255),
        (" 25 / 255 ", 25 / 255),
        ("25", 25 / 255),
        (25, 25 / 255),
        ("0.1", 0.1),
        (0.1, 0.1),
        ("1e-2", 0.01),
        (".5", 0.5),
        ("1", 1.0),
        ("auto", "auto"),
        (None, None),
    ],
)
def test_levels_as_people_write_them(given: str | float | None, expected: float | str | None) -> None:
    assert parse_noise(given) == expected


@pytest.mark.parametrize(
    "given", ["", "much", "0", "-1", "-25/255", "25/0", "300", "nan", "inf", "1e999", "1/", "2/1"]
)
def test_other_words_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not a noise level"):
        parse_noise(given)


def test_a_level_is_shown_in_255ths() -> None:
    assert show_noise(25 / 255) == "25/255"


@pytest.mark.parametrize("name", ["astronaut", "coffee", "chelsea", "rocket", "camera"])
def test_the_estimate_on_photographs(name: str) -> None:
    """Upwards by what texture there is, by 2.1/255 at most; the clipping of a file at most as much downwards."""
    photograph = np.atleast_3d(getattr(data, name)()) / 255
    for sigma in LEVELS:
        noise = np.random.default_rng(sigma).normal(0, sigma / 255, photograph.shape)
        noisy = photograph + noise
        in_file = (noisy.clip(0, 1) * 255 + 0.5).astype(np.uint8)
        for image in (noisy, in_file):
            bias = 255 * estimate_noise(image) - sigma
            assert -1.5 < bias < 2.2, f"{bias:.2f} at {sigma}"
    sixteen = (noisy.clip(0, 1) * 65535).astype(np.uint16)
    assert abs(estimate_noise(sixteen) - estimate_noise(in_file)) < 0.5 / 255


def test_the_estimate_is_exact_where_there_is_only_noise() -> None:
    noise = np.random.default_rng(0).normal(0.5, 0.05, (512, 512))
    assert estimate_noise(noise) == pytest.approx(0.05, rel=0.01)
    ramp = noise + np.linspace(-0.2, 0.2, 512)
    assert estimate_noise(ramp) == pytest.approx(0.05, rel=0.01), "shading is no noise"


def test_a_large_picture_is_sampled() -> None:
    noise = np.random.default_rng(0).normal(0.5, 0.05, (3000, 2100, 1)).astype(np.float32)
    assert estimate_noise(noise) == pytest.approx(0.05, rel=0.01)


def test_black_and_white_alone_tell_something() -> None:
    assert estimate_noise(np.zeros((64, 64), np.uint8)) == FLOOR
    assert estimate_noise(np.full((64, 64), 255, np.uint8)) == FLOOR


@pytest.mark.parametrize("shape", [(1, 1), (3, 200), (8, 8)])
def test_a_few_pixels_tell_nothing(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="too few to estimate"):
        estimate_noise(np.zeros(shape))
