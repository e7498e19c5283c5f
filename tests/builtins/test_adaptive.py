"""Weights that a network reads off the measurements: what depends on y, bounds, hypergradients, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import hessian, initial, lower_level, noisy, normal, small_foe
from torch import Tensor
from toy_models import noisy_picture, toy_model

import bltoolbox
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.adaptive import Adaptive
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox import load_recipe, run
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, RecipeError, UsageError
from bltoolbox.plugin import Regularizer, keyed_generator
from bltoolbox.restoration.cuts import PACE
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.overlap import response
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.tiles import Restorer
from bltoolbox.testing.recipe_check import check_recipe

SHAPE = (1, 9, 11)


@pytest.fixture(params=["foe", "wcfoe"])
def adaptive(request: pytest.FixtureRequest) -> Adaptive:
    if request.param == "wcfoe":
        return Adaptive(
            WeaklyConvexExperts(filters=3, kernel_size=3, nu=0.05, weight=0.05), features=4, layers=2
        )
    return Adaptive(small_foe("symmetric"), features=4, layers=1, coarse=1)


def theta_of(adaptive: Adaptive, shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    """Near the initial one, with weights that differ from place to place."""
    theta = initial(adaptive, shape)
    moved = {
        name: value + normal(*value.shape, seed=k) if name.startswith("network.") else value
        for k, (name, value) in enumerate(theta.items())
    }
    return adaptive.project(moved)


def lower_of(adaptive: Regularizer, y: Tensor, theta: dict[str, Tensor]) -> ImageLower:
    return lower_level(adaptive, y, Identity(), theta)


def test_weights_lie_between_0_and_1_and_depend_on_the_measurements(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    weights = adaptive.guide(theta, y)["weights"]
    assert weights.shape == (2, 3, *SHAPE[1:])
    assert 0 < float(weights.min()) < 0.9 * float(weights.max()) < 0.9
    assert not torch.allclose(weights[0], weights[1])


def test_brightness_does_not_matter(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(1, SHAPE)
    torch.testing.assert_close(dict(adaptive.guide(theta, y + 3)), dict(adaptive.guide(theta, y)))


def test_what_is_regularized_is_the_difference_to_the_guess(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    guide = adaptive.guide(theta, y)
    guided = adaptive.select(adaptive.prepare(theta), guide)
    assert float(guide["guess"].std()) > 0.01
    torch.testing.assert_close(
        adaptive.gradient(guided, guide["guess"] + 0.3), torch.zeros_like(y), rtol=0, atol=1e-12
    )
    assert bool((adaptive.energy(guided, y) > adaptive.energy(guided, guide["guess"])).all())


def test_the_linear_estimate_knows_the_guess() -> None:
    """Where the potentials are almost quadratic, the estimate is close to the minimiser."""
    base = FieldOfExperts(filters=3, kernel_size=3, nu=1e3, weight=1e3, smoothing="per-filter")
    adaptive = Adaptive(base, features=4, layers=1)
    theta, y = theta_of(adaptive, (1, 24, 24)), noisy(1, (1, 24, 24))
    for name in ("network.last", "network.last_biases"):
        theta[name][4:] = 0  # weights that do not depend on the place
    lower = lower_of(adaptive, y, theta)
    x = solve_cold(MemoryGradient(), lower, 1e-10, 5000).x
    assert float((lower.estimate() - x).norm()) < 0.15 * float((lower.start() - x).norm())


def test_without_a_guide_it_is_the_base(adaptive: Adaptive) -> None:
    theta, x = theta_of(adaptive), noisy(2, SHAPE)
    own = {name.removeprefix("base."): value for name, value in theta.items() if name.startswith("base.")}
    torch.testing.assert_close(adaptive.energy(theta, x), adaptive.base.energy(own, x))


def test_a_shift_of_the_image_by_a_stride_shifts_its_weights(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive, (1, 48, 48)), noisy(1, (1, 48, 48))
    stride = 4 if adaptive.coarse else 2
    assert PACE % stride == 0
    whole, part = (adaptive.guide(theta, image)["weights"] for image in (y, y[:, :, stride:, 4:]))
    torch.testing.assert_close(part[:, :, 16:-16, 16:-16], whole[:, :, 16 + stride : -16, 20:-16])


@pytest.mark.parametrize("sides", [(8, 8), (9, 11), (10, 13), (7, 6)])
def test_images_of_any_size_have_a_guess_and_weights_at_every_pixel(sides: tuple[int, int]) -> None:
    adaptive = Adaptive(small_foe("symmetric"), features=4, layers=1, coarse=2)
    guide = adaptive.guide(theta_of(adaptive), noisy(2, (1, *sides)))
    assert guide["guess"].shape == (2, 1, *sides)
    assert guide["weights"].shape == (2, 3, *sides)


def test_coarse_layers_see_further() -> None:
    """Which pixels of the weights change with one pixel of the image."""
    reach = []
    for options in ({"layers": 2}, {"layers": 1, "coarse": 1}):
        adaptive = Adaptive(small_foe("symmetric"), features=4, **options)
        theta, y = theta_of(adaptive), noisy(1, (1, 64, 64))
        changed = y.clone()
        changed[..., 32, 32] += 1
        difference = (adaptive.guide(theta, changed)["weights"] - adaptive.guide(theta, y)["weights"]).abs()
        rows = torch.nonzero(difference.amax((0, 1, 3))).flatten()
        reach.append(int(rows.max() - rows.min()))
    assert reach[1] > reach[0]


def blurred(undo: float | None) -> tuple[Adaptive, Blur]:
    adaptive = Adaptive(small_foe("symmetric"), features=4, layers=1, coarse=1, undo=undo)
    return adaptive, Blur(size=3, sigma=1.0)


def test_what_it_sees_of_a_blurred_image_solves_the_normal_equations() -> None:
    adaptive, blur = blurred(0.05)
    y = noisy(2, SHAPE)
    u = lower_level(adaptive, y, blur, theta_of(adaptive)).at.seen(y, {})
    down, right = (torch.diff(u, dim=dim) for dim in (2, 3))
    smooth = torch.zeros_like(u)
    smooth[:, :, 1:] += down
    smooth[:, :, :-1] -= down
    smooth[..., 1:] += right
    smooth[..., :-1] -= right
    normal = blur.adjoint(blur.apply(u, {}, {}), {}, {}) + 0.05 * smooth
    torch.testing.assert_close(normal, blur.adjoint(y, {}, {}), rtol=0, atol=1e-12)


def test_it_sees_the_start_where_nothing_can_or_should_be_undone() -> None:
    y, (adaptive, blur) = noisy(1, SHAPE), blurred(None)
    for regularizer, operator in ((adaptive, blur), (blurred(0.05)[0], Identity())):
        at = lower_level(regularizer, y, operator, theta_of(adaptive)).at
        torch.testing.assert_close(at.seen(y, {}), y)


def test_derivatives_in_blurred_measurements_include_what_was_undone() -> None:
    adaptive, blur = blurred(0.05)
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    inputs = lower_level(adaptive, y, blur, theta).wrt("y")
    x, q, change = noisy(2, SHAPE, seed=8), normal(2, *SHAPE, seed=9), normal(2, *SHAPE, seed=10)
    claimed = (inputs.mixed(x, q, torch.ones(2).double())["y"] * change).sum()

    def along(t: float) -> Tensor:
        return (lower_level(adaptive, y + t * change, blur, theta).gradient(x) * q).sum()

    torch.testing.assert_close(claimed, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-8)


def test_a_sample_does_not_depend_on_its_batch_also_after_others_have_left(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(3, SHAPE)
    y[1] = 0.5  # is solved at once
    together = solve_cold(MemoryGradient(), lower_of(adaptive, y, theta), 1e-9, 5000).x
    for i in range(3):
        alone = solve_cold(MemoryGradient(), lower_of(adaptive, y[i : i + 1], theta), 1e-9, 5000).x
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-8)


def test_bounds_hold_for_every_weight(adaptive: Adaptive) -> None:
    theta = theta_of(adaptive)
    lower = lower_of(adaptive, noisy(1, SHAPE), theta)
    x = 0.05 * normal(1, *SHAPE, seed=4)
    eigenvalues = torch.linalg.eigvalsh(hessian(adaptive, lower.prior_theta, x[0]))
    least, most = (getattr(adaptive, name)(theta, SHAPE) for name in ("strong_convexity", "lipschitz"))
    assert float(least) <= float(eigenvalues.min()) + 1e-10
    assert float(eigenvalues.max()) <= float(most) + 1e-10
    assert float(lower.mu) > 0


def test_at_another_noise_level_solutions_scale_along(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(1, SHAPE)
    x = solve_cold(MemoryGradient(), lower_of(adaptive, y, theta), 1e-9, 5000).x
    scaled = solve_cold(MemoryGradient(), lower_of(Rescaled(adaptive, 3.0), 3 * y, theta), 1e-9, 5000).x
    torch.testing.assert_close(scaled, 3 * x, rtol=0, atol=1e-7)


def test_mixed_derivatives_include_the_network(adaptive: Adaptive) -> None:
    """Against differences of ⟨∇h, q⟩, and the sum over samples against each sample alone."""
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    lower = lower_of(adaptive, y, theta)
    x, q = noisy(2, SHAPE, seed=8), normal(2, *SHAPE, seed=9)
    mixed, each = lower.mixed(x, q, torch.ones(2).double()), lower.mixed_each(x, q)
    for k, (name, value) in enumerate(lower.theta.items()):
        direction = normal(*value.shape, seed=20 + k)

        def along(t: float, name: str = name, value: Tensor = value, direction: Tensor = direction) -> Tensor:
            moved = lower.at_theta(dict(lower.theta) | {name: value + t * direction})
            return (moved.gradient(x) * q).sum()

        quotient = (along(1e-5) - along(-1e-5)) / 2e-5
        claimed = (mixed[name] * direction).sum()
        torch.testing.assert_close(claimed, quotient, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(each[name].sum(0), mixed[name], rtol=1e-9, atol=1e-11)


def test_derivatives_in_the_measurements_include_the_weights(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    inputs = lower_of(adaptive, y, theta).wrt("y")
    x, q, change = noisy(2, SHAPE, seed=8), normal(2, *SHAPE, seed=9), normal(2, *SHAPE, seed=10)
    claimed = (inputs.mixed(x, q, torch.ones(2).double())["y"] * change).sum()

    def along(t: float) -> Tensor:
        return (lower_of(adaptive, y + t * change, theta).gradient(x) * q).sum()

    torch.testing.assert_close(claimed, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-8)
    plain = -(q * change).sum()
    assert abs(float(claimed - plain)) > 1e-4  # what least squares alone would give


@pytest.mark.parametrize(
    ("base", "operator"),
    [("foe", "identity"), ("wcfoe", "identity"), ("foe", "{name: blur, size: 3, sigma: 1}")],
)
def test_hypergradient_against_finite_differences(base: str, operator: str) -> None:
    words = [
        "data={name: dead-leaves, count: 6, size: 16}",
        "evaluation=null",
        "validation.count=0",
        "color=gray",
        "lower_solver=mm",
        f"operator={operator}",
        "strong_convexity=0.1",
        "sampler={name: epoch, size: 3}",
        "device=cpu",
        f"regularizer={{name: adaptive, base: {{name: {base}, filters: 3, kernel_size: 3, nu: 0.05}}, features: 4,"
        " layers: 1, coarse: 1}",
    ]
    found = check_recipe(load_recipe("smoke", words), load_registry(), samples=3)
    assert found.passed, found.verdict
    (row,) = [row for row in found.rows if row.direction == "regularizer.network.last"]
    assert abs(row.differences) > 1e-6


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("crr", "ConvexRidge cannot be weighted, it has no analyse; use foe or wcfoe"),
        ("{name: adaptive, base: foe}", "Adaptive cannot be weighted, it adapts to images by itself"),
        ("pooled-foe", "PooledExperts cannot be weighted, it has no potential; use foe or wcfoe"),
    ],
)
def test_refused_bases(base: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        run(load_recipe("smoke", [f"regularizer={{name: adaptive, base: {base}}}"]))


def test_initial_parameters_depend_on_the_seed() -> None:
    adaptive = Adaptive(small_foe("symmetric"), features=4, layers=1)
    first, second = (adaptive.init_params(SHAPE, keyed_generator("theta", seed)) for seed in (0, 1))
    assert not torch.equal(first["network.kernels_1"], second["network.kernels_1"])


def varied_model(**settings: object) -> Model:
    """A model whose weights differ from place to place."""
    regularizer = {"name": "adaptive", "base": {"name": "foe", "filters": 4, "kernel_size": 5}}
    model = toy_model(regularizer=regularizer | {"features": 4, "layers": 1}, color="gray", **settings)
    varied = {
        name: value + normal(*value.shape, seed=k, dtype=value.dtype) if ".network." in name else value
        for k, (name, value) in enumerate(model.theta.items())
    }
    return replace(model, theta=model.problem.project(varied))


def test_tiles_see_the_same_weights_also_of_odd_pictures() -> None:
    noisy = noisy_picture(151, 173, channels=1)
    model = varied_model()
    whole, _ = Restorer(model, tol=3e-6).run(noisy)
    tiled, report = Restorer(model, tol=3e-6, tile=110).run(noisy)
    assert report.tiles > 3
    assert np.abs(tiled - whole).max() < 1e-4
    assert report.seam < 1e-4


def test_the_overlap_of_tiles_knows_the_way_through_the_weights(adaptive: Adaptive) -> None:
    theta, y = theta_of(adaptive), noisy(2, SHAPE)
    lower, x, change = lower_of(adaptive, y, theta), noisy(2, SHAPE, seed=8), normal(2, *SHAPE, seed=10)
    ahead, behind = (lower_of(adaptive, y + h * change, theta).gradient(x) for h in (1e-6, -1e-6))
    expected = (behind - ahead) / 2e-6
    torch.testing.assert_close(response(lower, x, change), expected, rtol=1e-6, atol=1e-8)


def test_a_layer_is_differentiable_in_the_measurements_through_the_weights() -> None:
    model = varied_model(dtype="float64")
    y = noisy(1, (1, 6, 7))[0].requires_grad_()
    layer = bltoolbox.layer(model, tol=1e-11)
    torch.autograd.gradcheck(layer, (y,), eps=1e-5, atol=1e-6, rtol=1e-5)


def test_another_operator_needs_another_model() -> None:
    with pytest.raises(UsageError, match="reads measurements of operator 'identity' and knows no others"):
        varied_model().with_operator("blur")


def test_its_prior_has_a_proximal_map_but_no_energy_of_its_own() -> None:
    prior = varied_model().prior()
    y = noisy(1, (1, 12, 12)).float()
    assert prior.prox(y, 0.5).shape == y.shape
    with pytest.raises(BltError, match="depends on the measurements, too; use prox"):
        prior.energy(y)
