"""Every upper-level optimizer, and every method for finite sums, finds the minimiser of a quadratic problem."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from blt_builtins.hypergradients.amigo import AmIGO
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.saba import SABA
from blt_builtins.hypergradients.soba import SOBA
from blt_builtins.hypergradients.stocbio import StocBiO
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.upper_optimizers.hoag import HOAG
from blt_builtins.upper_optimizers.iadam import IAdam
from blt_builtins.upper_optimizers.isgd import ISGD
from blt_builtins.upper_optimizers.isgd_ls import ISGDLineSearch
from blt_builtins.upper_optimizers.maid import MAID
from bltoolbox.bilevel.roles import HypergradientEstimator, UpperOptimizer
from bltoolbox.testing import full_batch
from bltoolbox.testing.finite_sum import QuadraticSum, make_sum_oracle, quadratic_sum


def distance(
    sums: QuadraticSum, optimizer: UpperOptimizer, estimator: HypergradientEstimator, steps: int
) -> float:
    """‖θ − θ*‖ after some steps, relative to that of the start."""
    oracle = make_sum_oracle(sums, AGD(), estimator)
    theta = {"theta": torch.zeros_like(sums.best)}
    state = optimizer.init(theta)
    for _ in range(steps):
        step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
        oracle.journal.clear()
        theta, state = step.theta, step.state
        if step.finished:
            break
    return float((theta["theta"] - sums.best).norm() / sums.best.norm())


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        (ISGD(step=2.0, tol=1e-4), 60),
        (ISGDLineSearch(tol=1e-4), 60),
        (IAdam(step=0.1, step_decay=0.5, tol=1e-4), 150),
        (HOAG(step=1.0, tol=1e-2), 60),
        (MAID(), 40),
    ],
    ids=["isgd", "isgd-ls", "iadam", "hoag", "maid"],
)
def test_every_optimizer_reaches_the_minimiser(optimizer: UpperOptimizer, steps: int) -> None:
    assert distance(quadratic_sum(rho=0.3), optimizer, CGIFT(), steps) < 0.02


def test_saba_reaches_the_minimiser_with_fixed_steps() -> None:
    assert distance(quadratic_sum(rho=0.3), ISGD(step=0.2), SABA(), 400) < 0.02


@pytest.mark.parametrize(
    ("make", "step", "steps"),
    [
        (lambda rho: StocBiO(lower_step=rho), 1.0, 200),
        (lambda rho: AmIGO(step=rho, lower_step=rho), 1.0, 200),
        (lambda rho: SOBA(step=rho), 0.2, 800),
    ],
    ids=["stocbio", "amigo", "soba"],
)
def test_methods_without_variance_reduction_approach_the_minimiser_as_their_steps_shrink(
    make: Callable[[float], HypergradientEstimator], step: float, steps: int
) -> None:
    """The noise of x biases z in proportion to the step on x: a fifth of it leaves less than half of the error."""
    optimizer = ISGD(step=step, step_decay=0.5 if steps == 200 else 0.2)
    long, short = (distance(quadratic_sum(rho=0.3), optimizer, make(rho), steps) for rho in (0.1, 0.02))
    assert short < 0.1 and short < long / 2
