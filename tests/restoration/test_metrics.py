"""The metrics against those of scikit-image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage import metrics as reference
from toy_models import as_bytes, clean_picture, noisy_picture

from bltoolbox.errors import UsageError
from bltoolbox.restoration.metrics import METRICS, measure, nrmse, pick, psnr, ssim
from bltoolbox.runs.metric import UNDESCRIBED, Metric


def skimage_ssim(x: NDArray[Any], x_true: NDArray[Any], data_range: float) -> float:
    found = reference.structural_similarity(
        x_true,
        x,
        data_range=data_range,
        channel_axis=2,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    return float(found)


@pytest.mark.parametrize("shape", [(11, 11, 1), (40, 61, 3), (300, 1100, 3)])
def test_they_are_those_of_scikit_image(shape: tuple[int, int, int]) -> None:
    x_true, x = clean_picture(*shape), noisy_picture(*shape).astype(np.float64).clip(0, 1)
    assert psnr(x, x_true) == pytest.approx(
        reference.peak_signal_noise_ratio(x_true, x, data_range=1), rel=1e-10
    )
    assert ssim(x, x_true) == pytest.approx(skimage_ssim(x, x_true, 1), abs=1e-8)
    a, b = as_bytes(x), as_bytes(x_true)
    assert psnr(a, b) == pytest.approx(reference.peak_signal_noise_ratio(b, a), rel=1e-10)
    assert ssim(a, b) == pytest.approx(skimage_ssim(a, b, 255), abs=1e-8)


def test_equal_pictures_and_tiny_ones() -> None:
    image = clean_picture(20, 30)
    assert psnr(image, image) == math.inf
    assert ssim(image, image) == pytest.approx(1)
    assert math.isnan(ssim(image[:10], image[:10]))


def test_values_beyond_the_range_are_clipped() -> None:
    image = np.ones((12, 12))
    assert psnr(image + 0.5, image) == math.inf


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size: 20×30×3 and 20×30×1"):
        psnr(clean_picture(20, 30), clean_picture(20, 30, 1))


@pytest.mark.parametrize("span", [(0.0, 1.0), (-1.0, 1.0), (0.0, 4095.0), (10.0, 12.0)])
def test_the_range_of_values_counts(span: tuple[float, float]) -> None:
    low, high = span
    x_true, x = (
        low + (high - low) * one for one in (clean_picture(40, 61), noisy_picture(40, 61).clip(0, 1))
    )
    width = high - low
    expected = reference.peak_signal_noise_ratio(x_true, x, data_range=width)
    assert psnr(x, x_true, span) == pytest.approx(expected, rel=1e-6)
    assert ssim(x, x_true, span) == pytest.approx(skimage_ssim(x, x_true, width), abs=1e-6)
    assert nrmse(x, x_true, span) == pytest.approx(reference.normalized_root_mse(x_true, x), rel=1e-6)
    beyond = x_true + 2 * width
    assert psnr(beyond, x_true, span) == psnr(np.full_like(x_true, high), x_true, span), "x is clipped"


def test_a_metric_that_cannot_be_computed_is_not_a_number() -> None:
    zero = np.zeros((12, 12))
    assert math.isnan(nrmse(zero, zero)) and math.isnan(nrmse(zero + 0.5, zero))


@pytest.mark.parametrize("name", METRICS)
def test_each_metric_knows_which_way_is_better(name: str) -> None:
    x_true = clean_picture(40, 61)
    near, far = (x_true + scale * (noisy_picture(40, 61) - x_true) for scale in (0.1, 1.0))
    metric = METRICS[name]
    values = [metric.of(x, x_true, (0.0, 1.0)) for x in (far, near)]
    assert metric.better(values[1], values[0]) and not metric.better(values[0], values[1])
    assert metric.best([*values, None, math.nan]) == values[1]
    assert metric.better(values[0], math.nan) and not metric.better(math.nan, values[0])


def test_an_image_is_measured_alike_in_every_batch() -> None:
    x_true = torch.rand(5, 3, 16, 20, generator=torch.Generator().manual_seed(0))
    x = x_true + 0.1 * torch.randn(5, 3, 16, 20, generator=torch.Generator().manual_seed(1))
    together = measure(list(METRICS.values()), x, x_true)
    for number in range(5):
        alone = measure(list(METRICS.values()), x[number : number + 1], x_true[number : number + 1])
        assert {name: values[number] for name, values in together.items()} == {
            name: values[0] for name, values in alone.items()
        }


def test_names() -> None:
    assert [metric.name for metric in pick(["ssim", "psnr", "ssim"])] == ["ssim", "psnr"]
    with pytest.raises(UsageError, match="no metric 'psrn'; did you mean 'psnr'"):
        pick(["psrn"])


def test_records_without_a_description_are_of_the_default() -> None:
    assert METRICS["psnr"].as_dict() == UNDESCRIBED.as_dict()
    for metric in METRICS.values():
        assert Metric.parse(metric.as_dict()) == Metric(**metric.as_dict())
