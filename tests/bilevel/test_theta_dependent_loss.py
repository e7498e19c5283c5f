"""Losses g(x, θ) that depend on θ besides through x: their derivative is part of z, and of its error bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import directions, flat, relative_error, slope_theta
from test_penalty import recipe, registry
from torch import Tensor
from toy_penalties import BoxedWeight, MeasuredMisfit, PricedDistance, PricedGain, PricedRidge

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.minres import MINRES
from blt_builtins.hypergradients.neumann import Neumann
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.lower_solvers.agd import AGD
from bltoolbox.bilevel.bounds import certified_bound, gradient_norms
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Accuracy, Batch, Counter, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.variational import Variational, VariationalTasks
from bltoolbox.testing import Gain, Images, SquaredLoss, SquaredMisfit, full_batch, smooth_images
from bltoolbox.testing.problems import White
from bltoolbox.testing.recipe_check import check_recipe

TIGHT = Accuracy(1e-11)
ESTIMATORS: dict[str, HypergradientEstimator] = {
    "cg-ift": CGIFT(5000),
    "minres": MINRES(5000),
    "neumann": Neumann(5000),
    "unrolled": Unrolled(300),
    "one-step": OneStep(),
}


@dataclass(frozen=True)
class PricedTasks:
    """Tasks whose loss depends on the θ of the regularizer."""

    tasks: VariationalTasks
    theta: Theta | None = None
    counter: Counter | None = None

    shape = property(lambda self: self.tasks.shape)
    dtype = property(lambda self: self.tasks.dtype)
    device = property(lambda self: self.tasks.device)

    def __len__(self) -> int:
        return len(self.tasks)

    def prefetch(self, ids: Sequence[int]) -> None: ...

    def at(self, theta: Theta, counter: Counter) -> PricedTasks:
        return PricedTasks(self.tasks, theta, counter)

    def on(self, ids: Sequence[int]) -> tuple[Lower, Upper]:
        assert self.theta is not None and self.counter is not None
        lower, upper = self.tasks.at(self.theta, self.counter).on(ids)
        return lower, PricedDistance(upper.truth, self.theta)  # type: ignore[attr-defined]


def oracle_of(estimator: HypergradientEstimator, **options: Any) -> BilevelOracle:
    operator = Gain()
    samples = Samples(
        Images(smooth_images(4, (2, 6, 7))), operator, noise=White(0.1), seed=0, dtype=torch.float64
    )
    problem = Variational(
        operator, PricedRidge(), SquaredMisfit(), SquaredLoss(), samples={"training": samples}
    )
    tasks = PricedTasks(VariationalTasks(problem, samples))
    return BilevelOracle(problem, tasks, AGD(), estimator, iteration_limit=50_000, **options)


def misfit_oracle(estimator: HypergradientEstimator) -> BilevelOracle:
    """A loss in A_θ x, with an operator and a data term that learn."""
    operator = PricedGain()
    samples = Samples(
        Images(smooth_images(4, (2, 6, 7))), operator, noise=White(0.1), seed=0, dtype=torch.float64
    )
    problem = Variational(
        operator, PricedRidge(), BoxedWeight(), MeasuredMisfit(), samples={"training": samples}
    )
    return BilevelOracle(
        problem, VariationalTasks(problem, samples), AGD(), estimator, iteration_limit=50_000
    )


def initial(oracle: BilevelOracle) -> dict[str, Tensor]:
    return oracle.problem.init_params(torch.Generator())


@pytest.mark.parametrize("make", [oracle_of, misfit_oracle], ids=["by itself", "through the operator"])
@pytest.mark.parametrize("name", [name for name, one in ESTIMATORS.items() if one.exact])
def test_z_is_the_derivative_of_f(name: str, make: Any) -> None:
    oracle, batch = make(ESTIMATORS[name]), Batch([0, 3, 1], [0.4, 1.7, 0.9])
    theta = initial(oracle)
    z = oracle.on(batch).hypergradient(theta, TIGHT, TIGHT).gradient

    def value(moved: dict[str, Tensor]) -> float:
        return make(CGIFT()).on(batch).value(moved, TIGHT).value

    (d,) = directions(theta, 1)
    assert float(flat(z) @ flat(d)) == pytest.approx(float(slope_theta(value, theta, d)), rel=1e-6)


def test_one_step_is_the_derivative_of_its_step() -> None:
    """z = d/dθ g(x⁺(θ), θ) with x⁺ = x̃ − ∇h(x̃, θ)/L, x̃ and L held fixed."""
    oracle = oracle_of(OneStep())
    theta = initial(oracle)
    result = oracle.on(full_batch(oracle)).hypergradient(theta, TIGHT, TIGHT)
    tasks = oracle.tasks
    x = oracle.solutions.get(range(4), torch.zeros(4, *tasks.shape, dtype=torch.float64))
    fixed = tasks.at(theta, Counter()).on(range(4))[0].lipschitz.view(-1, 1, 1, 1)

    def value(moved: dict[str, Tensor]) -> float:
        lower, upper = tasks.at(moved, Counter()).on(range(4))
        mean = float(upper.value(x - lower.gradient(x) / fixed).mean())
        return mean + float(oracle.problem.penalty(moved) or 0)

    (d,) = directions(theta, 1)
    expected = float(slope_theta(value, theta, d))
    assert float(flat(result.gradient) @ flat(d)) == pytest.approx(expected, rel=1e-7)


def test_rows_of_single_tasks_add_up_to_z() -> None:
    oracle = oracle_of(CGIFT(5000))
    theta = initial(oracle)
    lower, upper = oracle.tasks.at(theta, Counter()).on(range(4))
    x = torch.rand(4, 2, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    rows = upper.theta_gradient_each(x)
    total = {name: (weights.view(-1, 1) * part).sum(0) for name, part in rows.items()}
    assert relative_error(total, upper.theta_gradient(x, weights)) < 1e-12
    q = torch.ones_like(x)
    one = torch.ones(1, dtype=torch.float64)
    expected = []
    for i in range(4):
        part, task = torch.tensor([i]), slice(i, i + 1)
        z = upper.take(part).theta_gradient(x[task], one)["regularizer.log_weight"]
        expected.append(z - lower.take(part).mixed(x[task], q[task], one)["regularizer.log_weight"])
    found = gradient_norms(lower, upper, x, q, oracle.problem.project_gradient)
    torch.testing.assert_close(found, torch.stack(expected).norm(dim=1))


@pytest.mark.parametrize("tol", [0.3, 3e-2, 3e-3])
def test_the_estimated_bound_covers_the_change_of_the_loss_in_theta(tol: float) -> None:
    exact = oracle_of(CGIFT(5000))
    theta = initial(exact)
    truth = exact.on(full_batch(exact)).hypergradient(theta, TIGHT, TIGHT).gradient
    oracle = oracle_of(CGIFT(5000))
    found = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(tol), Accuracy(tol), bound=True)
    assert found.bound is not None
    assert float((flat(found.gradient) - flat(truth)).norm()) <= found.bound


def test_there_is_no_certified_bound() -> None:
    oracle = oracle_of(CGIFT())
    lower, upper = oracle.tasks.at(initial(oracle), Counter()).on([0, 1])
    assert upper.depends_on_theta
    x, one = lower.start(), torch.ones(2, dtype=torch.float64)
    assert certified_bound(lower, upper, x, x, one, one) is None


@pytest.mark.parametrize("loss", ["whiteness", "recorrupted"])
def test_losses_in_measurements_are_differentiated_through_a_learned_operator(loss: str) -> None:
    found = check_recipe(recipe(upper_loss=loss), registry())
    assert found.passed and "loss" in {link.place for link in found.links}, found


def test_blt_check_finds_a_loss_whose_derivative_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = recipe(upper_loss="measured-misfit")
    found = check_recipe(one, registry())
    assert found.passed and "loss" in {link.place for link in found.links}, found
    monkeypatch.setattr(
        "bltoolbox.restoration.variational.LearnedForward.theta_gradient", lambda self, x, weights: {}
    )
    wrong = check_recipe(one, registry())
    assert (wrong.passed, wrong.source) == (False, "loss")
    assert "look at theta_gradient() of the loss" in wrong.verdict
