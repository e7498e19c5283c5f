"""General Fields of Experts: their formula, what they have in common with `foe`, stacks, bounds, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import BOUNDARIES, hessian, lower_level, noisy, normal, oracle_for, slope, slope_theta
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.adaptive import Adaptive
from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.foe import FieldOfExperts, amplitudes
from blt_builtins.regularizers.general import GeneralExperts
from blt_builtins.regularizers.stack import Stack, composed
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.plugin import Accuracy
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.theta import join
from bltoolbox.testing import full_batch

SHAPE = (2, 9, 8)
INGREDIENTS: dict[str, dict[str, Any]] = {
    "plain": {"layers": (3,), "channels": (), "components": 1},
    "stack": {"layers": (3, 3), "channels": (3,), "components": 1},
    "three layers": {"layers": (3, 1, 3), "channels": (2, 3), "components": 1},
    "mixture": {"layers": (3,), "channels": (), "components": 3},
    "one profile": {"layers": (3,), "channels": (), "components": 3, "profile": "shared"},
    "all": {"layers": (3, 3), "channels": (3,), "components": 2},
}
ingredients = pytest.mark.parametrize("ingredient", INGREDIENTS)
boundaries = pytest.mark.parametrize("boundary", BOUNDARIES)


def make(
    ingredient: str, boundary: str = "symmetric", seed: int = 0, **options: object
) -> tuple[GeneralExperts, dict[str, Tensor]]:
    """Far from its start: random filters, and every parameter moved."""
    settings = {"filters": 4, "start": "random", "weight": 0.5, "nu": 0.1} | INGREDIENTS[ingredient] | options
    regularizer = GeneralExperts(boundary=boundary, **settings)  # type: ignore[arg-type]
    theta = regularizer.init_params(SHAPE, keyed_generator("general", seed))
    moved = {
        name: value + 0.3 * normal(*value.shape, seed=seed + k)
        for k, (name, value) in enumerate(theta.items())
    }
    return regularizer, regularizer.project(moved)


def banks(boundary: str) -> tuple[FilterBank, ...]:
    sides = ((3, 2, 5), (4, 3, 3), (5, 4, 1))
    return tuple(FilterBank(normal(j, c, k, k, seed=k), boundary) for j, c, k in sides)  # type: ignore[arg-type]


@boundaries
def test_a_stack_is_the_bank_of_composed_kernels_away_from_the_border(boundary: str) -> None:
    layers = banks(boundary)
    whole = FilterBank(composed([bank.kernels for bank in layers]), layers[0].boundary)
    assert whole.kernels.shape == (5, 2, 7, 7)
    x = normal(2, 2, 20, 17)
    stacked, single = Stack(layers).correlate(x), whole.correlate(x)
    edge = 0 if boundary in ("valid", "periodic") else 3
    inside = (..., slice(edge, stacked.shape[2] - edge), slice(edge, stacked.shape[3] - edge))
    torch.testing.assert_close(stacked[inside], single[inside])


@boundaries
def test_the_adjoint_of_a_stack_is_exact(boundary: str) -> None:
    stack, x = Stack(banks(boundary)), normal(2, 2, 11, 12)
    t = stack.correlate(x)
    u = normal(*t.shape, seed=3)
    torch.testing.assert_close(dot(t, u), dot(x, stack.adjoint(u.clone(), x.shape[1:])), rtol=1e-12, atol=0)


def test_the_symbol_of_a_stack_of_even_kernels_is_exact() -> None:
    kernels = [bank.kernels + bank.kernels.flip(2) for bank in banks("symmetric")]
    stack = Stack(tuple(FilterBank(kernel + kernel.flip(3), "symmetric") for kernel in kernels))
    weights, (u, v), shape = normal(1, 5).square(), (3, 2), (2, 12, 10)
    rows, columns = (torch.arange(side, dtype=torch.float64) + 0.5 for side in shape[1:])
    wave = torch.outer((torch.pi * u / 12 * rows).cos(), (torch.pi * v / 10 * columns).cos())
    x = normal(2, 1, 1) * wave
    product = stack.adjoint(weights.view(1, 5, 1, 1) * stack.correlate(x[None]), shape)[0]
    block = stack.symbol(weights, shape)[0, :, :, u, v]
    torch.testing.assert_close(product, torch.einsum("cd,dhw->chw", block, x))


@pytest.mark.parametrize("smoothing", ["shared", "per-filter"])
@boundaries
def test_one_layer_and_one_component_are_foe(boundary: str, smoothing: str) -> None:
    general, _ = make("plain", boundary, smoothing=smoothing)
    plain = FieldOfExperts(4, 3, boundary, smoothing, 0.1, 0.5, "random")  # type: ignore[arg-type]
    theta, expected = (kind.init_params(SHAPE, keyed_generator(1)) for kind in (general, plain))
    torch.testing.assert_close(theta, expected, rtol=0, atol=0)
    theta = {name: value + 0.2 * normal(*value.shape) for name, value in theta.items()}
    torch.testing.assert_close(general.project(theta), plain.project(theta), rtol=0, atol=0)
    theta = plain.project(theta)
    x, v = 0.1 * normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
    for name in ("energy", "density", "gradient"):
        assert torch.equal(getattr(general, name)(theta, x), getattr(plain, name)(theta, x))
    assert torch.equal(general.linearize(theta, x)(v), plain.linearize(theta, x)(v))
    assert torch.equal(general.lipschitz(theta, SHAPE), plain.lipschitz(theta, SHAPE))
    assert torch.equal(general.kernels(theta), plain.kernels(theta))
    each, analytic = general.pairing_gradients(theta, x, v), plain.pairing_gradients(theta, x, v)
    assert set(each) == set(analytic)
    for name, rows in each.items():
        torch.testing.assert_close(rows, analytic[name])


@ingredients
def test_energy_is_the_formula(ingredient: str) -> None:
    regularizer, theta = make(ingredient, "periodic")
    x = 0.3 * normal(2, *SHAPE)
    t = FilterBank(regularizer.kernels(theta), "periodic").correlate(x)
    expected = torch.zeros(2, dtype=torch.float64)
    for j, a in enumerate(amplitudes(theta)):
        nu = theta["log_smoothing"].exp()[j]
        shares = torch.ones(1, dtype=torch.float64)
        if regularizer.components > 1:
            row = 0 if regularizer.profile == "shared" else j
            shares = torch.softmax(2 * theta["shares"][row], 0)
        for k, share in enumerate(shares):
            width = nu * theta["log_ratio"].exp() ** k if k else nu
            expected += a * share * (torch.hypot(t[:, j], width) - width).sum((1, 2))
    torch.testing.assert_close(regularizer.energy(theta, x), expected)


@ingredients
@boundaries
def test_derivatives_match_finite_differences(ingredient: str, boundary: str) -> None:
    regularizer, theta = make(ingredient, boundary)
    x, v, q = 0.1 * normal(1, *SHAPE), 0.1 * normal(1, *SHAPE, seed=1), normal(1, *SHAPE, seed=2)
    along = slope(lambda z: regularizer.energy(theta, z)[0], x, v)
    torch.testing.assert_close(dot(regularizer.gradient(theta, x), v)[0], along, rtol=1e-6, atol=1e-9)
    bent = slope(lambda z: dot(regularizer.gradient(theta, z), q)[0], x, v)
    torch.testing.assert_close(dot(regularizer.linearize(theta, x)(v), q)[0], bent, rtol=1e-5, atol=1e-8)
    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    regularizer.pairing(regularizer.prepare(leaves), x, q).sum().backward()
    d = {name: 0.1 * normal(*value.shape, seed=20 + k) for k, (name, value) in enumerate(theta.items())}
    changed = slope_theta(lambda other: dot(regularizer.gradient(other, x), q)[0], theta, d)
    claimed = sum((leaves[name].grad * d[name]).sum() for name in d)
    torch.testing.assert_close(claimed, changed, rtol=1e-5, atol=1e-8)


@ingredients
@boundaries
def test_curvatures_lie_within_their_bounds(ingredient: str, boundary: str) -> None:
    regularizer, theta = make(ingredient, boundary)
    flat = torch.linalg.eigvalsh(hessian(regularizer, theta, torch.zeros(SHAPE, dtype=torch.float64)))
    rough = torch.linalg.eigvalsh(hessian(regularizer, theta, 0.1 * normal(*SHAPE)))
    bound = float(regularizer.lipschitz(theta, SHAPE))
    assert min(float(flat[0]), float(rough[0])) > -1e-10, "convex"
    assert float(rough[-1]) < float(flat[-1]) <= bound, "largest where the potentials bend most"
    units = torch.eye(flat.numel(), dtype=torch.float64).view(-1, *SHAPE)
    norm = torch.linalg.matrix_norm(regularizer.analyse(theta, units).flatten(1), 2).square()
    assert float(norm) <= float(regularizer.analysis_norm(theta, SHAPE)) * (1 + 1e-12)


@pytest.mark.parametrize("boundary", ["symmetric", "zero", "periodic"])
@pytest.mark.parametrize("sides", [(24, 40), (58, 40), (64, 72)])
def test_bounds_of_larger_images_are_close_to_the_norm(boundary: str, sides: tuple[int, int]) -> None:
    """Below and above the size of the image that stands for larger ones."""
    stack = {"layers": (3, 3), "channels": (2,), "filters": 3}
    regularizer, theta = make("all", boundary, **stack)
    shape = (2, *sides)
    product = regularizer.linearize(theta, torch.zeros(1, *shape, dtype=torch.float64))
    v = normal(1, *shape)
    for _ in range(150):  # from below, slowly where many frequencies are almost the largest
        v = product(v / v.norm())
    norm, bound = float(v.norm()), float(regularizer.lipschitz(theta, shape))
    assert norm <= bound < 1.15 * norm


def test_the_bound_of_a_periodic_stack_is_that_of_its_composed_kernels() -> None:
    """The image is small, so its frequencies miss the largest one a little."""
    regularizer, theta = make("all", "periodic")
    x = torch.zeros(SHAPE, dtype=torch.float64)
    largest = float(torch.linalg.eigvalsh(hessian(regularizer, theta, x))[-1])
    assert float(regularizer.lipschitz(theta, SHAPE)) < 1.25 * largest


@ingredients
def test_the_majorant_lies_above_the_potential(ingredient: str) -> None:
    regularizer, theta = make(ingredient)
    t = 0.2 * normal(3, 4, 5, 6)
    weights, value = regularizer.majorant(theta, t), regularizer.potential(theta, t)
    for scale in (0.0, 0.5, 0.99, 1.01, 2.0, 10.0):
        parabola = value + 0.5 * weights * ((scale * t).square() - t.square())
        assert bool((parabola >= regularizer.potential(theta, scale * t) - 1e-12).all())
    touched = torch.autograd.functional.jvp(lambda u: regularizer.potential(theta, u), t, torch.ones_like(t))
    torch.testing.assert_close(weights * t, touched[1])


@ingredients
def test_a_sample_does_not_depend_on_its_batch(ingredient: str) -> None:
    regularizer, theta = make(ingredient)
    x, v = 0.1 * normal(5, *SHAPE), normal(5, *SHAPE, seed=1)
    product, index = regularizer.linearize(theta, x), torch.tensor([2])
    for single, several in (
        (regularizer.gradient(theta, x[index]), regularizer.gradient(theta, x)),
        (regularizer.linearize(theta, x[index])(v[index]), product(v)),
        (product.take(index)(v[index]), product(v)),  # type: ignore[attr-defined]
    ):
        torch.testing.assert_close(single, several[index], rtol=1e-12, atol=1e-12)


@ingredients
def test_flat_images_have_no_response(ingredient: str) -> None:
    regularizer, theta = make(ingredient)
    x = torch.tensor([0.3, 0.7], dtype=torch.float64).view(1, 2, 1, 1).expand(1, *SHAPE)
    assert float(regularizer.analyse(theta, x).abs().max()) < 1e-12
    kernels = regularizer.kernels(theta)
    assert float(kernels.mean((2, 3)).abs().max()) < 1e-12 < 1e-2 < float(kernels.abs().mean())


def test_projection_keeps_limits() -> None:
    regularizer, theta = make("all", least_nu=0.02)
    theta["log_smoothing"] -= 5
    theta["log_ratio"] -= 9
    kept = regularizer.project(theta)
    torch.testing.assert_close(kept["log_smoothing"].exp(), torch.full((4,), 0.02, dtype=torch.float64))
    assert float(kept["log_ratio"]) == 0
    gradient = {name: normal(*value.shape) for name, value in theta.items()}
    once = regularizer.project_gradient(gradient)
    torch.testing.assert_close(regularizer.project_gradient(once), once)
    assert torch.equal(once["kernels"], gradient["kernels"]), "only the first layer is without means"


def test_initial_composed_kernels_have_unit_norm_and_differ() -> None:
    regularizer = GeneralExperts(filters=40, layers=(5, 3, 3), channels=(4, 8))
    kernels = regularizer.kernels(regularizer.init_params((1, 32, 32), keyed_generator("start"))).flatten(1)
    torch.testing.assert_close(kernels.norm(dim=1), torch.ones(40, dtype=torch.float64))
    assert int(torch.linalg.matrix_rank(kernels)) > 20


def test_both_solvers_find_the_same_minimiser() -> None:
    regularizer, theta = make("all", weight=0.05)
    lower = lower_level(regularizer, noisy(2, SHAPE), Identity(), theta)
    by_majorant, by_bound = (solve_cold(solver, lower, 1e-9, 5000).x for solver in (MemoryGradient(), AGD()))
    torch.testing.assert_close(by_majorant, by_bound, rtol=0, atol=1e-8)


def test_the_hypergradient_matches_differences_of_the_upper_loss() -> None:
    regularizer, _ = make("all")
    oracle = oracle_for(regularizer, shape=SHAPE)
    _, raw = make("all", weight=0.05)
    theta, tight = join(regularizer=raw), Accuracy(1e-9)
    batch = oracle.on(full_batch(oracle))
    z = batch.hypergradient(theta, tight, tight).gradient
    d = {name: 0.1 * normal(*value.shape, seed=40 + k) for k, (name, value) in enumerate(raw.items())}
    d = join(regularizer=regularizer.project_gradient(d))  # z lies in these directions, too
    changed = slope_theta(lambda other: batch.value(other, tight).value, theta, d)
    torch.testing.assert_close(sum((z[name] * d[name]).sum() for name in d), changed, rtol=1e-4, atol=1e-9)


def test_it_can_be_the_base_of_an_adaptive_regularizer() -> None:
    base, _ = make("all")
    adaptive = Adaptive(base, features=4, layers=1)
    theta = adaptive.prepare(adaptive.init_params(SHAPE, keyed_generator("adaptive")))
    y, v = noisy(2, SHAPE), normal(2, *SHAPE)
    guided = adaptive.select(theta, adaptive.guide(theta, y))
    bent = slope(lambda z: dot(adaptive.gradient(guided, z), v).sum(), y, v)
    torch.testing.assert_close(dot(adaptive.linearize(guided, y)(v), v).sum(), bent, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": (3, 3), "channels": ()}, "give 1 number"),
        ({"layers": (3,), "channels": (4,)}, "give 0 numbers"),
        ({"layers": (4, 3), "channels": (4,)}, "use 3 or 5"),
        ({"layers": (1, 3), "channels": (4,)}, "at least 2"),
        ({"least_nu": 1.0}, "larger than the initial nu"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GeneralExperts(**options)


def test_images_must_hold_a_composed_kernel() -> None:
    regularizer = GeneralExperts(layers=(9, 3, 3), channels=(4, 8))
    message = regularizer.check((1, 12, 40))
    assert message is not None and "13" in message
    assert regularizer.check((1, 13, 13)) is None
