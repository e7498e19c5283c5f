"""The weakly convex Field of Experts: how far from convex it is, and that denoising does not notice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from helpers import directions, hessian, noisy, normal, slope_theta, small_foe
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.recipe import load_recipe
from bltoolbox.config.registry import load_registry
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.theta import join, split
from bltoolbox.testing import smooth_images, variational
from bltoolbox.testing.recipe_check import check_recipe
from bltoolbox.training.assemble import assemble

SHAPE = (1, 9, 8)


def make(
    boundary: str = "periodic", seed: int = 0, **options: object
) -> tuple[WeaklyConvexExperts, dict[str, Tensor]]:
    """Far from its start: random filters, and every parameter of the potentials moved."""
    settings = {"filters": 4, "kernel_size": 3, "start": "random", "weight": 1.0, "flattening": 0.9} | options
    regularizer = WeaklyConvexExperts(boundary=boundary, **settings)  # type: ignore[arg-type]
    theta = regularizer.init_params((1, 8, 8), keyed_generator("wc", seed))
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


@pytest.mark.parametrize("spread", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_every_theta_is_admissible(spread: float, seed: int) -> None:
    """The concave part is smaller than the convex one, wherever a step leads: only the means are projected."""
    regularizer, theta = make(seed=seed)
    for k, name in enumerate(theta):
        if name != "kernels":
            theta[name] = theta[name] + spread * normal(*theta[name].shape, seed=seed + k)
    again = regularizer.project(theta)
    assert all(again[name].equal(theta[name]) for name in theta)
    nu, omega = regularizer._widths(theta)
    assert (nu <= omega).all() and (regularizer._lost(theta) < 1).all()
    t = omega.max() * torch.logspace(-8, 2, 200, dtype=torch.float64).view(1, 1, 1, -1).expand(1, 4, 1, -1)
    weights = regularizer.majorant(theta, t)
    assert (weights > 0).all() and (weights.diff(dim=3) <= 1e-12 * weights[..., 1:]).all()


def test_widths_meet_what_is_shared() -> None:
    """e_j is the largest curvature of the concave part, and the smoothing is that of θ where ω is much larger."""
    regularizer, theta = make(nu=1e-4)
    nu, omega = regularizer._widths(theta)
    slope = regularizer._lost(theta) * (theta["log_scale"] + theta["log_weights"]).exp()
    torch.testing.assert_close(slope / omega, regularizer._curvatures(theta))
    torch.testing.assert_close(nu, theta["log_smoothing"].exp(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("start", ["differences", "dct", "random"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("filters", "size"), [(2, 3), (8, 5), (24, 7)])
def test_derivatives_at_the_initial_theta(start: str, channels: int, filters: int, size: int) -> None:
    """Kernels that are symmetric would attain the norm at several frequencies, where it has a kink."""
    regularizer = WeaklyConvexExperts(filters, size, start=start)  # type: ignore[arg-type]
    theta = regularizer.init_params((channels, 16, 16), keyed_generator("theta", 0))

    def log_curvature(theta: Mapping[str, Tensor]) -> Tensor:
        return regularizer._curvatures(theta).log().sum() / filters

    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    log_curvature(leaves).backward()
    for k, d in enumerate(directions(theta, 4)):
        name = ("kernels", "log_shares")[k % 2]
        d = {other: value * (other == name) for other, value in regularizer.project_gradient(d).items()}
        claimed = (leaves[name].grad * d[name]).sum()
        measured = slope_theta(log_curvature, theta, d, h=1e-4)
        torch.testing.assert_close(claimed, measured, rtol=1e-4, atol=1e-4)


def test_the_hypergradient_of_the_recipe_is_right_at_its_initial_theta() -> None:
    words = ["data.size=8", "data.count=32"]
    registry = load_registry()
    result = check_recipe(load_recipe("denoise-wc", words, registry=registry), registry, samples=1)
    assert result.passed, result.verdict


def former(regularizer: WeaklyConvexExperts, theta: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """θ as it was stored before the part of the slope that is lost became a parameter: log ω, and ν as it is used."""
    nu, omega = regularizer._widths(theta)
    kept = {name: value for name, value in theta.items() if name != "logit_flattening"}
    return kept | {"log_omega": omega.log(), "log_smoothing": nu.log()}


def former_energy(regularizer: WeaklyConvexExperts, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Σ a φ_ν(t) − e ω φ_ω(t), in those parameters."""
    e = regularizer._curvatures(theta).view(-1, 1, 1)
    a = (theta["log_scale"] + theta["log_weights"]).exp().view(-1, 1, 1)
    nu, omega = (theta[name].exp().view(-1, 1, 1) for name in ("log_smoothing", "log_omega"))
    t = FilterBank(regularizer.kernels(theta), regularizer.boundary).correlate(x)
    near, far = (t.square() + nu.square()).sqrt() - nu, (t.square() + omega.square()).sqrt() - omega
    return (a * near - e * omega * far).sum((1, 2, 3))


@pytest.mark.parametrize("case", ["inside", "largest slope", "equal widths"])
def test_former_parameters_are_upgraded(case: str) -> None:
    regularizer, theta = make()
    old = former(regularizer, theta)
    if case == "largest slope":
        old["log_omega"] = math.log(0.999) + regularizer._log_largest_omega(old)
    if case == "equal widths":
        old["log_smoothing"] = old["log_omega"]
    x = normal(2, *SHAPE)
    new = regularizer.upgrade(old)
    expected = former_energy(regularizer, old, x)
    torch.testing.assert_close(regularizer.energy(new, x), expected, rtol=1e-6, atol=0)
    single = regularizer.upgrade({name: value.float() for name, value in old.items()})
    torch.testing.assert_close(
        regularizer.energy(single, x.float()), expected.float(), rtol=1e-5, atol=0, msg="as files store it"
    )


def test_former_files_restore_the_same_and_continue(tmp_path: Path) -> None:
    model = Model.load("denoise-color-wc", device="cpu")
    regularizer = cast(WeaklyConvexExperts, model.problem.regularizer)
    exact = {name: value.double() for name, value in split(model.theta, "regularizer").items()}
    old = {name: value.float() for name, value in former(regularizer, exact).items()}
    file = tmp_path / "former.safetensors"
    replace(model, theta=join(regularizer=old)).save(file)
    y = smooth_images(1, (3, 24, 24)).float() + 0.1 * normal(1, 3, 24, 24).float()
    torch.testing.assert_close(Model.load(file, "cpu").solve(y), model.solve(y), rtol=0, atol=1e-5)
    experiment = assemble(
        load_recipe("denoise-wc", [f"init={file}", "data.count=32", "device=cpu", "evaluation=null"])
    )
    assert set(experiment.theta) == set(model.theta)


def test_without_flattening_it_is_the_field_of_experts() -> None:
    regularizer, theta = make(nu=1e-3)
    theta["logit_flattening"] = torch.full_like(theta["logit_flattening"], -40.0)
    # As β vanishes so does ω, which bounds ν.
    nu, _ = regularizer._widths(theta)
    foe = small_foe("periodic", filters=4, smoothing="per-filter")
    plain = {name: theta[name] for name in ("kernels", "log_weights", "log_scale")} | {
        "log_smoothing": nu.log()
    }
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
    lower = variational(Identity(), regularizer).at(join(regularizer=theta), SHAPE).on(images)
    starts = (images, torch.zeros_like(images), normal(2, *SHAPE, seed=9))
    found = [
        solve(solver, lower, start, 1e-9, limit=50_000).x
        for solver in (MemoryGradient(), AGD())
        for start in starts
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("boundary", ["periodic", "symmetric"])
def test_accuracies_are_certified_at_every_border(boundary: str) -> None:
    regularizer, theta = make(boundary)
    at = variational(Identity(), regularizer).at(join(regularizer=theta), SHAPE)
    mu = float(at.on(noisy(1, SHAPE)).mu)
    assert mu == pytest.approx(1 - 0.95) if boundary == "periodic" else mu > 0


@pytest.mark.parametrize(("channels", "size"), [(1, 3), (1, 4), (2, 5)])
def test_the_mirrored_border_shares_the_curvature_of_images_of_any_size(channels: int, size: int) -> None:
    regularizer = WeaklyConvexExperts(3, size, start="random")
    theta = regularizer.init_params((channels, 16, 16), keyed_generator("wc", 1))
    assert float(theta["log_border"]) > 0
    for side in (48, 49, 200):
        claimed = -float(regularizer.strong_convexity(theta, (channels, side, side)))
        assert claimed == pytest.approx(0.95, abs=1e-6)
    # The largest Rayleigh quotient that power iteration finds is a lower bound of the norm.
    bank = FilterBank(
        regularizer.kernels(theta) * regularizer._curvatures(theta).sqrt().view(-1, 1, 1, 1), "symmetric"
    )
    x = normal(1, channels, 56, 50)
    for _ in range(50):
        x = bank.adjoint(bank.correlate(x), x.shape[1:])
        x = x / x.norm()
    assert 0.8 < float(bank.correlate(x).square().sum()) <= 0.95


def test_the_border_follows_the_kernels_and_is_not_a_direction_of_descent() -> None:
    regularizer, theta = make("symmetric")
    stale = theta | {"log_border": theta["log_border"] + 1.0}
    torch.testing.assert_close(regularizer.project(stale), theta)
    moved = regularizer.project(theta | {"log_shares": theta["log_shares"] + normal(4, seed=5)})
    assert not torch.equal(moved["log_border"], theta["log_border"])
    assert float(regularizer.project_gradient(theta)["log_border"]) == 0


def test_files_without_a_border_restore_as_they_did() -> None:
    regularizer, theta = make("symmetric")
    old = {name: value for name, value in theta.items() if name != "log_border"}
    x = normal(2, *SHAPE)
    upgraded = regularizer.upgrade(old)
    assert set(upgraded) == set(theta)
    torch.testing.assert_close(regularizer.energy(upgraded, x), regularizer.energy(old, x))
    large = (1, 64, 64)
    assert float(regularizer.strong_convexity(upgraded, large)) < -0.95, "and claim no more than holds"


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
