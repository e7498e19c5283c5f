"""The likelihood of photon counts: exact where it means something, and bounded below where nothing is counted."""

from __future__ import annotations

import pytest
import torch

from blt_builtins.data_terms.poisson import Poisson
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.upper_losses.squared_error import SquaredError
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Status
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational

PEAK, BACKGROUND = 20.0, 0.02
TERM = Poisson(PEAK, BACKGROUND)


def column(*values: float) -> torch.Tensor:
    """One sample with these entries."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


def test_differences_are_those_of_the_log_likelihood() -> None:
    """D(t) − D(t₀) = log P(y | t₀) − log P(y | t) for t ≥ 0, with counts p·y."""
    y = column(0, 1, 3, 12) / PEAK
    start, end = column(0, 0.4, 0.1, 0.7), column(0.3, 0, 0.2, 0.5)

    def likelihood(t: torch.Tensor) -> torch.Tensor:
        rates = torch.distributions.Poisson(PEAK * (t + BACKGROUND))
        return rates.log_prob(PEAK * y).sum()

    difference = TERM.value({}, end, y) - TERM.value({}, start, y)
    assert difference.item() == pytest.approx((likelihood(start) - likelihood(end)).item(), rel=1e-12)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_it_grows_in_both_directions(count: int) -> None:
    y = column(count / PEAK)
    for far in (-1e3, 1e3):
        slope = TERM.gradient({}, column(far), y)
        assert (slope * far > 0).all(), f"D falls without end towards {far}"


def test_its_curvature_is_continuous_and_its_bounds_are_attained() -> None:
    y = column(0.0, 0.35)
    jumps = [TERM.curvature({}, column(t, t), y) for t in (-1e-13, 1e-13)]
    assert torch.allclose(*jumps, rtol=1e-9, atol=1e-6)
    _, most = TERM.spectrum({}, y)
    deep = TERM.curvature({}, column(-1.0, -1.0), y)
    assert deep.max().item() == pytest.approx(most.item(), rel=1e-12)
    at_zero = torch.autograd.functional.jacobian(
        lambda t: TERM.curvature({}, t, y).sum(), column(1e-12, 1e-12)
    )
    assert at_zero.abs().max().item() == pytest.approx(TERM.third({}, y).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dark_image_under_a_weak_regularizer_has_a_minimiser(dtype: torch.dtype) -> None:
    """Without a count in a large area, a linear continuation below zero has none: total variation cannot hold it."""
    generator = torch.Generator().manual_seed(0)
    true = torch.zeros(1, 1, 24, 24, dtype=torch.float64)
    true[..., 2:8, 2:8] = 0.5
    blur = Blur(size=5, sigma=1.5)
    rates = PEAK * (blur.apply(true, {}, {}).clamp_min(0) + BACKGROUND)
    y = (torch.poisson(rates, generator) / PEAK).to(dtype)
    assert (y[..., 12:, 12:] == 0).double().mean() > 0.5
    problem = Variational(blur, TotalVariation(), TERM, SquaredError())
    theta = join(regularizer=TotalVariation(weight=0.05).init_params((1, 24, 24), generator))
    lower = problem.at({name: value.to(dtype) for name, value in theta.items()}, (1, 24, 24)).on(y)
    solution = solve(LBFGS(), lower, lower.start(), 0.5)
    assert solution.status == (Status.CONVERGED,)
    assert lower.forward(solution.x).min() > -0.1
