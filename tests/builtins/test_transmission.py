"""X-ray counts: the likelihood that the data term stands for, its continuation, and the noise that it belongs to."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import normal
from torch import Tensor

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.data_terms.transmission import Transmission
from blt_builtins.noises.transmission import TransmissionNoise
from bltoolbox.bilevel.tensors import keyed_generator

PHOTONS, KAPPA = 40.0, 3.0
TERM = Transmission(KAPPA)


def column(*values: float) -> Tensor:
    """One sample with these entries."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


def test_differences_are_those_of_the_log_likelihood() -> None:
    """Iκ²(D(t) − D(t₀)) = log P(n | t₀) − log P(n | t) for t ≥ 0."""
    counts = column(1, 5, 12, 40)
    y = -(counts / PHOTONS).log() / KAPPA
    start, end = column(0, 0.4, 0.1, 0.7), column(0.3, 0, 0.2, 0.5)

    def likelihood(t: Tensor) -> Tensor:
        return torch.distributions.Poisson(PHOTONS * (-KAPPA * t).exp()).log_prob(counts).sum()

    difference = PHOTONS * KAPPA**2 * (TERM.value({}, end, y) - TERM.value({}, start, y))
    assert difference.item() == pytest.approx((likelihood(start) - likelihood(end)).item(), rel=1e-12)


def test_near_the_measurements_it_is_weighted_least_squares() -> None:
    y, step = column(0.1, 0.5, 1.2), 1e-4 * column(1, -2, 0.5)
    expected = 0.5 * ((-KAPPA * y).exp() * step.square()).sum()
    assert TERM.value({}, y + step, y).item() == pytest.approx(expected.item(), rel=1e-3)
    assert not bool(TERM.value({}, y, y).any()) and not bool(TERM.gradient({}, y, y).any())


def test_without_attenuation_it_is_least_squares() -> None:
    """κ → 0, to the first order in κ, also below zero."""
    t, y = normal(2, 1, 3, 4), normal(2, 1, 3, 4, seed=1)
    weak = Transmission(1e-6)
    for method in ("value", "gradient"):
        found, expected = (getattr(term, method)({}, t, y) for term in (weak, LeastSquares()))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_below_zero_it_continues_smoothly_and_its_bounds_are_attained() -> None:
    y = column(0.3, 0.3)
    for method, tolerance in (("value", 1e-8), ("gradient", 1e-8), ("curvature", 1e-8)):
        below, above = (getattr(TERM, method)({}, column(t, t), y) for t in (-1e-10, 1e-10))
        torch.testing.assert_close(below, above, rtol=0, atol=tolerance)
    t = torch.linspace(-3, 3, 601, dtype=torch.float64).view(1, 1, 1, -1)
    curvature = TERM.curvature({}, t, torch.zeros_like(t))
    assert float(curvature.max()) == 1.0 and float(curvature.min()) > 0
    third = curvature.diff().abs().max() / 0.01
    assert 0.98 * KAPPA < float(third) <= KAPPA


def test_a_ray_that_nothing_passes_does_not_decide() -> None:
    """Two rays through the same pixel: the likelihood believes the one with more photons."""
    y = column(0.2, 2.2)
    t = column(0.5, 0.5)
    pulls = TERM.gradient({}, t, y).flatten()
    assert pulls[0] > 0 > pulls[1] and abs(float(pulls[1])) < float(pulls[0])
    plain = LeastSquares().gradient({}, t, y).flatten()
    assert abs(float(plain[1])) > float(plain[0])


@pytest.mark.parametrize("t", [0.0, 0.5, 1.5])
def test_the_noise_has_the_moments_of_its_distribution(t: float) -> None:
    """Mean and variance by summation over counts, half a count for none."""
    draws, noise = 50_000, TransmissionNoise(PHOTONS, KAPPA)
    counts = torch.arange(200, dtype=torch.float64)
    probability = torch.distributions.Poisson(PHOTONS * math.exp(-KAPPA * t)).log_prob(counts).exp()
    values = -(counts.clamp_min(0.5) / PHOTONS).log() / KAPPA
    mean = float((probability * values).sum())
    variance = float((probability * (values - mean).square()).sum())
    y = noise.sample(torch.full((draws,), t, dtype=torch.float64), keyed_generator("draws", t))
    assert bool(torch.isfinite(y).all())
    assert abs(float(y.mean()) - mean) <= 5 * (variance / draws) ** 0.5
    spread = (y - mean).square()
    assert abs(float(spread.mean()) - variance) <= 5 * float(spread.std()) / draws**0.5


def test_with_many_photons_it_is_the_line_integral_with_growing_noise() -> None:
    photons, t = 1e6, torch.linspace(0, 1, 11, dtype=torch.float64).repeat_interleave(20_000).view(11, -1)
    y = TransmissionNoise(photons, KAPPA).sample(t, keyed_generator("many"))
    expected = (KAPPA * t[:, 0]).exp() / (photons * KAPPA**2)
    torch.testing.assert_close(y.var(1), expected, rtol=0.06, atol=0)
    assert float((y.mean(1) - t[:, 0]).abs().max()) < 1e-4
