"""Nonsmooth regularizers: pdhg against closed forms, its gap as a bound, and piggyback against central differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.hypergradients.piggyback import Piggyback
from blt_builtins.lower_solvers.pdhg import PDHG
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe_nonsmooth import NonsmoothFieldOfExperts
from blt_builtins.regularizers.tgv import TotalGeneralizedVariation
from blt_builtins.regularizers.tv_nonsmooth import NonsmoothTotalVariation
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Ask, Theta
from bltoolbox.bilevel.tensors import keyed_generator, norm
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing.problems import Gain, SquaredDistance, SquaredLoss, smooth_images

SHAPE = (1, 7, 8)


def _theta(regularizer: Regularizer) -> dict[str, Tensor]:
    return join(regularizer=regularizer.init_params(SHAPE, keyed_generator("θ", 0)))


def _lower(
    regularizer: Regularizer, theta: Theta, operator: Operator | None = None
) -> tuple[ImageLower, Tensor]:
    x_true = smooth_images(2, SHAPE).double()
    noise = torch.randn(x_true.shape, dtype=torch.float64, generator=keyed_generator("noise"))
    problem = Variational(operator or Identity(), regularizer, LeastSquares(), SquaredLoss())
    return problem.at(theta, SHAPE).on(x_true + 0.1 * noise), x_true


def test_two_pixels_have_a_closed_form() -> None:
    """min ½‖x − y‖² + a|x_2 − x_1| moves both pixels by a towards each other, until they meet."""
    regularizer = NonsmoothTotalVariation(weight=0.1)
    problem = Variational(Identity(), regularizer, LeastSquares(), SquaredLoss())
    theta = join(regularizer=regularizer.init_params((1, 1, 2), keyed_generator("θ", 0)))
    y = torch.tensor([[0.0, 1.0], [0.0, 0.1]], dtype=torch.float64).view(2, 1, 1, 2)
    lower = problem.at(theta, (1, 1, 2)).on(y)
    found = solve(PDHG(), lower, lower.start(), 1e-9, limit=20_000)
    expected = torch.tensor([[0.1, 0.9], [0.05, 0.05]], dtype=torch.float64).view(2, 1, 1, 2)
    assert (found.x - expected).abs().max() <= 1e-8


@pytest.mark.parametrize("operator", [Identity(), Gain(log_gain=0.2)], ids=["in G", "a block"])
def test_the_gap_bounds_the_error(operator: Operator) -> None:
    lower, _ = _lower(NonsmoothTotalVariation(), _theta(NonsmoothTotalVariation()), operator)
    exact = solve(PDHG(), lower, lower.start(), 1e-8, limit=100_000).x
    for tol in (1.0, 1e-1, 1e-2, 1e-3):
        found = solve(PDHG(), lower, lower.start(), tol, limit=100_000)
        assert bool((lower.mu * norm(found.x - exact) <= found.residual + 1e-7).all())
        assert bool((lower.energy(found.x) >= lower.energy(exact) - 1e-9).all())


@pytest.mark.parametrize(
    "regularizer",
    [
        NonsmoothTotalVariation(0.03),
        NonsmoothFieldOfExperts(filters=3, kernel_size=3, weight=0.01, start="random"),
    ],
    ids=["tv", "foe"],
)
def test_piggyback_agrees_with_central_differences(regularizer: Regularizer) -> None:
    theta = _theta(regularizer)
    weights = torch.tensor([0.5, 1.5], dtype=torch.float64)

    def value(moved: Theta) -> float:
        lower, x_true = _lower(regularizer, moved)
        x = solve(PDHG(), lower, lower.start(), 1e-9, limit=100_000).x
        return float(weights @ SquaredDistance(x_true).value(x))

    lower, x_true = _lower(regularizer, theta)
    ask = Ask(lower, SquaredDistance(x_true), lower.start(), lower.start(), weights, Accuracy(1e-8))
    z = Piggyback(iteration_limit=200_000).estimate(ask).gradient
    for k, (name, part) in enumerate(theta.items()):
        d = torch.randn(part.shape, dtype=torch.float64, generator=keyed_generator("d", k)) / math.sqrt(
            part.numel()
        )
        ends = [value({**theta, name: part + t * d}) for t in (1e-5, -1e-5)]
        quotient, claimed = (ends[0] - ends[1]) / 2e-5, float((z[name] * d).sum())
        assert claimed == pytest.approx(quotient, rel=1e-3, abs=1e-5)


def test_tgv_of_an_affine_image_is_zero() -> None:
    regularizer = TotalGeneralizedVariation()
    theta = regularizer.init_params(SHAPE, keyed_generator("θ", 0))
    rows, columns = torch.meshgrid(torch.arange(7.0).double(), torch.arange(8.0).double(), indexing="ij")
    slopes = [torch.full_like(rows, slope) for slope in (-0.2, 0.3)]
    x = torch.stack([0.3 * rows - 0.2 * columns, *slopes]).unsqueeze(0)
    assert float(regularizer.energy(theta, x).abs().max()) <= 1e-12
    assert float(regularizer.energy(theta, x.roll(1, dims=3))) > 0.1
