"""Certified constants are true, certified bounds are never exceeded, and the log says which is which."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import BOUNDARIES, estimate_at, initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.blur import Blur
from bltoolbox import run
from bltoolbox.bilevel.bounds import certified_bound
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.tensors import norm, theta_norm
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.testing import SquaredDistance, smooth_images

SHAPE = (3, 7, 8)
RADIUS = 0.05


def regularizer(name: str, seed: int) -> Regularizer:
    if name.startswith("tv"):
        return small_tv(name.partition(" ")[2])
    smoothing, basis = ("shared", "per-filter")[seed % 2], ("dct", "pixel")[seed // 2 % 2]
    return small_foe(name, smoothing=smoothing, basis=basis)


def case(name: str, seed: int) -> tuple[ImageLower, SquaredDistance, Tensor]:
    """A problem with random θ and data, and its minimiser to rounding."""
    chosen = regularizer(name, seed)
    y = noisy(1, SHAPE, seed=seed)
    lower = lower_level(chosen, y, theta=initial(chosen, seed=seed))
    exact = solve(MemoryGradient(), lower, y, 1e-12, limit=5000).x
    return lower, SquaredDistance(smooth_images(1, SHAPE, seed=seed).double()), exact


def mixed_matrix(lower: ImageLower, x: Tensor) -> Tensor:
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
    constants = lower.constants(x, torch.full((1,), RADIUS, dtype=torch.float64))
    assert constants is not None
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
@pytest.mark.parametrize("seed", [k if k < 4 else pytest.param(k, marks=pytest.mark.slow) for k in range(8)])
def test_a_certified_bound_is_never_exceeded(name: str, seed: int) -> None:
    lower, upper, exact = case(name, seed)
    true = estimate_at(CGIFT(), lower, upper, exact, 1e-12).gradient
    for tol in (1.0, 1e-1, 1e-2, 1e-4, 1e-6):
        solution = solve(MemoryGradient(), lower, lower.y, tol)
        estimate = estimate_at(CGIFT(), lower, upper, solution.x, tol)
        error = theta_norm(estimate.gradient[key] - true[key] for key in true)
        assert estimate.adjoint is not None
        omega = certified_bound(
            lower, upper, solution.x, estimate.adjoint, solution.residual, estimate.residual
        )
        assert omega is not None and error <= float(omega)


@every_kind
def test_a_certified_bound_is_linear_for_accurate_solves(name: str) -> None:
    lower, upper, x = case(name, 0)
    constants = lower.constants(x, torch.zeros(1, dtype=torch.float64))
    assert constants is not None
    q = upper.gradient(x)
    small = 0.1 / constants.hessian_lipschitz

    def omega(scale: float) -> float:
        # With ‖q‖ and δ in proportion the bound is a function of the accuracy alone.
        bound = certified_bound(lower, upper, x, q, scale * small, scale * small)
        assert bound is not None
        return float(bound)

    for scale in (1e-1, 1e-2, 1e-3):
        assert omega(scale) / omega(scale / 10) == pytest.approx(10, rel=0.2)


def test_where_something_is_unknown_nothing_is_certified() -> None:
    lower, upper, x = case("valid", 0)
    q, zero = upper.gradient(x), torch.zeros(1, dtype=torch.float64)
    assert certified_bound(lower, upper, x, q, zero, zero) is not None
    boxed = lower_level(small_foe(), noisy(1, SHAPE), constraint="box")
    assert certified_bound(boxed, upper, x, q, zero, zero) is None
    blurred = lower_level(small_foe(), noisy(1, SHAPE), Blur(size=3))
    assert certified_bound(blurred, upper, x, q, zero, zero) is None, "no strong convexity is known"
    assert certified_bound(lower, Unbounded(upper.truth), x, q, zero, zero) is None


@dataclass(frozen=True)
class Unbounded(SquaredDistance):
    """A loss that knows no Lipschitz constant."""

    @property
    def lipschitz(self) -> None:  # type: ignore[override]
        return None


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
