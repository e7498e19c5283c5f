"""f2sa and bome: against references written from the papers, in their limits, and in the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from toy_regressions import (
    LABELS,
    REFERENCES,
    STRENGTH,
    TABLE,
    TRAIN,
    Array,
    Bare,
    Reference,
    ToyTasks,
    ToyUpper,
)

from blt_builtins.hypergradients.bome import BOME
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.f2sa import F2SA
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Ask, Batch, Counter, Steps
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.errors import NumericalError
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images
from bltoolbox.testing.finite_sum import SumTasks, make_sum_oracle, quadratic_sum

L_G = ToyUpper.lipschitz
State = dict[str, Any]


def lipschitz(problem: Reference, theta: Array) -> float:
    norms = float(np.mean([TABLE[r] @ TABLE[r] for r in TRAIN]))
    if problem.name == "logits":
        return 0.5 * norms + STRENGTH
    assert set(LABELS) == {-1.0, 1.0}
    return 0.25 * norms + float(np.exp(theta).max())


def minimised(p: Reference, x: Array, theta: Array, weight: float, steps: int) -> Array:
    """Gradient steps on h + weight·g."""
    for _ in range(steps):
        slope = p.gradient(None, x, theta) + weight * p.slope(None, x)
        x = x - slope / (lipschitz(p, theta) + abs(weight) * L_G)
    return x


def f2sa_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    penalty = 20.0 * (call + 1) ** 0.5
    s["x"] = minimised(p, s["x"], theta, 0.0, 3)
    s["above"] = minimised(p, s.get("above", s["x"]), theta, 1 / penalty, 3)
    return penalty * (p.theta_gradient(s["above"], theta) - p.theta_gradient(s["x"], theta))


def central_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    s["x"] = minimised(p, s["x"], theta, 0.0, 3)
    for name, weight in (("above", 1 / 20), ("below", -1 / 20)):
        s[name] = minimised(p, s.get(name, s["x"]), theta, weight, 3)
    return 10.0 * (p.theta_gradient(s["above"], theta) - p.theta_gradient(s["below"], theta))


def bome_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    x, end = s["x"], s["x"]
    for _ in range(3):
        end = end - 0.2 * p.gradient(None, end, theta)
    inner, outer = p.gradient(None, x, theta), p.slope(None, x)
    change = p.theta_gradient(x, theta) - p.theta_gradient(end, theta)
    size = float((inner**2).sum() + (change**2).sum())
    multiplier = max(0.0, (3.0 * size - float((inner * outer).sum())) / size)
    s["x"] = x - 0.1 * (outer + multiplier * inner)
    return multiplier * change


METHODS: dict[str, tuple[HypergradientEstimator, Callable[..., Array]]] = {
    "f2sa": (F2SA(20.0, 0.5), f2sa_reference),
    "f2sa, central": (F2SA(20.0, 0.0, "central"), central_reference),
    "bome": (BOME(control=3.0, step=0.1, lower_step=0.2), bome_reference),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("method", METHODS)
def test_first_steps_equal_a_reference_from_the_paper(method: str, name: str) -> None:
    estimator, reference = METHODS[method]
    problem = REFERENCES[name]()
    oracle = BilevelOracle(Bare(), ToyTasks(name == "data cleaning"), GradientDescent(), estimator)
    theta = {problem.name: torch.tensor(problem.theta0)}
    state: State = {"x": problem.x0}
    moved = 0.0
    for call in range(6):
        z = oracle.on(Batch([0], [1.0])).hypergradient(theta, Steps(3), Steps(3)).gradient[problem.name]
        expected = reference(problem, state, theta[problem.name].numpy(), call)
        assert np.allclose(z.numpy(), expected, rtol=1e-9, atol=1e-13)
        x = oracle.solutions.get([0], torch.zeros(1, *problem.x0.shape, dtype=torch.float64))[0]
        assert np.allclose(x.numpy(), state["x"], rtol=1e-10, atol=1e-14)
        theta = {problem.name: theta[problem.name] - 0.5 * z}
        moved += float(z.norm())
    assert moved > 1e-3


SUMS = quadratic_sum(blocks=1, upper_blocks=1)
THETA = {"theta": torch.linspace(-0.4, 0.5, 5, dtype=torch.float64)}


def error(estimator: HypergradientEstimator) -> float:
    oracle = make_sum_oracle(SUMS, AGD(), estimator)
    z = oracle.on(full_batch(oracle)).hypergradient(THETA, Accuracy(1e-9), Accuracy(1e-9)).gradient["theta"]
    expected = SUMS.value_gradient(THETA).mean(0)
    return float((z - expected).norm() / expected.norm())


def test_the_bias_of_forward_differences_is_of_first_and_that_of_central_ones_of_second_order() -> None:
    first = [error(F2SA(penalty, 0.0)) for penalty in (20.0, 200.0)]
    second = [error(F2SA(penalty, 0.0, "central")) for penalty in (20.0, 200.0)]
    assert 8 < first[0] / first[1] < 12 and 80 < second[0] / second[1] < 120
    assert second[0] < first[0] / 5


def test_the_penalty_of_f2sa_grows_from_call_to_call() -> None:
    """After 999 calls with exponent 1/3, λ and the accuracy of z are ten times as large."""
    oracle = make_sum_oracle(SUMS, AGD(), F2SA(20.0, 1 / 3))
    oracle.charge(type(oracle.cost)(hypergradients=999))
    z = oracle.on(full_batch(oracle)).hypergradient(THETA, Accuracy(1e-9), Accuracy(1e-9)).gradient["theta"]
    expected = SUMS.value_gradient(THETA).mean(0)
    assert float((z - expected).norm() / expected.norm()) == pytest.approx(error(F2SA(200.0, 0.0)), rel=1e-4)


@pytest.mark.parametrize("difference", ["forward", "central"])
def test_the_accuracy_of_f2sa_is_that_which_was_requested(difference: Any) -> None:
    """The error beyond the bias is at most ‖B‖δ: solves are as accurate as the division by 1/λ requires."""
    oracle = make_sum_oracle(SUMS, GradientDescent(), F2SA(200.0, 0.0, difference))
    exact = make_sum_oracle(SUMS, AGD(), F2SA(200.0, 0.0, difference))
    batch = full_batch(oracle)
    for tol in (1e-1, 1e-2, 1e-3):
        result = oracle.on(batch).hypergradient(THETA, Accuracy(1.0), Accuracy(tol))
        limit = exact.on(batch).hypergradient(THETA, Accuracy(1e-10), Accuracy(1e-9))
        lower, _ = oracle.tasks.at(THETA, Counter()).on(range(3))
        # ‖B‖ ≤ max e^θ d |x| for this problem.
        x = SUMS.solution(THETA)
        gain = float((THETA["theta"].exp() * SUMS.d.mean(1) * x).abs().max())
        assert float((result.gradient["theta"] - limit.gradient["theta"]).norm()) <= 2 * gain * tol
        assert result.residual <= tol * float(lower.mu.max())


def test_f2sa_counts_gradients_and_derivatives_in_theta_and_no_hessian() -> None:
    oracle = make_sum_oracle(SUMS, GradientDescent(), F2SA())
    oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(4), Steps(6))
    cost = oracle.cost
    assert cost.lower_iterations == 3 * (4 + 6) and cost.linear_iterations == 0
    assert cost.hessian_products == cost.mixed_products == 0 and cost.theta_gradients == 6


def test_the_path_of_f2sa_does_not_depend_on_the_scale_of_the_loss() -> None:
    theta = {"regularizer.log_weight": torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)}
    oracle = make_oracle(smooth_images(2, (3, 6, 7)), Tikhonov(condition=10), AGD(), CGIFT())
    lower, upper = oracle.tasks.at(theta, Counter()).on(range(2))
    asks = [
        Ask(lower, one, lower.start(), lower.start(), torch.ones(2, dtype=torch.float64), Accuracy(1e-7 * s),
            minimise=oracle.minimise)
        for s, one in ((1.0, upper), (1e3, type(upper)(upper.truth, 1e3)))
    ]  # fmt: skip
    plain, scaled = (F2SA().estimate(ask).gradient["regularizer.log_weight"] for ask in asks)
    torch.testing.assert_close(scaled, 1e3 * plain, rtol=1e-6, atol=0)


def test_central_differences_of_a_lower_level_that_is_not_convex_are_refused() -> None:
    with pytest.raises(NumericalError, match=r"λμ > L_g; raise hypergradient\.penalty"):
        error(F2SA(0.1, 0.0, "central"))


def test_bome_ends_where_its_theory_says() -> None:
    """At a fixed θ, x is the minimiser of h + g/λ with λ = η(1 + ‖∇_x g‖²/‖z‖²), if g does not depend on θ."""
    sums = quadratic_sum(tasks=1, blocks=1, upper_blocks=1, rho=0.0)
    oracle = make_sum_oracle(sums, AGD(), BOME(control=2.0, lower_steps=60))
    for _ in range(80):
        z = oracle.on(full_batch(oracle)).hypergradient(THETA, Accuracy(0.1), Accuracy(0.1)).gradient["theta"]
    lower, upper = SumTasks(sums).at(THETA, Counter()).on([0])
    x = oracle.solutions.get([0], lower.start())
    slope = upper.gradient(x)
    multiplier = 2.0 * (1 + float(slope.square().sum() / z.square().sum()))
    torch.testing.assert_close(lower.gradient(x), -slope / multiplier, rtol=1e-2, atol=0)


def test_bome_at_an_exact_minimiser_has_no_division_by_zero() -> None:
    lower, upper = SumTasks(SUMS).at(THETA, Counter()).on(range(3))
    hessian = SUMS.hessian(THETA["theta"])
    # b chosen so that ∇h is exactly zero at x = 0.
    x = torch.zeros(3, 5, dtype=torch.float64)
    still = type(lower)(lower.ids, lower.theta, lower.counter, type(SUMS)(**vars(SUMS) | {"b": 0 * SUMS.b}))
    assert bool((still.gradient(x) == 0).all()) and bool((hessian.diagonal(dim1=1, dim2=2) > 0).all())
    weights = torch.ones(3, dtype=torch.float64)
    found = BOME().estimate(Ask(still, upper, x, x, weights, Accuracy(0.1)))
    assert found.x is not None and bool(torch.isfinite(found.x).all())
    torch.testing.assert_close(found.gradient, upper.theta_gradient(x, weights))


def test_tasks_of_bome_have_multipliers_of_their_own() -> None:
    """z and x of a task are the same alone and beside others."""
    whole, alone = (make_sum_oracle(SUMS, AGD(), BOME()) for _ in range(2))
    for _ in range(3):
        z = whole.on(full_batch(whole)).hypergradient(THETA, Steps(5), Steps(1)).gradient["theta"]
        parts = [
            alone.on(Batch([i], [1.0])).hypergradient(THETA, Steps(5), Steps(1)).gradient["theta"]
            for i in range(3)
        ]
    torch.testing.assert_close(z, sum(parts), rtol=1e-12, atol=1e-14)


def test_bome_counts_its_gradients() -> None:
    oracle = make_sum_oracle(SUMS, AGD(), BOME())
    oracle.on(full_batch(oracle)).hypergradient(THETA, Steps(5), Steps(1))
    cost = oracle.cost
    # T steps and one on x, the first of both with the same gradient.
    assert cost.lower_iterations == 18 and cost.gradients == 15 and cost.theta_gradients == 6
    assert cost.hessian_products == cost.mixed_products == cost.linear_iterations == 0
