"""Physics and noise of deepinv: exact, the same in every precision, and only what a fixed list allows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from test_operators import RECIPE, normal

from blt_builtins.noises.deepinv_noise import _OPTIONS, DeepInvNoise
from blt_builtins.noises.deepinv_noise import Options as NoiseOptions
from blt_builtins.operators.blur import gaussian_kernel
from blt_builtins.operators.deepinv_physics import _MAKERS, DeepInv, Options
from bltoolbox.bilevel.tensors import dot, keyed_generator, norm
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import MissingError, RecipeError
from bltoolbox.testing.conformance import check_component
from bltoolbox.training.assemble import assemble

#: Every physics of the list, with its defaults and with every option that changes what is computed.
CASES: dict[str, tuple[Any, tuple[int, int, int], dict[str, Any]]] = {
    "inpainting": ("Inpainting", (3, 8, 10), {}),
    "inpainting-by-channel": ("Inpainting", (3, 8, 10), {"mask": 0.3, "pixelwise": False}),
    "demosaicing": ("Demosaicing", (3, 8, 10), {}),
    "decolorize": ("Decolorize", (3, 8, 10), {}),
    "decolorize-average": ("Decolorize", (5, 8, 10), {"srf": "average"}),
    "blur": ("Blur", (1, 8, 10), {}),
    "blur-valid": ("Blur", (2, 9, 10), {"padding": "valid", "sigma": 0.8, "width": 4}),
    "blur-reflect": ("Blur", (1, 8, 10), {"padding": "reflect", "width": 3}),
    "blur-replicate": ("Blur", (1, 8, 10), {"padding": "replicate"}),
    "blur-constant": ("Blur", (1, 8, 10), {"padding": "constant"}),
    "blur-fft": ("BlurFFT", (2, 8, 10), {"sigma": 1.3, "width": 5}),
    "downsampling": ("Downsampling", (3, 16, 18), {}),
    "downsampling-3": ("Downsampling", (1, 12, 9), {"factor": 3, "filter": "bilinear", "padding": "reflect"}),
    "upsampling": ("Upsampling", (1, 8, 10), {"filter": "bicubic"}),
    "mri": ("MRI", (2, 8, 10), {}),
    "mri-more": ("MRI", (2, 8, 10), {"acceleration": 2.0, "center_fraction": 0.3}),
    "tomography": ("Tomography", (1, 9, 9), {"angles": 5}),
    "tomography-circle": ("Tomography", (2, 8, 8), {"angles": 4, "circle": True}),
    "tomography-fan": ("Tomography", (1, 8, 8), {"angles": 4, "fan_beam": True}),
    "compressed-sensing": ("CompressedSensing", (2, 5, 6), {}),
    "compressed-sensing-channels": (
        "CompressedSensing",
        (2, 5, 6),
        {"channelwise": True, "measurements": 11},
    ),
    "single-pixel": ("SinglePixelCamera", (2, 8, 8), {}),
    "single-pixel-few": ("SinglePixelCamera", (1, 8, 8), {"measurements": 9, "ordering": "zig_zag"}),
}
DIAGONAL = {"Inpainting", "Demosaicing", "MRI", "SinglePixelCamera"}


@pytest.fixture(scope="module")
def physics() -> Any:
    return pytest.importorskip("deepinv", reason="the extra deepinv is not installed").physics


@pytest.fixture(params=CASES)
def operator(request: pytest.FixtureRequest, physics: Any) -> DeepInv:
    name, shape, options = CASES[request.param]
    return DeepInv(name, shape[1:], shape[0], Options(**options))


def matrix(operator: DeepInv) -> torch.Tensor:
    size = torch.Size(operator.shape).numel()
    units = torch.eye(size, dtype=torch.float64).view(size, *operator.shape)
    return operator.apply(units, {}, {}).flatten(1).T


def test_every_physics_and_every_option_is_tried() -> None:
    assert {name for name, _, _ in CASES.values()} == set(_MAKERS)
    offered = {option for options, _ in _MAKERS.values() for option in options}
    assert offered == {field.name for field in fields(Options)}
    tried = {option for _, _, options in CASES.values() for option in options}
    assert tried == offered


def test_adjoints_are_exact_and_samples_independent(operator: DeepInv) -> None:
    x = normal(3, *operator.shape)
    y = operator.apply(x, {}, {})
    assert y.ndim == 4
    u = normal(*y.shape, seed=1)
    gap = (dot(y, u) - dot(x, operator.adjoint(u, {}, {}))).abs()
    assert (gap <= 1e-12 * norm(y) * norm(u)).all()
    torch.testing.assert_close(operator.apply(x[1:2], {}, {}), y[1:2])
    torch.testing.assert_close(operator.adjoint(u[1:2], {}, {}), operator.adjoint(u, {}, {})[1:2])


def test_single_precision_is_the_same_operator(operator: DeepInv) -> None:
    x = normal(2, *operator.shape)
    y = operator.apply(x, {}, {})
    single = operator.apply(x.float(), {}, {})
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, y.float(), atol=1e-4 * float(y.abs().max()), rtol=0)
    back = operator.adjoint(y, {}, {})
    torch.testing.assert_close(
        operator.adjoint(y.float(), {}, {}), back.float(), atol=1e-4 * float(back.abs().max()), rtol=0
    )


def test_bounds_are_exact_or_unknown(operator: DeepInv) -> None:
    a = matrix(operator)
    eigenvalues = torch.linalg.eigvalsh(a.T @ a)
    least, most = operator.spectrum({}, operator.shape, {})
    if operator.name in DIAGONAL:
        assert least == pytest.approx(float(eigenvalues[0]), abs=1e-10)
        assert most == pytest.approx(float(eigenvalues[-1]), rel=1e-10)
    else:
        assert (least, most) == (0.0, None)


def test_nothing_is_measured_where_the_mask_says_so(operator: DeepInv) -> None:
    y = operator.apply(normal(2, *operator.shape), {}, {})
    mask = operator.measured(y, {})
    assert (mask is not None) == (operator.name in DIAGONAL)
    if mask is not None:
        assert torch.equal((y != 0).all(0, keepdim=True), mask.bool().expand(1, *y.shape[1:]))


def test_start_is_at_least_as_near_to_the_measurements_as_nothing(operator: DeepInv) -> None:
    y = operator.apply(normal(2, *operator.shape), {}, {})
    start = operator.start(y, {}, {})
    assert (norm(operator.apply(start, {}, {}) - y) < norm(y)).all()
    assert not operator.start(torch.zeros_like(y), {}, {}).any()


def test_is_what_deepinv_computes(physics: Any) -> None:
    x = normal(2, 3, 8, 10)
    theirs = physics.Blur(filter=gaussian_kernel(5, 1.1)[None, None], padding="reflect")
    ours = DeepInv("Blur", (8, 10), 3, Options(sigma=1.1, width=5, padding="reflect"))
    torch.testing.assert_close(ours.apply(x, {}, {}), theirs.A(x))
    bayer = DeepInv("Demosaicing", (8, 10))
    torch.testing.assert_close(bayer.apply(x, {}, {}).float(), physics.Demosaicing((8, 10)).A(x.float()))


@pytest.mark.parametrize("name", ["Inpainting", "CompressedSensing", "MRI"])
def test_what_is_random_depends_on_the_seed_alone(physics: Any, name: Any) -> None:
    x = normal(1, 2, 8, 16)
    torch.manual_seed(1)
    first = DeepInv(name, (8, 16), 2, seed=3).apply(x, {}, {})
    torch.manual_seed(2)
    assert torch.equal(first, DeepInv(name, (8, 16), 2, seed=3).apply(x, {}, {}))
    assert not torch.equal(first, DeepInv(name, (8, 16), 2, seed=4).apply(x, {}, {}))


def test_an_inexact_adjoint_is_refused(physics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = physics.Blur.A_adjoint
    monkeypatch.setattr(physics.Blur, "A_adjoint", lambda self, y, **kwargs: (1 + 1e-6) * exact(self, y))
    with pytest.raises(ValueError, match="A_adjoint of Blur in deepinv is not the adjoint of its A"):
        DeepInv("Blur", (8, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DeepInv("Blur", (8, 8), options=Options(factor=2)),
            "Blur has no option 'factor'; it has sigma, width",
        ),
        (lambda: DeepInv("Demosaicing", (8, 8), options=Options(sigma=1)), "no option 'sigma'; it has none"),
        (lambda: DeepInv("Demosaicing", (8, 8), 1), "three channels"),
        (lambda: DeepInv("MRI", (8, 8), 3), "two channels"),
        (lambda: DeepInv("Tomography", (8, 9), 1), "square images"),
        (lambda: DeepInv("SinglePixelCamera", (12, 12), 1), "power of two"),
        (lambda: DeepInv("CompressedSensing", (256, 256), 3), "use smaller images or fewer measurements"),
        (
            lambda: DeepInv("Blur", (4, 4), options=Options(width=9, padding="valid")),
            "deepinv refuses Blur for these images and options",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(physics: Any, make: Callable[[], DeepInv], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_other_images_and_measurements_are_refused(physics: Any) -> None:
    operator = DeepInv("Decolorize", (8, 10))
    assert operator.check((3, 8, 10)) is None
    assert "for 3 channels of 8×10, but the images have 1 of 8×10" in (operator.check((1, 8, 10)) or "")
    with pytest.raises(ValueError, match="set size and channels"):
        operator.apply(torch.zeros(1, 3, 9, 10), {}, {})
    with pytest.raises(ValueError, match="measurements of 1×8×10, not of 3×8×10"):
        operator.adjoint(torch.zeros(1, 3, 8, 10), {}, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"physics": "os.system"}, "operator.physics: expected one of 'Inpainting'"),
        ({"physics": "Haze"}, "operator.physics: expected one of 'Inpainting'"),
        ({"physics": "Blur", "options": {"device": "cuda"}}, "operator.options.device"),
        ({"physics": "Blur", "options": {"sigma": -1}}, "operator.options.sigma"),
        ({"physics": "Blur", "options": 3}, "operator.options"),
    ],
)
def test_recipes_name_only_what_is_allowed(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from_dict(RECIPE | {"operator": {"name": "deepinv", "size": [16, 16], **given}})


def test_trains(physics: Any) -> None:
    block = {
        "name": "deepinv",
        "physics": "Downsampling",
        "size": [16, 16],
        "options": {"filter": "bilinear"},
    }
    recipe = recipe_from_dict(RECIPE | {"operator": block, "strong_convexity": 0.05})
    result = assemble(recipe).run()
    assert result.steps == 1
    assert result.model.solve(torch.rand(3, 8, 8)).shape == (3, 16, 16)


# Noise

T, DRAWS = 0.6, 40_000
Moments = Callable[[torch.Tensor], torch.Tensor]
#: Of each model: its options, functions of y, and their expected values for t = 0.6.
NOISES: dict[str, tuple[Any, dict[str, Any], list[tuple[Moments, float]]]] = {
    "gaussian": ("GaussianNoise", {"sigma": 0.2}, [(lambda y: y, T), (lambda y: (y - T) ** 2, 0.04)]),
    "uniform": ("UniformNoise", {"a": 0.3}, [(lambda y: y, T), (lambda y: (y - T) ** 2, 0.03)]),
    "laplace": ("LaplaceNoise", {"b": 0.2}, [(lambda y: y, T), (lambda y: (y - T) ** 2, 0.08)]),
    "poisson": ("PoissonNoise", {"gain": 0.1}, [(lambda y: y, T), (lambda y: (y - T) ** 2, 0.1 * T)]),
    "counts": (
        "PoissonNoise",
        {"gain": 0.1, "normalize": False},
        [(lambda y: y, 6.0), (lambda y: (y - 6) ** 2, 6.0), (lambda y: (y != y.round()).double(), 0.0)],
    ),
    "poisson-gaussian": (
        "PoissonGaussianNoise",
        {"gain": 0.1, "sigma": 0.2},
        [(lambda y: y, T), (lambda y: (y - T) ** 2, 0.1 * T + 0.04)],
    ),
    "log-poisson": (
        "LogPoissonNoise",
        {"N0": 50.0, "mu": 0.5},
        [(lambda y: (-0.5 * y).exp(), math.exp(-0.5 * T))],
    ),
    "salt-pepper": (
        "SaltPepperNoise",
        {"p": 0.1, "s": 0.3},
        [
            (lambda y: (y == 0).double(), 0.1),
            (lambda y: (y == 1).double(), 0.3),
            (lambda y: (y == T).double(), 0.6),
        ],
    ),
    "rician": (
        "RicianNoise",
        {"sigma": 0.2},
        [(lambda y: y**2, T**2 + 2 * 0.04), (lambda y: (y < 0).double(), 0.0)],
    ),
    "uniform-gaussian": (
        "UniformGaussianNoise",
        {"sigma_min": 0.2, "sigma_max": 0.2},
        [(lambda y: (y - T) ** 2, 0.04)],
    ),
}


def noise_of(name: str) -> tuple[DeepInvNoise, list[tuple[Moments, float]]]:
    model, options, moments = NOISES[name]
    return DeepInvNoise(model, NoiseOptions(**options)), moments


def test_every_noise_and_every_option_is_tried() -> None:
    assert {name for name, _, _ in NOISES.values()} == set(_OPTIONS)
    offered = {option for options in _OPTIONS.values() for option in options}
    assert offered == {field.name for field in fields(NoiseOptions)}
    assert offered == {option for _, options, _ in NOISES.values() for option in options}


@pytest.mark.parametrize("name", NOISES)
def test_noise_has_the_moments_of_its_formula(physics: Any, name: str) -> None:
    noise, moments = noise_of(name)
    t = torch.full((1, 200, DRAWS // 200), T, dtype=torch.float64)
    y = noise.sample(t, keyed_generator("deepinv", 0))
    assert y.shape == t.shape and y.dtype == torch.float64
    for function, expected in moments:
        values = function(y)
        assert abs(float(values.mean()) - expected) <= 6 * float(values.std()) / math.sqrt(DRAWS) + 1e-12
    if noise.level is not None:
        assert float((y - t).std()) == pytest.approx(noise.level, rel=0.03)


@pytest.mark.parametrize("name", NOISES)
def test_noise_depends_on_its_generator_alone(physics: Any, name: str) -> None:
    noise, _ = noise_of(name)
    t = torch.rand(3, 6, 7, dtype=torch.float64, generator=keyed_generator("t"))
    before, state = t.clone(), torch.get_rng_state()
    first = noise.sample(t, keyed_generator(1))
    assert torch.equal(first, noise_of(name)[0].sample(t, keyed_generator(1)))
    assert not torch.equal(first, noise.sample(t, keyed_generator(2)))
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(t, before)


def test_the_level_of_a_random_level_is_drawn_for_each_sample(physics: Any) -> None:
    noise = DeepInvNoise("UniformGaussianNoise", NoiseOptions(sigma_min=0.1, sigma_max=0.4))
    t = torch.zeros(1, 100, 100, dtype=torch.float64)
    levels = [float(noise.sample(t, keyed_generator(k)).std()) for k in range(6)]
    assert noise.level is None
    assert all(0.09 < level < 0.42 for level in levels) and max(levels) - min(levels) > 0.03


def test_noise_that_cannot_be_is_refused(physics: Any) -> None:
    for options, message in (
        ({"gain": 1.0}, "LaplaceNoise has no option 'gain'; it has b"),
        ({"sigma": 1.0}, "LaplaceNoise has no option 'sigma'"),
    ):
        with pytest.raises(ValueError, match=message):
            DeepInvNoise("LaplaceNoise", NoiseOptions(**options))
    with pytest.raises(ValueError, match=r"0.7 \+ 0.6 > 1"):
        DeepInvNoise("SaltPepperNoise", NoiseOptions(p=0.7, s=0.6))
    with pytest.raises(ValueError, match="sigma_min is larger"):
        DeepInvNoise("UniformGaussianNoise", NoiseOptions(sigma_min=0.7, sigma_max=0.6))
    with pytest.raises(ValueError, match=r"falls to -0\.5"):
        DeepInvNoise("PoissonNoise").sample(torch.full((1, 2, 2), -0.5).double(), keyed_generator(0))


def test_trains_with_noise(physics: Any) -> None:
    noise = {"name": "deepinv", "model": "RicianNoise", "options": {"sigma": 0.05}}
    assert assemble(recipe_from_dict(RECIPE | {"noise": noise})).run().steps == 1


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepinv", None)
    with pytest.raises(MissingError, match=r"pip install 'bltoolbox\[deepinv\]'"):
        DeepInv("Blur", (8, 8))
    with pytest.raises(MissingError, match=r"pip install 'bltoolbox\[deepinv\]'"):
        DeepInvNoise("GaussianNoise")
    registry = load_registry()
    for kind in ("operator", "noise"):
        outcomes = check_component(registry.get(kind, "deepinv"), registry)
        assert outcomes[-1].status == "skipped"
