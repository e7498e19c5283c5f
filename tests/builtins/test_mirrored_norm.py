"""The tight norm of filter banks at mirrored borders is never below the true norm, and close to it."""

import math
from functools import partial

import pytest
import torch

from blt_builtins.regularizers import mirrored_norm as module
from blt_builtins.regularizers.filter_constants import mirrored_norm
from blt_builtins.regularizers.filters import FilterBank, norm_bound
from blt_builtins.regularizers.foe import amplitudes
from bltoolbox import Model
from bltoolbox.restoration.theta import split


def bank(filters, channels, size, seed, zero_mean=True):
    generator = torch.Generator().manual_seed(seed)
    kernels = torch.randn(filters, channels, size, size, dtype=torch.float64, generator=generator)
    weights = torch.rand(filters, dtype=torch.float64, generator=generator) * 3
    return (kernels - kernels.mean((-2, -1), keepdim=True) if zero_mean else kernels), weights


def true_norm(kernels, weights, shape):
    """From the dense matrix."""
    operator = FilterBank(kernels * weights.sqrt().view(-1, 1, 1, 1), "symmetric")
    count = math.prod(shape)
    columns = operator.correlate(torch.eye(count, dtype=torch.float64).view(count, *shape)).flatten(1)
    return float(torch.linalg.eigvalsh(columns @ columns.mT)[-1])


CASES = [
    (2, 1, 2, (1, 17, 23)),
    (3, 1, 3, (1, 24, 15)),
    (2, 3, 3, (3, 14, 16)),
    (3, 1, 4, (1, 22, 20)),
    (2, 2, 5, (2, 16, 17)),
    (2, 1, 7, (1, 24, 21)),
    (2, 3, 3, (3, 5, 40)),
    (1, 1, 5, (1, 6, 34)),
]


@pytest.mark.parametrize(("filters", "channels", "size", "shape"), CASES)
def test_never_below_the_norm_of_larger_images(filters, channels, size, shape, monkeypatch):
    # A small image stands for these already, so that their dense matrices can be had.
    monkeypatch.setattr(module, "_SMALLEST", 12)
    monkeypatch.setattr(module, "_SIDES", 2)
    monkeypatch.setattr(module, "_DENSE", 50)
    for zero_mean in (True, False):
        kernels, weights = bank(filters, channels, size, 0, zero_mean)
        exact, crude = true_norm(kernels, weights, shape), float(norm_bound(kernels, weights, "symmetric"))
        for certificate in ("lanczos", "cholesky"):
            assert exact <= float(mirrored_norm(kernels, weights, shape, certificate)) <= crude


@pytest.mark.parametrize(("filters", "channels", "size", "shape"), CASES)
def test_images_below_the_limit_are_treated_exactly(filters, channels, size, shape):
    kernels, weights = bank(filters, channels, size, 5)
    exact = true_norm(kernels, weights, shape)
    for certificate, excess in (("lanczos", 1.03), ("cholesky", 1.011)):
        assert exact <= float(mirrored_norm(kernels, weights, shape, certificate)) <= excess * exact


@pytest.mark.parametrize("name", ["denoise-color-foe", "denoise-gray-foe"])
def test_within_15_percent_for_learned_filters(name):
    model = Model.load(name)
    theta = {key: value.double() for key, value in split(model.theta, "regularizer").items()}
    kernels = model.problem.regularizer.kernels(theta)
    weights, shape = amplitudes(theta), (kernels.shape[1], 80, 72)
    scaled = kernels * weights.sqrt().view(-1, 1, 1, 1)
    # A Ritz value of the whole image is a lower bound of the norm.
    product = partial(module._product, FilterBank(scaled.float(), "symmetric"))
    least = float(module._largest_ritz(product, shape, scaled.device))
    assert least <= float(mirrored_norm(kernels, weights, shape)) <= 1.15 * least
    assert float(norm_bound(kernels, weights, "symmetric")) > 1.5 * least


def test_units_do_not_matter():
    kernels, weights = bank(3, 1, 3, 0)
    expected = float(mirrored_norm(kernels, weights, (1, 30, 30)))
    for factor in (1e-12, 1e12):
        assert float(mirrored_norm(kernels, factor * weights, (1, 30, 30))) == pytest.approx(
            factor * expected
        )


def test_zero_and_infinite_kernels():
    kernels, weights = bank(2, 1, 3, 0)
    assert float(mirrored_norm(0 * kernels, weights, (1, 60, 60))) <= 1e-12
    assert math.isinf(float(mirrored_norm(kernels * math.inf, weights, (1, 60, 60))))


def test_large_kernels_have_the_bound_of_any_size():
    kernels, weights = bank(1, 1, 13, 0)
    bound = mirrored_norm(kernels, weights, (1, 64, 64))
    assert torch.equal(bound, norm_bound(kernels, weights, "symmetric"))


def test_the_step_of_large_images_uses_it():
    model = Model.load("denoise-color-foe")
    theta, regularizer = split(model.theta, "regularizer"), model.problem.regularizer
    small, large = (float(regularizer.lipschitz(theta, (3, side, side))) for side in (32, 64))
    assert large < 0.6 * small
