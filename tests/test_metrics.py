"""PSNR and SSIM against those of scikit-image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from skimage import metrics as reference
from toy_models import as_bytes, clean_picture, noisy_picture

from bltoolbox.restoration.metrics import psnr, ssim


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
