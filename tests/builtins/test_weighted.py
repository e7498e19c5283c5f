"""A regularizer with a weight at each place: the base where it is flat, bounds, hypergradients, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import hessian, initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.tikhonov import Tikhonov
from blt_builtins.regularizers.weighted import Weighted
from bltoolbox import load_recipe, run
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import RecipeError
from bltoolbox.plugin import Regularizer, join
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.testing import smooth_images
from bltoolbox.testing.recipe_check import check_recipe

SHAPE = (1, 7, 8)
BASES: dict[str, Callable[[], Regularizer]] = {
    "tv": small_tv,
    "foe valid": lambda: small_foe("valid"),
    "foe symmetric": lambda: small_foe("symmetric"),
    "tikhonov": lambda: Tikhonov(of="identity"),
}
TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "color=gray",
    "lower_solver=mm",
    "sampler={name: epoch, size: 3}",
    "upper_optimizer={name: isgd, step: 0.01}",
    "budget={steps: 2}",
    "device=cpu",
    "checkpoint.every=0",
]


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> Regularizer:
    return BASES[request.param]()


def at(base: Regularizer, w: Tensor) -> dict[str, Tensor]:
    return {"log_map": w} | join(base=initial(base, SHAPE))


def test_a_flat_map_is_a_factor_of_the_base(base: Regularizer) -> None:
    x, weighted = noisy(2, SHAPE), Weighted(base, grid=2)
    theta, own = at(base, torch.full((2, 2), 0.7).double()), initial(base, SHAPE)
    factor = torch.tensor(0.7).double().exp()
    torch.testing.assert_close(weighted.energy(theta, x), factor * base.energy(own, x))
    torch.testing.assert_close(weighted.gradient(theta, x), factor * base.gradient(own, x))
    v = normal(2, *SHAPE, seed=5)
    torch.testing.assert_close(weighted.linearize(theta, x)(v), factor * base.linearize(own, x)(v))


def test_each_place_has_its_weight(base: Regularizer) -> None:
    """R is linear in e^w, and its derivative in the weight of a place is the energy there."""
    x = noisy(1, SHAPE)
    places = base.density(initial(base, SHAPE), x)[0]
    w = normal(*places.shape, seed=3)
    weighted = Weighted(base, grid=None)
    expected = (w.exp() * places).sum()
    torch.testing.assert_close(weighted.energy(at(base, w), x)[0], expected)
    leaf = w.clone().requires_grad_()
    weighted.energy(at(base, leaf), x).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, w.exp() * places)


def test_bounds_hold_for_the_hessian(base: Regularizer) -> None:
    x, weighted = 0.01 * normal(1, *SHAPE, seed=4), Weighted(base, grid=3)
    theta = at(base, normal(3, 3, seed=6))
    eigenvalues = torch.linalg.eigvalsh(hessian(weighted, theta, x[0]))
    least, most = (getattr(weighted, name)(theta, SHAPE) for name in ("strong_convexity", "lipschitz"))
    assert float(least) <= float(eigenvalues.min()) + 1e-10
    assert float(eigenvalues.max()) <= float(most) + 1e-10


def test_solvers_agree(base: Regularizer) -> None:
    lower = lower_level(Weighted(base, grid=3), noisy(2, SHAPE), theta=at(base, normal(3, 3, seed=6)))
    x = [solve_cold(solver, lower, 1e-9, 20_000).x for solver in (AGD(), MemoryGradient())]
    torch.testing.assert_close(*x, rtol=0, atol=1e-8)


def test_it_smooths_where_its_weight_is_large() -> None:
    y = smooth_images(1, (1, 16, 16)).double() + 0.2 * normal(1, 1, 16, 16)
    theta = {"log_map": torch.tensor([[3.0, -5.0], [3.0, -5.0]]).double()} | join(base=initial(small_tv()))
    x = solve_cold(AGD(), lower_level(Weighted(small_tv(), grid=2), y, theta=theta), 1e-8, 20_000).x
    moved = (x - y).square().sum((0, 1, 2))
    assert moved[:4].sum() > 20 * moved[-4:].sum()


def test_it_can_be_rescaled(base: Regularizer) -> None:
    x, weighted, theta = noisy(1, SHAPE), Weighted(base, grid=3), at(base, normal(3, 3, seed=6))
    expected = 4 * weighted.energy(theta, x / 2)
    torch.testing.assert_close(Rescaled(weighted, 2.0).energy(theta, x), expected)
    torch.testing.assert_close(Rescaled(weighted, 2.0).density(theta, x).sum((1, 2)), expected)


@pytest.mark.parametrize(
    "inner", ["{name: tv, nu: 0.05}", "{name: foe, filters: 3, kernel_size: 3, nu: 0.05}"]
)
@pytest.mark.parametrize("grid", ["3", "null, smoothness: 0.3"])
def test_hypergradient_against_finite_differences(inner: str, grid: str) -> None:
    words = [*TINY, f"regularizer={{name: weighted, base: {inner}, grid: {grid}}}"]
    found = check_recipe(load_recipe("smoke", words), load_registry(), samples=3)
    assert found.passed, found.verdict
    (row,) = [row for row in found.rows if row.direction == "regularizer.log_map"]
    assert abs(row.differences) > 1e-6


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        ("crr", "ConvexRidge cannot be weighted, it has no density; use tv, foe or tikhonov"),
        ("wcfoe", "WeaklyConvexExperts cannot be weighted, it is not convex"),
    ],
)
def test_refused_bases(inner: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        run(load_recipe("smoke", [*TINY, f"regularizer={{name: weighted, base: {inner}}}"]))


def test_a_map_is_learned() -> None:
    """Noise on one side only, from recorded measurements: the weight grows more there than on the other side."""
    truth = smooth_images(6, (1, 16, 16))
    noise = 0.3 * normal(6, 1, 16, 16, dtype=torch.float32)
    noise[..., :8] = 0
    recipe = load_recipe(
        "smoke",
        [
            *TINY,
            "noise=null",
            "regularizer={name: weighted, base: {name: tv, weight: 0.05, nu: 0.05}, grid: 2}",
            "upper_optimizer={name: isgd, step: 0.05}",
            "budget={steps: 8}",
        ],
        data_given=True,
    )
    w = run(recipe, data=(truth, truth + noise)).theta["regularizer.log_map"]
    assert float((w[:, 1] - w[:, 0]).min()) > 0.1
