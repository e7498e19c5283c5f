"""single-loop: against loops written from the papers, its cost, what it refuses and what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_value_function_methods import lipschitz
from toy_regressions import REFERENCES, Bare, ToyTasks

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.f2sa import F2SA
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.soba import SOBA
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.upper_optimizers.single_loop import SingleLoop
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError
from bltoolbox.testing import full_batch
from bltoolbox.testing.finite_sum import make_sum_oracle, quadratic_sum

SUMS = quadratic_sum(blocks=1, upper_blocks=1)


@pytest.mark.parametrize("order", ["in-turn", "simultaneous"])
@pytest.mark.parametrize("name", REFERENCES)
def test_first_steps_equal_a_loop_from_the_paper(name: str, order: Any) -> None:
    p = REFERENCES[name]()
    oracle = BilevelOracle(Bare(), ToyTasks(name == "data cleaning"), GradientDescent(), Neumann())
    optimizer = SingleLoop(step=0.3, step_decay=0.5, iterations=2, adjoint_iterations=3, order=order)
    theta = {p.name: torch.tensor(p.theta0)}
    state = optimizer.init(theta)
    expected, x, q = p.theta0, p.x0, np.zeros_like(p.x0)
    for k in range(6):
        step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
        oracle.journal.clear()
        theta, state = dict(step.theta), step.state
        length, before = 1 / lipschitz(p, expected), (x, q)
        for _ in range(2):
            x = x - length * p.gradient(None, x, expected)
        at = x if order == "in-turn" else before[0]
        for _ in range(3):
            q = q + length * (p.slope(None, at) - p.product(None, at, expected, q))
        z = -p.mixed(
            None,
            *((x,) if order == "in-turn" else before[:1]),
            expected,
            q if order == "in-turn" else before[1],
        )
        expected = expected - 0.3 * (k + 1) ** -0.5 * z
        assert np.allclose(theta[p.name].numpy(), expected, rtol=1e-10, atol=1e-13)
    assert np.linalg.norm(expected - p.theta0) > 1e-3


@pytest.mark.parametrize("order", ["in-turn", "simultaneous"])
def test_a_step_costs_what_was_set_and_logs_the_residuals(order: Any) -> None:
    oracle = make_sum_oracle(SUMS, GradientDescent(), CGIFT(), strict=True, iteration_limit=1)
    optimizer, theta = SingleLoop(iterations=3, adjoint_iterations=2, order=order), {"theta": SUMS.best + 1}
    optimizer.step(theta, oracle.on(full_batch(oracle)), optimizer.init(theta))
    assert oracle.cost.lower_iterations == 9 and oracle.cost.linear_iterations == 6
    assert oracle.latest is not None and oracle.latest.value.short == {"steps": 3}
    assert oracle.certificate["lower_residual"] > 0 and oracle.certificate["adjoint_residual"] > 0


@pytest.mark.parametrize("estimator", [Unrolled(), OneStep(), F2SA()], ids=lambda one: type(one).__name__)
def test_estimators_without_previous_iterates_are_refused_only_simultaneously(
    estimator: HypergradientEstimator,
) -> None:
    theta = {"theta": SUMS.best + 1}
    for order, refused in (("simultaneous", True), ("in-turn", False)):
        oracle = make_sum_oracle(SUMS, GradientDescent(), estimator)
        optimizer = SingleLoop(order=order)  # type: ignore[arg-type]
        if refused:
            with pytest.raises(BltError, match="cannot be updated simultaneously; use cg-ift"):
                optimizer.step(theta, oracle.on(full_batch(oracle)), optimizer.init(theta))
            assert oracle.cost.computations == 0
        else:
            optimizer.step(theta, oracle.on(full_batch(oracle)), optimizer.init(theta))


def test_with_soba_the_order_is_that_of_soba() -> None:
    paths = []
    for order in ("simultaneous", "in-turn"):
        oracle = make_sum_oracle(SUMS, GradientDescent(), SOBA())
        optimizer, theta = SingleLoop(step=0.1, order=order), {"theta": SUMS.best + 1}  # type: ignore[arg-type]
        state = optimizer.init(theta)
        for _ in range(4):
            step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
            oracle.journal.clear()
            theta, state = dict(step.theta), step.state
        paths.append(theta["theta"])
    assert torch.equal(*paths)


def test_methods_whose_iterates_are_warm_starts_say_so(tmp_path: Path) -> None:
    registry = load_registry()
    needy = {
        one.name
        for kind in ("upper_optimizer", "hypergradient")
        for one in registry.components(kind)
        if "needs_memory" in one.signature().traits.flags
    }
    assert needy == {"single-loop", "stocbio", "amigo", "soba", "saba", "bome"}
