"""shine: the inverse Hessian of lbfgs as an adjoint, its refinement, its cost and its partners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import lower_level, noisy, small_foe
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.shine import SHINE
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.lbfgs import LBFGS
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Effort, Steps
from bltoolbox.config.compatibility import find_misfits
from bltoolbox.config.recipe import parse_recipe
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images
from bltoolbox.testing.limits import ask_at, rough_inverse
from bltoolbox.testing.problems import Gain, SquaredDistance, variational

THETA = {"regularizer.log_weight": torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)}


TIGHT = Accuracy(1e-8)


def z_of(estimator: Any, effort: Effort = TIGHT, adjoint: Effort = TIGHT) -> tuple[Tensor, BilevelOracle]:
    oracle = make_oracle(smooth_images(3, (3, 6, 7)), Tikhonov(condition=100), LBFGS(memory=20), estimator)
    result = oracle.on(full_batch(oracle)).hypergradient(THETA, effort, adjoint)
    return result.gradient["regularizer.log_weight"], oracle


def error(estimator: Any) -> float:
    exact = z_of(CGIFT())[0]
    return float((z_of(estimator)[0] - exact).norm() / exact.norm())


def test_the_solvers_inverse_is_worth_more_than_a_multiple_of_the_identity_and_refinement_more_still() -> (
    None
):
    plain, refined, full = (error(SHINE(count)) for count in (0, 4, 200))
    assert plain < error(OneStep()) / 3
    assert refined < plain / 3 and full < 1e-7


def test_without_refinement_it_costs_one_hessian_product_and_with_it_what_was_requested() -> None:
    _, oracle = z_of(SHINE())
    assert oracle.cost.hessian_products == 3 and oracle.cost.linear_iterations == 0
    _, oracle = z_of(SHINE(2))
    assert oracle.cost.linear_iterations == 6
    _, oracle = z_of(SHINE(2), Steps(30), Steps(5))
    assert oracle.cost.linear_iterations == 15


@pytest.mark.parametrize("refinement", [0, 3])
def test_the_residual_is_that_of_its_adjoint(refinement: int) -> None:
    lower, x_true = lower_level(small_foe(), noisy(2)), noisy(2, seed=1)
    ask = ask_at(lower, SquaredDistance(x_true), lower.start(), torch.ones(2, dtype=torch.float64), 1e-12)
    found = SHINE(refinement).estimate(ask)
    assert found.adjoint is not None
    left = ask.upper.gradient(ask.solution) - lower.linearize(ask.solution).hvp(found.adjoint)
    torch.testing.assert_close(found.residual, left.flatten(1).norm(dim=1))


def test_entries_held_by_a_constraint_are_those_of_the_exact_adjoint() -> None:
    """For solvers with an inverse Hessian and a constraint: the inverse knows nothing of the constraint."""
    y = noisy(2) * 3
    problem = variational(Gain(), Tikhonov(condition=10), "box")
    lower = problem.at(THETA, y.shape[1:]).on(y)
    x = lower.project(Tikhonov(condition=10).solution({"log_weight": THETA["regularizer.log_weight"]}, y))
    ask = ask_at(lower, SquaredDistance(y), x, torch.ones(2, dtype=torch.float64), 1e-10)
    assert ask.inverse is not None and lower.free(x, lower.gradient(x)) is not None
    exact, found = (estimator.estimate(ask) for estimator in (CGIFT(), SHINE(500)))
    torch.testing.assert_close(found.adjoint, exact.adjoint, rtol=1e-7, atol=1e-9)
    free = lower.linearize(x).free
    assert free is not None and not bool(free.all())
    plain = SHINE().estimate(ask).adjoint
    assert plain is not None
    rough = rough_inverse(lower, x, ask.upper.gradient(x))
    torch.testing.assert_close(plain, torch.where(free, rough, ask.upper.gradient(x)))


def test_a_solver_without_an_inverse_is_refused_with_an_alternative() -> None:
    registry = load_registry()
    text = "data: photos\nregularizer: tv\nlower_solver: agd\nhypergradient: shine\nbudget: {steps: 1}\n"
    with pytest.raises(RecipeError, match=r"'shine' needs a lower_solver with inverse.*'agd'.*; use lbfgs"):
        parse_recipe(text, registry=registry)
    fine = parse_recipe(text.replace("agd", "lbfgs"), registry=registry)
    assert find_misfits(vars(fine), registry) == []
    with pytest.raises(BltError, match="use lower_solver lbfgs"):
        oracle = make_oracle(smooth_images(1), Tikhonov(), AGD(), SHINE())
        oracle.on(full_batch(oracle)).hypergradient(THETA, Accuracy(0.1), Accuracy(0.1))
