"""Physics of deepinv as operators: exact, the same in every precision, and only what a fixed list allows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from test_operators import RECIPE, normal

from blt_builtins.operators.blur import gaussian_kernel
from blt_builtins.operators.deepinv_physics import _MAKERS, DeepInv, Options
from bltoolbox.bilevel.tensors import dot, norm
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


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepinv", None)
    with pytest.raises(MissingError, match=r"pip install 'bltoolbox\[deepinv\]'"):
        DeepInv("Blur", (8, 8))
    registry = load_registry()
    outcomes = check_component(registry.get("operator", "deepinv"), registry)
    assert outcomes[-1].status == "skipped"
