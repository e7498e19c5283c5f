"""Certified constants are true, certified bounds are never exceeded, and the log says which is which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import BOUNDARIES, initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient
from bltoolbox import run
from bltoolbox.bilevel.bounds import can_certify, certified_bound
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import LowerLevel, UpperLoss
from bltoolbox.bilevel.roles import Regularizer
from bltoolbox.bilevel.tensors import norm, theta_norm
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.testing import smooth_images

SHAPE = (3, 7, 8)
RADIUS = 0.05


def regularizer(name: str, seed: int) -> Regularizer:
    if name.startswith("tv"):
        return small_tv(name.partition(" ")[2])
    smoothing, basis = ("shared", "per-filter")[seed % 2], ("dct", "pixel")[seed // 2 % 2]
    return small_foe(name, smoothing=smoothing, basis=basis)


def case(name: str, seed: int) -> tuple[LowerLevel, UpperLoss, Tensor]:
    """A problem with random θ and data, and its minimiser to rounding."""
    chosen = regularizer(name, seed)
    y = noisy(1, SHAPE, seed=seed)
    lower = lower_level(chosen, y, theta=initial(chosen, 3, seed))
    exact = solve(MemoryGradient(), lower, y, 1e-12, limit=5000).x
    return lower, UpperLoss(smooth_images(1, SHAPE, seed=seed).double()), exact


def mixed_matrix(lower: LowerLevel, x: Tensor) -> Tensor:
    """Bᵀ as a dense matrix, one pixel a row."""
    count = x[0].numel()
    pixels = torch.eye(count, dtype=x.dtype).view(count, *x.shape[1:])
    many = lower.take(torch.zeros(count, dtype=torch.long))
    parts = many.mixed_each(x.expand(count, -1, -1, -1).contiguous(), pixels)
    return torch.cat([part.detach().flatten(1) for part in parts.values()], dim=1)


every_kind = pytest.mark.parametrize("name", [*BOUNDARIES, "tv joint", "tv separate"])


@every_kind
@pytest.mark.parametrize("seed", range(4))
def test_constants_are_true_on_the_ball(name: str, seed: int) -> None:
    lower, _, x = case(name, seed)
    constants = lower.regularizer.constants(
        lower.at.regularizer_theta, x, torch.full((1,), RADIUS, dtype=torch.float64)
    )
    centre = mixed_matrix(lower, x)
    assert torch.linalg.matrix_norm(centre, 2) <= constants.mixed_norm
    for k in range(3):
        step = normal(*x.shape, seed=k)
        step = RADIUS * step / step.norm()
        change = torch.linalg.matrix_norm(mixed_matrix(lower, x + step) - centre, 2)
        assert change <= constants.mixed_lipschitz * RADIUS
        q = normal(*x.shape, seed=10 + k)
        bend = norm(lower.linearize(x + step).hvp(q) - lower.linearize(x).hvp(q)) / norm(q)
        assert bend <= constants.hessian_lipschitz * RADIUS


@every_kind
@pytest.mark.parametrize("seed", range(8))
def test_a_certified_bound_is_never_exceeded(name: str, seed: int) -> None:
    lower, upper, exact = case(name, seed)
    one = torch.ones(1, dtype=torch.float64)
    true = CGIFT().estimate(lower, upper, exact, one, 1e-12 * one, None).gradient
    for tol in (1.0, 1e-1, 1e-2, 1e-4, 1e-6):
        solution = solve(MemoryGradient(), lower, lower.y, tol)
        estimate = CGIFT().estimate(lower, upper, solution.x, one, tol * one, None)
        error = theta_norm(estimate.gradient[key] - true[key] for key in true)
        assert estimate.adjoint is not None
        omega = certified_bound(
            lower, upper, solution.x, estimate.adjoint, solution.residual, estimate.residual
        )
        assert error <= float(omega)


@every_kind
def test_a_certified_bound_is_linear_for_accurate_solves(name: str) -> None:
    lower, upper, x = case(name, 0)
    constants = lower.regularizer.constants(
        lower.at.regularizer_theta, x, torch.zeros(1, dtype=torch.float64)
    )
    q = upper.gradient(x)
    small = 0.1 / constants.hessian_lipschitz

    def omega(scale: float) -> float:
        # With ‖q‖ and δ in proportion the bound is a function of the accuracy alone.
        return float(certified_bound(lower, upper, x, q, scale * small, scale * small))

    for scale in (1e-1, 1e-2, 1e-3):
        assert omega(scale) / omega(scale / 10) == pytest.approx(10, rel=0.2)


def test_where_something_is_unknown_nothing_is_certified() -> None:
    lower, _, _ = case("valid", 0)
    assert can_certify(lower)
    boxed = lower_level(small_foe(), noisy(1, SHAPE), constraint="box")
    assert not can_certify(boxed)


@pytest.mark.parametrize("bound", ["estimated", "certified", "none"])
def test_the_log_has_distances_and_bounds_with_their_labels(bound: str, tmp_path: Path) -> None:
    recipe = recipe_from_dict(
        {
            "data": {"name": "dead-leaves", "count": 6, "size": 16},
            "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
            "sampler": {"size": 3},
            "validation": {"count": 0},
            "certificates": {"bound": bound, "every": 2},
            "dtype": "float64",
            "budget": {"steps": 4},
        }
    )
    run(recipe, out=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        assert 0 < record["distance_mean"] <= record["distance_max"] <= record["tol"]
        assert record["distance_kind"] == "certified"
        due = bound != "none" and number % 2 == 0
        assert ("bound_max" in record) == due
        if due:
            assert record["bound_kind"] == bound
            assert 0 < record["bound_mean"] <= record["bound_max"]
