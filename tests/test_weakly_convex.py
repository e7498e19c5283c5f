"""The weakly convex Field of Experts: how far from convex it is, and that denoising does not notice."""

from __future__ import annotations

import pytest
import torch
from helpers import hessian, normal, small_foe
from torch import Tensor

from blt_operators.identity import Identity
from blt_regularizers.weakly_convex import WeaklyConvexExperts
from blt_solvers.agd import AGD
from blt_solvers.mm import MemoryGradient
from bltoolbox.assemble import assemble
from bltoolbox.loop import solve
from bltoolbox.problem import Problem, join
from bltoolbox.recipe import load_recipe
from bltoolbox.tensors import keyed_generator
from bltoolbox.testing import smooth_images

SHAPE = (1, 9, 8)


def make(
    boundary: str = "periodic", seed: int = 0, **options: object
) -> tuple[WeaklyConvexExperts, dict[str, Tensor]]:
    """Far from its start: random filters, and every parameter of the potentials moved."""
    settings = {"filters": 4, "kernel_size": 3, "start": "random", "weight": 1.0, "flattening": 0.9} | options
    regularizer = WeaklyConvexExperts(boundary=boundary, **settings)  # type: ignore[arg-type]
    theta = regularizer.init_params(1, keyed_generator("wc", seed))
    moved = {
        name: value + 0.3 * normal(*value.shape, seed=seed + k)
        for k, (name, value) in enumerate(theta.items())
    }
    return regularizer, regularizer.project(moved)


def least_eigenvalue(regularizer: WeaklyConvexExperts, theta: dict[str, Tensor]) -> float:
    """Over images of many contrasts, where different responses are in the bend of their potential."""
    values = []
    for seed in range(3):
        for contrast in (0.01, 0.03, 0.1, 0.3, 1.0):
            matrix = hessian(regularizer, theta, contrast * normal(*SHAPE, seed=seed))
            values.append(float(torch.linalg.eigvalsh(matrix).min()))
    return min(values)


@pytest.mark.parametrize("boundary", ["valid", "zero", "periodic", "symmetric"])
@pytest.mark.parametrize("seed", range(3))
def test_weak_convexity_is_a_true_bound(boundary: str, seed: int) -> None:
    regularizer, theta = make(boundary, seed)
    bound = float(regularizer.strong_convexity(theta, SHAPE))
    least = least_eigenvalue(regularizer, theta)
    assert bound <= least, "a bound"
    assert least < -0.01, "R is meant not to be convex"


@pytest.mark.parametrize("curvature", [0.3, 0.95])
def test_filters_share_the_curvature_that_there_is(curvature: float) -> None:
    regularizer, theta = make(curvature=curvature)
    assert -float(regularizer.strong_convexity(theta, SHAPE)) == pytest.approx(curvature)
    more = theta | {"log_shares": theta["log_shares"] + 1}
    torch.testing.assert_close(
        regularizer.energy(more, normal(1, *SHAPE)), regularizer.energy(theta, normal(1, *SHAPE))
    )


@pytest.mark.parametrize("shift", [-20.0, 3.0])
def test_projection_keeps_the_concave_part_below_the_convex_one(shift: float) -> None:
    regularizer, theta = make()
    theta = regularizer.project(theta | {"log_omega": theta["log_omega"] + shift})
    assert (theta["log_omega"] < regularizer._log_largest_omega(theta)).all()
    assert (theta["log_omega"] >= theta["log_smoothing"]).all()
    again = regularizer.project(theta)
    for name, value in theta.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=1e-12)


def test_without_flattening_it_is_the_field_of_experts() -> None:
    regularizer, theta = make()
    theta["log_omega"] = torch.full_like(theta["log_omega"], -40.0)
    foe = small_foe("periodic", filters=4, smoothing="per-filter")
    plain = {name: theta[name] for name in ("kernels", "log_weights", "log_scale", "log_smoothing")}
    x = normal(2, *SHAPE)
    torch.testing.assert_close(regularizer.energy(theta, x), foe.energy(plain, x))
    torch.testing.assert_close(regularizer.gradient(theta, x), foe.gradient(plain, x))


def test_majorant_weights_are_positive_and_fall() -> None:
    regularizer, theta = make()
    t = torch.logspace(-5, 2, 200, dtype=torch.float64).view(1, 1, 1, -1).expand(1, 4, 1, -1)
    weights = regularizer.majorant(theta, t)
    assert (weights > 0).all() and (weights.diff(dim=3) <= 0).all()


@pytest.mark.parametrize("boundary", ["periodic", "symmetric"])
def test_denoising_has_one_minimiser(boundary: str) -> None:
    """From the measurement, from black and from noise, by two methods: the same image."""
    regularizer, theta = make(boundary)
    images = smooth_images(2, SHAPE) + 0.1 * normal(2, *SHAPE)
    lower = Problem(Identity(), regularizer).at(join(regularizer=theta), SHAPE).on(images)
    starts = (images, torch.zeros_like(images), normal(2, *SHAPE, seed=9))
    found = [
        solve(solver, lower, start, 1e-9, limit=50_000).x
        for solver in (MemoryGradient(), AGD())
        for start in starts
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-7)


def test_accuracies_are_certified_where_the_border_allows_it() -> None:
    known = {}
    for boundary in ("periodic", "symmetric"):
        regularizer, theta = make(boundary)
        known[boundary] = float(Problem(Identity(), regularizer).at(join(regularizer=theta), SHAPE).mu)
    assert known["periodic"] == pytest.approx(1 - 0.95)
    assert known["symmetric"] == 0, "more than 1 by the looser bound, so nothing is known"


def test_it_claims_nothing_that_only_holds_for_the_convex_potentials() -> None:
    regularizer = WeaklyConvexExperts()
    assert not regularizer.offers("constants") and not regularizer.offers("pairing_gradients")
    assert regularizer.offers("majorant") and regularizer.offers("linearize")


@pytest.mark.parametrize(
    ("operator", "strong_convexity", "warned"),
    [("blur", 0, True), ("blur", 1.0, False), ("identity", 0, False)],
)
def test_a_lower_level_that_may_not_be_convex_is_told(
    operator: str, strong_convexity: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    words = [
        f"operator={operator}",
        f"strong_convexity={strong_convexity}",
        "regularizer=wcfoe",
        "device=cpu",
    ]
    assemble(load_recipe("smoke", words))
    said = [one.getMessage() for one in caplog.records if "not convex" in one.getMessage()]
    assert len(said) == warned
    assert not warned or ("'wcfoe'" in said[0] and "'blur'" in said[0])
