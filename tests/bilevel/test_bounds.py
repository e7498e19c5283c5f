"""The estimated error bound of a hypergradient against its true error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from _pytest.mark import ParameterSet
from helpers import REGULARIZERS, SOLVERS, flat, initial, normal, oracle_for, small_foe
from torch import Tensor

from blt_builtins.data.dead_leaves import DeadLeaves
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.linear import smallest_ritz
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Theta
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.testing import full_batch, make_oracle

Draw = Callable[[Regularizer, int], dict[str, Tensor]]

COUNT = 20
SIDE = 16


@cache
def images() -> Tensor:
    return DeadLeaves(count=COUNT, size=SIDE, cache=False).clean(range(COUNT))


def natural(prior: Regularizer, solver: str) -> BilevelOracle:
    """Denoising of natural-looking images."""
    return make_oracle(images(), prior, SOLVERS[solver](), CGIFT(), noise=25 / 255)


def single(i: int) -> Batch:
    """f_i alone."""
    return Batch([i], [float(COUNT)])


def perturbed(prior: Regularizer, seed: int) -> dict[str, Tensor]:
    """θ_0 moved at random, logarithms by about 0.5 and kernels by their own size."""
    generator = torch.Generator().manual_seed(seed)
    start = prior.init_params((3, 8, 8), generator)
    moves = {name: torch.randn(value.shape, generator=generator).double() for name, value in start.items()}
    size = {name: value.square().mean().sqrt() if value.ndim > 2 else 0.5 for name, value in start.items()}
    return prior.project({name: value + size[name] * moves[name] for name, value in start.items()})


def learned(prior: Regularizer, seed: int) -> dict[str, Tensor]:
    """A few steps of gradient descent from θ_0: filters that have begun to fit images."""
    oracle, theta = natural(prior, "mm"), join(regularizer=initial(prior))
    asked = oracle.on(full_batch(oracle))
    for _ in range(25):
        z = asked.hypergradient(theta, Accuracy(0.1), Accuracy(0.1)).gradient
        theta = oracle.problem.project({name: value - 3e-2 * z[name] for name, value in theta.items()})
    return split(theta, "regularizer")


@cache
def truth(prior: Callable[[], Regularizer], draw: Draw, seed: int) -> tuple[Theta, dict[int, Tensor]]:
    """A θ and its hypergradients for a third of the images."""
    theta = join(regularizer=draw(prior(), seed))
    exact = natural(prior(), "mm")
    exact.on(full_batch(exact)).hypergradient(
        theta, Accuracy(1e-10), Accuracy(1e-10)
    )  # a warm start for what follows
    return theta, {
        i: flat(exact.on(single(i)).hypergradient(theta, Accuracy(1e-10), Accuracy(1e-10)).gradient)
        for i in range(seed, COUNT, 3)
    }


def _settings() -> Iterator[ParameterSet]:
    """Every two of a regularizer, a solver and a θ meet in the quick ones."""
    priors, solvers = [FieldOfExperts, TotalVariation], ["agd", "mm"]
    for a, prior in enumerate(priors):
        for b, solver in enumerate(solvers):
            for c, (draw, seeds) in enumerate([(perturbed, (0,)), (learned, (0,)), (perturbed, (0, 1, 2))]):
                quick = c < 2 and (a + b + c) % 2 == 0
                yield pytest.param(prior, solver, draw, seeds, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("prior", "solver", "draw", "seeds"), list(_settings()))
def test_bound_is_above_the_error_and_within_a_factor_of_100(
    prior: Callable[[], Regularizer], solver: str, draw: Draw, seeds: Sequence[int]
) -> None:
    ratios = []
    for seed in seeds:
        theta, true = truth(prior, draw, seed)
        for tol in (1.0, 0.1, 1e-2, 1e-4):
            oracle = natural(prior(), solver)
            for i in true:
                result = oracle.on(single(i)).hypergradient(theta, Accuracy(tol), Accuracy(tol), bound=True)
                assert result.bound_kind == "estimated" and result.bound is not None
                ratios.append(result.bound / float((flat(result.gradient) - true[i]).norm()))
    assert len(ratios) > 25
    assert sum(1 <= ratio <= 100 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)


@pytest.mark.parametrize("strong_convexity", [0.0, 0.05])
def test_bound_of_a_deblurring_problem_holds_where_no_strong_convexity_is_known(
    strong_convexity: float,
) -> None:
    prior, blur, ratios = FieldOfExperts(weight=1e-2), Blur(size=5, sigma=1.0), []
    settings = {"operator": blur, "noise": 5 / 255, "strong_convexity": strong_convexity}
    theta = join(regularizer=initial(prior))
    exact, oracle = (make_oracle(images(), prior, SOLVERS["mm"](), CGIFT(), **settings) for _ in range(2))
    for i in range(8):
        result = oracle.on(single(i)).hypergradient(theta, Accuracy(1e-3), Accuracy(1e-3), bound=True)
        true = exact.on(single(i)).hypergradient(theta, Accuracy(1e-9), Accuracy(1e-9))
        ratios.append((result.bound or 0.0) / float((flat(result.gradient) - flat(true.gradient)).norm()))
    assert min(ratios) >= 1, ratios


def test_the_smallest_ritz_value_lies_within_the_spectrum_and_finds_its_end() -> None:
    matrices = [
        normal(9, 9) @ normal(9, 9).T,
        torch.eye(9).double() * 2,
        torch.diag(torch.arange(1.0, 10.0).double()),
    ]
    system = Dense(torch.stack(matrices))
    smallest = torch.linalg.eigvalsh(system.matrix)[:, 0]
    start = normal(3, 9)
    few, all_of_them = smallest_ritz(system, start, 4), smallest_ritz(system, start, 9)
    assert bool((few >= smallest - 1e-9).all()) and bool((all_of_them <= few + 1e-9).all())
    assert all_of_them.tolist() == pytest.approx(smallest.tolist(), rel=1e-6)
    assert smallest_ritz(system, torch.zeros_like(start), 3).isfinite().all()


@dataclass(frozen=True)
class Dense:
    """Matrices, one a sample."""

    matrix: Tensor

    def hvp(self, v: Tensor) -> Tensor:
        return (self.matrix @ v[..., None])[..., 0]

    def take(self, index: Tensor) -> Dense:
        return Dense(self.matrix[index])


@pytest.mark.parametrize("prior", REGULARIZERS)
def test_bound_vanishes_with_the_tolerances_and_needs_no_graph(prior: str) -> None:
    theta = join(regularizer=initial(REGULARIZERS[prior]()))
    bounds = []
    for tol in (1e-2, 1e-4, 1e-6):
        oracle = oracle_for(REGULARIZERS[prior]())
        result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(tol), Accuracy(tol), bound=True)
        bounds.append(result.bound or 0.0)
        assert (
            oracle.lipschitz_estimates.rows is not None and not oracle.lipschitz_estimates.rows.requires_grad
        )
    assert bounds[1] < 0.05 * bounds[0] and bounds[2] < 0.05 * bounds[1]


def test_bound_of_the_mean_is_the_weighted_mean_of_the_bounds() -> None:
    theta, weights = join(regularizer=initial(small_foe())), (0.5, 2.0, 0.7)
    each = [
        oracle_for(small_foe())
        .on(Batch([i], [weights[i]]))
        .hypergradient(theta, Accuracy(1e-2), Accuracy(1e-2), bound=True)
        .bound
        for i in range(3)
    ]
    together = (
        oracle_for(small_foe())
        .on(Batch(range(3), weights))
        .hypergradient(theta, Accuracy(1e-2), Accuracy(1e-2), bound=True)
    )
    assert together.bound == pytest.approx(sum(bound or 0.0 for bound in each), rel=1e-9)


def test_directions_that_a_linear_constraint_holds_do_not_count() -> None:
    """Brightening all images changes no response of zero-mean kernels, hence neither z nor its bound."""
    foe, theta = small_foe(), join(regularizer=initial(small_foe()))
    images = torch.rand(2, 3, 10, 12, generator=torch.Generator().manual_seed(0)) / 10
    bounds = []
    for brightness in (0.0, 0.9):
        oracle = make_oracle(images + brightness, foe, SOLVERS["mm"](), CGIFT())
        result = oracle.on(full_batch(oracle)).hypergradient(
            theta, Accuracy(1e-3), Accuracy(1e-3), bound=True
        )
        bounds.append(result.bound)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-3)


def test_constants_are_kept_where_the_start_is_already_the_solution() -> None:
    theta = join(regularizer=initial(small_foe()))
    oracle = oracle_for(small_foe())
    batch = oracle.on(full_batch(oracle))
    first = batch.hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6), bound=True)
    again = batch.hypergradient(
        theta, Accuracy(1e-6), Accuracy(1e-6), bound=True
    )  # warm: no iteration, x̃ = x₀
    assert again.value.iterations == 0
    assert again.bound == pytest.approx(first.bound, rel=1e-6)
