"""The estimated error bound of a hypergradient against its true error."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import REGULARIZERS, SOLVERS, flat, initial, oracle_for, small_foe
from torch import Tensor

from blt_data.dead_leaves import DeadLeaves
from blt_hypergradients.cg_ift import CGIFT
from blt_regularizers.foe import FieldOfExperts
from bltoolbox.oracle import BilevelOracle
from bltoolbox.problem import join
from bltoolbox.results import Batch
from bltoolbox.testing import full_batch, make_oracle

COUNT = 20
FOE = FieldOfExperts(filters=10, kernel_size=7)
THETA = join(regularizer=FOE.init_params(3, torch.Generator()))


@cache
def images() -> Tensor:
    return DeadLeaves(count=COUNT, size=20, cache=False).clean(range(COUNT))


def natural(solver: str) -> BilevelOracle:
    """Denoising of natural-looking images with the initial cosine filters."""
    return make_oracle(images(), FOE, SOLVERS[solver](), CGIFT(), noise=25 / 255)


def single(i: int) -> Batch:
    """f_i alone."""
    return Batch([i], [float(COUNT)])


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    """∇f_i of each image."""
    oracle = natural("mm")
    oracle.on(full_batch(oracle)).hypergradient(THETA, 1e-10, 1e-10)  # a warm start for the next line
    results = [oracle.on(single(i)).hypergradient(THETA, 1e-10, 1e-10) for i in range(COUNT)]
    return [flat(result.gradient) for result in results]


@pytest.mark.parametrize(("solver", "tol"), [("agd", 1.0), ("mm", 1.0), ("mm", 1e-2)])
def test_bound_is_above_the_error_and_within_a_factor_of_100(
    exact: list[Tensor], solver: str, tol: float
) -> None:
    oracle, ratios = natural(solver), []
    for i in range(COUNT):
        result = oracle.on(single(i)).hypergradient(THETA, tol, tol, bound=True)
        assert result.bound_kind == "estimated" and result.bound is not None
        ratios.append(result.bound / float((flat(result.gradient) - exact[i]).norm()))
    assert sum(1 <= ratio <= 100 for ratio in ratios) >= 0.95 * COUNT, ratios


@pytest.mark.parametrize("prior", REGULARIZERS)
def test_bound_vanishes_with_the_tolerances_and_needs_no_graph(prior: str) -> None:
    theta = join(regularizer=initial(REGULARIZERS[prior]()))
    bounds = []
    for tol in (1e-2, 1e-4, 1e-6):
        oracle = oracle_for(REGULARIZERS[prior]())
        result = oracle.on(full_batch(oracle)).hypergradient(theta, tol, tol, bound=True)
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
        .hypergradient(theta, 1e-2, 1e-2, bound=True)
        .bound
        for i in range(3)
    ]
    together = (
        oracle_for(small_foe()).on(Batch(range(3), weights)).hypergradient(theta, 1e-2, 1e-2, bound=True)
    )
    assert together.bound == pytest.approx(sum(bound or 0.0 for bound in each), rel=1e-9)


def test_directions_that_a_linear_constraint_holds_do_not_count() -> None:
    """Brightening all images changes no response of zero-mean kernels, hence neither z nor its bound."""
    foe, theta = small_foe(), join(regularizer=initial(small_foe()))
    images = torch.rand(2, 3, 10, 12, generator=torch.Generator().manual_seed(0)) / 10
    bounds = []
    for brightness in (0.0, 0.9):
        oracle = make_oracle(images + brightness, foe, SOLVERS["mm"](), CGIFT())
        result = oracle.on(full_batch(oracle)).hypergradient(theta, 1e-3, 1e-3, bound=True)
        bounds.append(result.bound)
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-3)


def test_constants_are_kept_where_the_start_is_already_the_solution() -> None:
    theta = join(regularizer=initial(small_foe()))
    oracle = oracle_for(small_foe())
    batch = oracle.on(full_batch(oracle))
    first = batch.hypergradient(theta, 1e-6, 1e-6, bound=True)
    again = batch.hypergradient(theta, 1e-6, 1e-6, bound=True)  # warm: no iteration, x̃ = x₀
    assert again.value.iterations == 0
    assert again.bound == pytest.approx(first.bound, rel=1e-6)
