"""The hypergradient of the whole stack against central differences of f and closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from helpers import (
    BOUNDARIES,
    SOLVERS,
    directions,
    estimate_at,
    flat,
    initial,
    kept,
    lower_level,
    measured,
    noisy,
    oracle_for,
    relative_error,
    small_foe,
    small_tv,
)
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Bound, Rows, Theta
from bltoolbox.bilevel.tensors import norm
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Gain, SquaredDistance, Tikhonov, full_batch

WEIGHTS = (0.3, 2.0, 1.1)
TIGHT = 1e-12

PRIORS: dict[str, Regularizer] = {
    **{f"foe-{boundary}": small_foe(boundary) for boundary in BOUNDARIES},
    "foe-per-filter": small_foe(smoothing="per-filter"),
    "tv": small_tv(),
    "tv-separate": small_tv("separate"),
}


class Echo(Operator):
    """A_θ x = x + θ·shift(x), periodic: a learned blur that knows no norm. ‖A‖² ∈ [(1−|θ|)², (1+|θ|)²]."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"echo": torch.full((1,), 0.3, dtype=torch.float64)}

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return x + theta["echo"] * x.roll(1, dims=3)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return y + theta["echo"] * y.roll(-1, dims=3)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        return (1 - theta["echo"].abs()).square().squeeze(), None


def check_against_differences(oracle: BilevelOracle, theta: dict[str, Tensor], h: float = 1e-4) -> None:
    """⟨z, d⟩ against central differences of f along z itself and along random admissible directions d."""
    batch = Batch(range(3), WEIGHTS)
    z = oracle.on(batch).hypergradient(theta, Accuracy(TIGHT), Accuracy(TIGHT)).gradient
    length = flat(z).norm()

    def value(t: float, d: Theta) -> float:
        moved = {name: part + t * d[name] for name, part in theta.items()}
        return oracle.on(batch).value(moved, Accuracy(TIGHT)).value

    along_z = {name: part / length for name, part in z.items()}
    for d in (along_z, *map(oracle.problem.project_gradient, directions(theta, 2))):
        differences = (value(h, d) - value(-h, d)) / (2 * h)
        assert abs(differences - flat(z) @ flat(d)) <= 1e-6 * length * flat(d).norm()


class TestAgainstCentralDifferences:
    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("prior", PRIORS)
    def test_regularizer(self, prior: str, solver: str) -> None:
        regularizer = PRIORS[prior]
        oracle = oracle_for(regularizer, solver, shape=(3, 8, 9))
        check_against_differences(oracle, join(regularizer=initial(regularizer)))

    @pytest.mark.parametrize("constraint", ["box", "nonnegative"])
    @pytest.mark.parametrize("prior", ["foe-valid", "foe-symmetric", "tv"])
    def test_constraint(self, prior: str, constraint: str) -> None:
        regularizer = PRIORS[prior]
        oracle = oracle_for(regularizer, "agd", shape=(3, 8, 9), noise=0.6, constraint=constraint)
        theta = join(regularizer=initial(regularizer))
        check_against_differences(oracle, theta)
        assert (kept(oracle.solutions, range(len(oracle.tasks))) == 0).any(), "it must be active"

    @pytest.mark.parametrize("solver", SOLVERS)
    def test_ridge(self, solver: str) -> None:
        oracle = oracle_for(PRIORS["foe-valid"], solver, shape=(3, 8, 9), strong_convexity=0.5)
        check_against_differences(oracle, join(regularizer=initial(PRIORS["foe-valid"])))

    @pytest.mark.parametrize("solver", SOLVERS)
    @pytest.mark.parametrize("operator", [Gain(learned=True, log_gain=0.2), Echo()])
    def test_learned_operator(self, operator: Operator, solver: str) -> None:
        true = operator.init_params((3, 8, 8), torch.Generator())
        regularizer = PRIORS["foe-valid"]
        oracle = oracle_for(
            regularizer, solver, shape=(3, 8, 9), operator=operator, operator_theta=true, noise=0.1
        )
        wrong = {name: value + 0.2 for name, value in true.items()}
        theta = join(regularizer=initial(regularizer), operator=wrong)
        check_against_differences(oracle, theta)
        z = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(TIGHT), Accuracy(TIGHT)).gradient
        assert all(z[f"operator.{name}"].abs() > 1e-3 for name in true), "the operator's part must matter"


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("condition", [1.0, 50.0])
def test_closed_form_on_a_quadratic(solver: str, condition: float) -> None:
    prior = Tikhonov(weight=0.5, condition=condition)
    oracle = oracle_for(prior, solver, noise=0.3)
    theta = {"log_weight": torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)}
    x_true, y = measured(oracle)
    result = oracle.on(Batch(range(3), WEIGHTS)).hypergradient(
        join(regularizer=theta), Accuracy(TIGHT), Accuracy(TIGHT)
    )
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    exact = join(regularizer=prior.value_gradient(theta, y, x_true, weights))
    assert relative_error(result.gradient, exact) < 1e-9
    assert abs(result.value.value - prior.value(theta, y, x_true, weights)) < 1e-9 * result.value.value


@pytest.mark.parametrize("prior", ["foe-valid", "tv"])
def test_chunks_do_not_change_the_result(prior: str) -> None:
    regularizer = PRIORS[prior]
    theta = join(regularizer=initial(regularizer))
    results = []
    for chunk in (1, 2, 3, 32):
        oracle = oracle_for(regularizer, chunk=chunk)
        results.append(
            oracle.on(Batch(range(3), WEIGHTS)).hypergradient(
                theta, Accuracy(1e-2), Accuracy(1e-2), bound=True
            )
        )
    for other in results[1:]:
        assert relative_error(other.gradient, results[0].gradient) < 1e-10
        assert other.bound == pytest.approx(results[0].bound, rel=1e-9)
        assert other.value.value == pytest.approx(results[0].value.value, rel=1e-12)
        assert other.value.iterations == results[0].value.iterations
        assert other.iterations == results[0].iterations


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prior", ["foe-valid", "tv"])
def test_error_shrinks_with_the_tolerances(prior: str, solver: str) -> None:
    theta = join(regularizer=initial(PRIORS[prior]))

    def at(tol: float) -> dict[str, Tensor]:
        oracle = oracle_for(PRIORS[prior], solver)  # a new one: no warm start
        return oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(tol), Accuracy(tol)).gradient

    exact = at(1e-12)
    errors = [relative_error(at(tol), exact) for tol in (1e-1, 1e-3, 1e-5, 1e-7)]
    # An accuracy 100 times higher leaves at most a tenth of the error, whatever the luck of the last iteration.
    assert all(later < earlier / 10 for earlier, later in pairwise(errors))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_warm_start_saves_iterations_and_gives_the_same(solver: str) -> None:
    regularizer = small_foe()
    theta = join(regularizer=initial(regularizer))
    near = {name: value + 1e-3 for name, value in theta.items()}
    near = join(regularizer=regularizer.project({name[12:]: value for name, value in near.items()}))
    warm, cold = oracle_for(regularizer, solver), oracle_for(regularizer, solver)
    warm.on(full_batch(warm)).hypergradient(theta, Accuracy(1e-9), Accuracy(1e-9))
    first, second = (
        o.on(full_batch(o)).hypergradient(near, Accuracy(1e-9), Accuracy(1e-9)) for o in (cold, warm)
    )
    assert second.value.iterations < 0.8 * first.value.iterations
    assert second.iterations < 0.8 * first.iterations
    assert relative_error(second.gradient, first.gradient) < 1e-7
    again = warm.on(full_batch(warm)).hypergradient(near, Accuracy(1e-8), Accuracy(1e-8))
    assert again.value.iterations == 0 and again.iterations == 0


@pytest.mark.parametrize("tol", [1.0, 1e-3, 1e-8])
@pytest.mark.parametrize("constraint", ["none", "box"])
def test_adjoint_residual_is_the_recomputed_one_and_meets_the_tolerance(tol: float, constraint: str) -> None:
    x = noisy(3, noise=0.4)
    lower = lower_level(small_foe(), x, constraint=constraint)
    x = lower.project(x)
    upper = SquaredDistance(noisy(3, noise=0.0))
    estimate = estimate_at(CGIFT(), lower, upper, x, tol)
    assert estimate.adjoint is not None
    recomputed = norm(upper.gradient(x) - lower.linearize(x).hvp(estimate.adjoint))
    assert (recomputed <= tol).all()
    torch.testing.assert_close(estimate.residual, recomputed, rtol=1e-9, atol=1e-15)


class Concave(Regularizer):
    """R(x) = −e^θ‖x‖²: h is concave for θ > log ½."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.zeros(1, dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return -theta["log_weight"].exp() * x.square().sum((1, 2, 3))


def test_non_positive_curvature_is_an_error_that_says_so() -> None:
    x = noisy(2)
    lower = lower_level(Concave(), x)
    with pytest.raises(NumericalError, match="curvature"):
        estimate_at(CGIFT(), lower, SquaredDistance(torch.zeros_like(x)), x, 1e-3)


def test_float32_agrees_with_float64() -> None:
    regularizer = small_foe()
    results = []
    for dtype, tol in ((torch.float64, TIGHT), (torch.float32, 1e-4)):
        oracle = oracle_for(regularizer, dtype=dtype)
        theta = {name: value.to(dtype) for name, value in join(regularizer=initial(regularizer)).items()}
        results.append(
            oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(tol), Accuracy(tol)).gradient
        )
    assert all(part.dtype == torch.float32 for part in results[1].values())
    assert relative_error(results[1], results[0]) < 1e-3
