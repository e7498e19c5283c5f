"""Bounds of f where no strong convexity is known: estimated, labelled, paid for, and not below the truth."""

from __future__ import annotations

import math

import pytest
from helpers import SOLVERS, initial

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.upper_optimizers.hoag import HOAG
from blt_builtins.upper_optimizers.maid import MAID
from bltoolbox.bilevel.bounds import RITZ_STEPS
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Step
from bltoolbox.bilevel.roles import HypergradientEstimator, UpperOptimizer
from bltoolbox.restoration.theta import join
from bltoolbox.testing import full_batch, make_oracle, smooth_images

PRIOR = TotalVariation(weight=0.002, nu=0.05)
THETA = join(regularizer=initial(PRIOR, 1))


def deblurring(
    solver: str = "mm", estimator: HypergradientEstimator | None = None, ridge: float = 0.0
) -> BilevelOracle:
    return make_oracle(
        smooth_images(3, (1, 16, 16)),
        PRIOR,
        SOLVERS[solver](),
        estimator or CGIFT(5000),
        operator=Blur(size=7, sigma=1.5),
        noise=5 / 255,
        strong_convexity=ridge,
        iteration_limit=100_000,
    )


def steps_and_truth(optimizer: UpperOptimizer, oracle: BilevelOracle, count: int) -> list[tuple[Step, float]]:
    """Steps, each with the decrease of f by tight solves."""
    exact = deblurring(ridge=oracle.problem.strong_convexity)
    reference, asked = exact.on(full_batch(exact)), oracle.on(full_batch(oracle))
    theta, state, found = THETA, optimizer.init(THETA), []
    before = reference.value(theta, Accuracy(1e-12)).value
    for _ in range(count):
        step = optimizer.step(theta, asked, state)
        assert step.finished is None
        theta, state = step.theta, step.state
        value = reference.value(theta, Accuracy(1e-12))
        reference.accept(value)
        found.append((step, before - value.value))
        before = value.value
    return found


@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_the_decreases_that_maid_logs_do_not_exceed_the_true_ones(ridge: float) -> None:
    oracle = deblurring(ridge=ridge)
    # A sixth step gains 1e-11, less than the reference can resolve where no strong convexity is known.
    for step, true in steps_and_truth(MAID(), oracle, 5):
        assert 0 < float(step.metrics["decrease"]) <= true
        assert step.metrics["decrease_kind"] == ("certified" if ridge else "estimated")
        assert step.metrics["certified"] == bool(ridge)
    assert (oracle.cost.power_iterations == 0) == bool(ridge)


def test_bounds_of_values_hold_and_are_paid_for() -> None:
    exact = deblurring()
    true = exact.on(full_batch(exact)).value(THETA, Accuracy(1e-8)).value
    for solver in ("agd", "mm"):
        for tol in (0.1, 1e-2, 1e-3):
            oracle = deblurring(solver)
            unasked = oracle.on(full_batch(oracle)).value(THETA, Accuracy(tol))
            assert unasked.upper == math.inf and not unasked.certified, "nothing is known without an estimate"
            before = oracle.cost
            value = oracle.on(full_batch(oracle)).value(THETA, Accuracy(tol), bound=True)
            assert value.lower <= true <= value.upper < math.inf and not value.certified
            assert oracle.cost.power_iterations - before.power_iterations == 3 * RITZ_STEPS
            assert oracle.cost.hessian_products - before.hessian_products == 3 * RITZ_STEPS


def test_a_hypergradient_without_adjoint_has_no_bound_but_its_value_does() -> None:
    oracle = deblurring(estimator=Unrolled(20))
    result = oracle.on(full_batch(oracle)).hypergradient(THETA, Accuracy(1e-2), Accuracy(1e-2), bound=True)
    assert result.bound is None and result.bound_kind is None
    assert result.value.value < result.value.upper < math.inf


def test_hoag_pays_for_the_allowances_of_its_values() -> None:
    oracle = deblurring()
    for _, true in steps_and_truth(HOAG(step=0.1, tol=1e-3), oracle, 3):
        assert true > 0
    assert oracle.cost.power_iterations >= 3 * 2 * 3 * RITZ_STEPS, "before and after each of three steps"
