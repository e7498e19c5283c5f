"""Every upper-level optimizer with every hypergradient finds the minimiser of problems with a closed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blt_builtins.hypergradients.amigo import AmIGO
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.saba import SABA
from blt_builtins.hypergradients.soba import SOBA
from blt_builtins.hypergradients.stocbio import StocBiO
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.upper_optimizers.isgd import ISGD
from blt_builtins.upper_optimizers.maid import MAID
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.roles import HypergradientEstimator, UpperOptimizer
from bltoolbox.config.block import Block
from bltoolbox.config.registry import Registered, load_registry
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images
from bltoolbox.testing.finite_sum import QuadraticSum, make_sum_oracle, quadratic_sum


def distance(
    sums: QuadraticSum, optimizer: UpperOptimizer, estimator: HypergradientEstimator, steps: int
) -> float:
    """‖θ − θ*‖ after some steps on a finite sum, relative to that of the start."""
    return walked(make_sum_oracle(sums, AGD(), estimator), optimizer, "theta", sums.best, steps)


def walked(oracle: BilevelOracle, optimizer: UpperOptimizer, name: str, best: Tensor, steps: int) -> float:
    """‖θ − θ*‖/‖θ*‖ after some steps from zero."""
    theta = {name: torch.zeros_like(best)}
    state = optimizer.init(theta)
    for _ in range(steps):
        step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
        oracle.journal.clear()
        theta, state = dict(step.theta), step.state
        if step.finished:
            break
    return float((theta[name] - best).norm() / best.norm())


def flags(component: Registered) -> tuple[str, ...]:
    return component.signature().traits.flags


REGISTRY = load_registry()
#: Options and steps, by optimizer; those of a new one are its defaults.
OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    "isgd": ({"step": 0.4, "tol": 1e-4}, 70),
    "isgd-ls": ({"tol": 1e-4}, 30),
    "iadam": ({"step": 0.3, "step_decay": 0.5, "beta1": 0.5, "tol": 1e-4}, 100),
    "hoag": ({"step": 0.3, "tol": 1e-2}, 30),
    "single-loop": ({"step": 0.3, "iterations": 2}, 80),
    "maid": ({}, 15),
}
#: Options with which an estimator has no bias to speak of.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "f2sa": {"penalty": 100.0, "difference": "central"},
    "shine": {"refinement": 5},
}
#: Methods with one step on x per call, whose z lags behind the values that a line search compares.
LAGGING = {"soba", "saba", "bome"}
SEARCHING = {"hoag", "isgd-ls"}
PAIRS = [
    (optimizer.name, estimator.name)
    for optimizer in REGISTRY.components("upper_optimizer")
    for estimator in REGISTRY.components("hypergradient")
    if optimizer.name != "random-search"  # reaches nothing in a few steps, by whatever estimator
    and not (optimizer.name in SEARCHING and estimator.name in LAGGING)
    and not ("needs_bound" in flags(optimizer) and "gives_adjoint" not in flags(estimator))
]


@pytest.mark.parametrize(("optimizer", "estimator"), PAIRS, ids=lambda name: str(name))
def test_every_optimizer_with_every_estimator_reaches_the_minimiser(optimizer: str, estimator: str) -> None:
    """The closed form has one parameter per channel. x and θ of bome move at comparable speeds, so that an error in
    proportion to the step remains."""
    options, steps = OPTIMIZERS.get(optimizer, ({}, 50))
    method = REGISTRY.build(Block("upper_optimizer", optimizer, options))
    assert closed_form_distance(method, estimator, steps) < (0.1 if estimator == "bome" else 0.02)


def closed_form_distance(optimizer: UpperOptimizer, estimator: str, steps: int) -> float:
    """‖θ − θ*‖ after some steps on images with a quadratic lower level, relative to that of the start."""
    hypergradient = REGISTRY.build(Block("hypergradient", estimator, ESTIMATORS.get(estimator, {})))
    oracle = make_oracle(smooth_images(2, (2, 3, 4)), Tikhonov(), LBFGS(), hypergradient, noise=0.3)
    samples = oracle.tasks.samples.batch(range(2))  # type: ignore[attr-defined]
    best = Tikhonov().minimiser(samples.y, samples.truth)["log_weight"]
    return walked(oracle, optimizer, "regularizer.log_weight", best, steps)


def test_the_error_of_bome_falls_with_the_step() -> None:
    long, short = (closed_form_distance(ISGD(step, tol=0.1), "bome", round(60 / step)) for step in (0.4, 0.1))
    assert short < 0.6 * long


def test_maid_reaches_the_minimiser_of_a_finite_sum() -> None:
    assert distance(quadratic_sum(rho=0.3), MAID(), CGIFT(), 40) < 0.02


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
