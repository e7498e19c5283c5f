"""``Lower.wrt``: every hypergradient component differentiates in the measurements of each task, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import initial, lower_level, noisy, normal, slope, small_foe, small_tv
from torch import Tensor

from blt_builtins.data_terms.poisson import Poisson
from blt_builtins.hypergradients.amigo import AmIGO
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.minres import MINRES
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.piggyback import Piggyback
from blt_builtins.hypergradients.saba import SABA
from blt_builtins.hypergradients.soba import SOBA
from blt_builtins.hypergradients.stocbio import StocBiO
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.pdhg import PDHG
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.tv_nonsmooth import NonsmoothTotalVariation
from bltoolbox.bilevel.implicit import Pairing
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Ask
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Constraint
from bltoolbox.testing import Gain, Tikhonov, variational

SHAPE = (1, 5, 6)


def minimise(lower: Lower, solver: LowerSolver | None = None) -> Tensor:
    solver = solver or LBFGS()
    tol = lower.gradient_tol(1e-10 if solver.by_gap else 1e-11)
    return solve(solver, lower, lower.start(), tol, limit=20_000).x


def derivative_in_y(make: Any, y: Tensor, v: Tensor, d: Tensor, solver: LowerSolver | None = None) -> Tensor:
    """⟨v_i, ∂x̂_i/∂y_i d_i⟩ of each task, by central differences."""

    def along(y: Tensor) -> Tensor:
        return (minimise(make(y), solver) * v).flatten(1).sum(1)

    # A step of the nonsmooth problem must not change which pixels are equal.
    return slope(along, y, d, 1e-5 if solver is not None and solver.by_gap else 1e-3)


def ask_for(
    lower: Lower, x: Tensor, v: Tensor, weights: Tensor | None = None, tol: float = 1e-10, **options: Any
) -> Ask:
    weights = torch.ones_like(lower.mu) if weights is None else weights
    return Ask(lower, Pairing(v), x, x, weights, Accuracy(tol), **options)


EXACT: dict[str, tuple[HypergradientEstimator, type[Regularizer] | Any, LowerSolver]] = {
    "cg-ift": (CGIFT(), small_foe, LBFGS()),
    "minres": (MINRES(), small_foe, LBFGS()),
    "neumann": (Neumann(terms=2000), small_foe, LBFGS()),
    "unrolled": (Unrolled(steps=800), small_foe, LBFGS()),
    "piggyback": (Piggyback(20_000), lambda: NonsmoothTotalVariation(weight=0.05), PDHG()),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_component_differentiates_in_y(name: str) -> None:
    estimator, regularizer, solver = EXACT[name]
    y, v, d = noisy(3, SHAPE), normal(3, *SHAPE, seed=1), normal(3, *SHAPE, seed=2)

    def make(y: Tensor) -> Lower:
        return lower_level(regularizer(), y)

    lower = make(y).wrt("y")
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    x, tol = minimise(lower, solver), 1e-7 if solver.by_gap else 1e-10
    gradient = estimator.estimate(ask_for(lower, x, v, weights, tol)).gradient
    expected = weights * derivative_in_y(make, y, v, d, solver)
    assert gradient["y"].shape == y.shape
    torch.testing.assert_close(
        (gradient["y"] * d).flatten(1).sum(1), expected, rtol=1e-4 if solver.by_gap else 1e-6, atol=1e-7
    )


def test_the_gradient_in_theta_is_what_it_is_without_inputs() -> None:
    y, v = noisy(2, SHAPE), normal(2, *SHAPE)
    lower = lower_level(small_foe(), y)
    x = minimise(lower)
    with_inputs = CGIFT().estimate(ask_for(lower.wrt("y"), x, v)).gradient
    alone = CGIFT().estimate(ask_for(lower, x, v)).gradient
    assert set(with_inputs) == {*alone, "y"}
    for name, part in alone.items():
        torch.testing.assert_close(with_inputs[name], part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", [OneStep(), CGIFT()])
def test_a_closed_form(estimator: HypergradientEstimator) -> None:
    """x̂ = y/(1 + w) for R = ½w‖x‖²; there the Hessian is a multiple of the identity, and one step is exact, too."""
    y, v = noisy(2, SHAPE), normal(2, *SHAPE)
    lower = lower_level(Tikhonov(), y, theta={"log_weight": torch.zeros(1)}).wrt("y")
    found = estimator.estimate(ask_for(lower, y / 2, v)).gradient["y"]
    torch.testing.assert_close(found, v / 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "estimator", [AmIGO(), SOBA(), SABA(), StocBiO()], ids=lambda one: type(one).__name__
)
def test_methods_that_move_x_approach_it(estimator: HypergradientEstimator) -> None:
    y, v = noisy(2, SHAPE), normal(2, *SHAPE)
    lower = lower_level(Tikhonov(), y, theta={"log_weight": torch.zeros(1)}).wrt("y")
    x, memory, found = lower.start(), {}, torch.zeros_like(y)
    kept = estimator.keeps(lower, Pairing(v))
    memory = {name: row.new_zeros(2, *row.shape[1:]) for name, row in kept.items()}
    for call in range(100):
        estimate = estimator.estimate(ask_for(lower, x, v, memory=memory, call=call))
        assert estimate.x is not None
        x, memory, found = estimate.x, estimate.memory, estimate.gradient["y"]
    torch.testing.assert_close(found, v / 2, rtol=0, atol=2e-2 * float(v.abs().max()))


@pytest.mark.parametrize("constraint", ["none", "nonnegative"])
def test_nonlinear_data_terms_and_constraints(constraint: Constraint) -> None:
    """For counts ∂²h/∂x∂y depends on x; pixels that a constraint holds do not move with y."""
    clean = noisy(2, SHAPE, noise=0.02)
    y = (clean - (0.45 if constraint == "nonnegative" else 0.0)).clamp_min(0.0) + 0.04
    v, d = normal(2, *SHAPE, seed=1), 0.01 * normal(2, *SHAPE, seed=2)

    problem = variational(Gain(), small_tv(), constraint, 0.5)
    problem = replace(problem, data_term=Poisson(peak=5, background=0.1))
    theta = join(regularizer=initial(small_tv(), SHAPE))

    def make(y: Tensor) -> Lower:
        return problem.at(theta, SHAPE).on(y)

    solver = AGD() if constraint == "nonnegative" else LBFGS()
    lower = make(y).wrt("y")
    x = minimise(lower, solver)
    if constraint == "nonnegative":
        assert bool((x == 0).any()) and bool((x > 0).any())
    found = CGIFT().estimate(ask_for(lower, x, v)).gradient["y"]
    expected = derivative_in_y(make, y, v, d, solver)
    torch.testing.assert_close((found * d).flatten(1).sum(1), expected, rtol=1e-4, atol=1e-9)


def test_some_of_the_tasks_have_their_rows_of_the_whole() -> None:
    y, q = noisy(3, SHAPE), normal(3, *SHAPE)
    lower = lower_level(small_foe(), y, operator=Blur(size=3, sigma=0.7)).wrt("y")
    x = y.clone()
    whole = lower.mixed(x, q, torch.ones(3, dtype=torch.float64))["y"]
    index = torch.tensor([2, 0])
    taken = lower.take(index).take(torch.tensor([0]))
    found = taken.mixed(x[2:], q[2:], torch.ones(1, dtype=torch.float64))["y"]
    torch.testing.assert_close(found[2], whole[2])
    assert found.shape == y.shape and not bool(found[:2].any())
    each = lower.mixed_each(x, q)["y"]
    torch.testing.assert_close(each.sum(0), whole)
    assert not bool(each[0, 1:].any())


def test_what_is_not_an_input_is_refused() -> None:
    lower = lower_level(small_foe(), noisy(1, SHAPE), operator=Gain())
    with pytest.raises(ValueError, match="no input 'z' with one row per task"):
        lower.wrt("z")
    with pytest.raises(ValueError, match="already has a parameter 'y'"):
        lower.wrt("y").wrt("y")
