"""Restoring pictures of any size and kind: tiles without seams, tiny pictures, channels, noise levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_models import as_bytes, clean_picture, noisy_picture, toy_model

from blt_builtins.operators.blur import Blur
from blt_builtins.operators.identity import Identity
from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.errors import BltError, UsageError
from bltoolbox.restoration import cuts
from bltoolbox.restoration import overlap as influence
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.metrics import psnr
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.tiles import Restorer

TIGHT = 3e-6


@pytest.fixture(scope="module")
def colour() -> Model:
    return toy_model()


@pytest.fixture(scope="module")
def gray() -> Model:
    return toy_model(color="gray")


# Tiles


@pytest.mark.parametrize(
    "regularizer",
    [
        {"name": "foe", "filters": 10, "kernel_size": 5, "weight": 0.05},
        {"name": "foe", "filters": 4, "kernel_size": 3, "boundary": "valid"},
        {"name": "tv"},
        {"name": "crr", "filters": 6, "kernel_size": 3},
        {"name": "icnn", "filters": 6, "kernel_size": 3},
    ],
    ids=["foe", "foe-valid", "tv", "crr", "icnn"],
)
def test_denoising_in_tiles_is_denoising_the_whole(regularizer: dict[str, Any]) -> None:
    model = toy_model(regularizer=regularizer, lower_solver="agd")
    noisy = noisy_picture(150, 170)
    whole, _ = Restorer(model, tol=TIGHT).run(noisy)
    tiled, report = Restorer(model, tol=TIGHT, tile=110).run(noisy)
    assert report.tiles > 3 and report.overlap > 0
    assert np.abs(tiled - whole).max() < 1e-4
    assert report.seam < 1e-4
    assert report.notes == ()


def test_deblurring_in_tiles() -> None:
    """The figure is measured: 2e-5 for a Gaussian of 2 pixels and strong convexity 0.01."""
    model = toy_model(
        operator={"name": "blur", "size": 7, "sigma": 2},
        strong_convexity=1e-2,
        noise=5 / 255,
        regularizer={"name": "foe", "filters": 10, "kernel_size": 5, "weight": 1e-3},
    )
    noisy = noisy_picture(150, 200, sigma=5 / 255)
    whole, _ = Restorer(model, tol=TIGHT).run(noisy)
    tiled, report = Restorer(model, tol=TIGHT, tile=160).run(noisy)
    assert report.tiles > 1
    assert np.abs(tiled - whole).max() < 1e-4
    assert report.seam < 1e-4


def test_a_seam_is_healed_or_told(colour: Model) -> None:
    noisy = noisy_picture(100, 120)
    healed, told = Restorer(colour, tile=90), Restorer(colour, tile=90)
    enough = healed.large_overlap
    healed.overlap = told.overlap = told.large_overlap = 1
    parts: list[float] = []
    _, report = healed.run(noisy, progress=lambda part, phase: parts.append(part))
    assert report.overlap == enough > 1 and report.seam < 0.5 / 255 and not report.notes
    assert parts[-1] == 1 and all(0 <= part <= 1 for part in parts)
    _, report = told.run(noisy)
    assert report.overlap == 1 and report.seam > 0.5 / 255
    assert "there is a jump of up to" in report.notes[0]


@pytest.mark.parametrize(
    ("height", "width", "overlap"), [(150, 170, 12), (64, 200, 5), (199, 61, 1), (90, 90, 40)]
)
def test_tiles_are_put_together_as_they_were_cut(height: int, width: int, overlap: int) -> None:
    """Parts of one picture give the picture, whatever their overlap; tiles that differ meet without a jump."""
    image = np.random.default_rng(0).random((height, width, 2)).astype(np.float32)
    parts = list(cuts.tiles(height, width, 50, overlap, 30))
    fade = cuts.fade_length(parts, overlap)
    for change in (0.0, 0.1):
        out = np.full_like(image, np.nan)

        def write(first: int, rows: np.ndarray, out: np.ndarray = out) -> None:
            out[first : first + len(rows)] = rows

        canvas, seams = cuts.Canvas(height, width, 2, fade, write), cuts.Seams(width, 2, fade)
        for number, tile in enumerate(parts):
            seen = image[tile.rows, tile.columns] + np.float32(change * (number % 2))
            seams.compare(tile, seen)
            canvas.add(tile, seen)
        canvas.finish()
        offset = out - image
        assert len(parts) > 1 and offset.min() > -1e-6 and offset.max() < change + 1e-6
        jumps = [float(np.abs(np.diff(offset, axis=axis)).max()) for axis in (0, 1)]
        assert max(jumps) <= change / max(1, 2 * fade) + 1e-6
        assert seams.largest == pytest.approx(change / max(1, 2 * fade), abs=1e-6)


def test_eight_bits_need_less_overlap(colour: Model) -> None:
    noisy = as_bytes(noisy_picture(150, 170))
    restorer = Restorer(colour, tile=110, tol=TIGHT)
    assert 0 < restorer.coarse_overlap < restorer.overlap
    tiled, report = restorer.run(noisy)
    whole, _ = Restorer(colour, tol=TIGHT).run(noisy)
    assert report.tiles > 3 and report.overlap == restorer.coarse_overlap
    # Values next to a rounding limit may fall on either side of it.
    assert np.abs(tiled.astype(int) - whole).max() <= 1 and (tiled != whole).mean() < 0.01


def test_tiles_have_lengths_that_transform_fast() -> None:
    assert [cuts.fast_length(length) for length in (1, 8, 61, 677, 691, 768)] == [2, 8, 64, 686, 700, 768]
    for tile in cuts.tiles(1500, 1300, 500, 24, 64):
        for seen, core in ((tile.rows, tile.core_rows), (tile.columns, tile.core_columns)):
            length = seen.stop - seen.start
            assert length == cuts.fast_length(length)
            assert seen.start <= max(0, core.start - 24) and seen.stop >= min(1300, core.stop + 24)


@pytest.mark.parametrize("length", [1301, 1302, 1303, 1304])
def test_tiles_begin_where_networks_with_strides_see_the_same_groups(length: int) -> None:
    parts = list(cuts.tiles(length, 500, 500, 24, 64))
    assert all(tile.rows.start % cuts.PACE == 0 for tile in parts)
    assert [tile.core_rows.start for tile in parts[1:]] == [tile.core_rows.stop for tile in parts[:-1]]
    assert parts[-1].rows.stop == parts[-1].core_rows.stop == length
    assert max(tile.rows.stop - tile.rows.start for tile in parts) <= 1.15 * 500


def test_the_overlap_grows_with_the_reach() -> None:
    near, far = (
        Restorer(toy_model(regularizer={"name": "tikhonov", "weight": weight})).overlap
        for weight in (0.1, 10.0)
    )
    assert 0 < near < far < influence.MOST


def test_a_flat_picture_reaches_further_than_a_photograph() -> None:
    restorer = Restorer(Model.load("denoise-gray-foe", device="cpu"))
    assert 0 < restorer.overlap < restorer.large_overlap < influence.MOST


def test_the_reach_is_that_of_the_minimiser() -> None:
    """What is said to be left in front of a line is what is left there when the measurements change beyond it."""
    model = toy_model(regularizer={"name": "tikhonov", "weight": 2.0})
    theta = {name: value.double() for name, value in model.theta.items()}
    y = influence.extremes(theta, influence.strip_size(3, 16, influence.Geometry()))[:1]
    left = influence._reach(model.problem, theta, y, influence.Geometry())
    changed = y.clone()
    changed[..., -influence._BEYOND :] += 1
    lower = model.problem.at(theta, y.shape[1:]).on(torch.cat([y, changed]))
    before, after = solve_cold(model.solver, lower, 1e-8, 10_000).x
    moved = (after - before)[..., : -influence._BEYOND].abs().amax((0, 1)).flip(0)
    torch.testing.assert_close(moved, left, atol=0.1 * influence.LEVEL, rtol=0)  # random signs reach less far


def test_where_the_reach_is_not_found_the_largest_overlap_is_taken(
    colour: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(influence, "_ITERATIONS", 2)
    restorer = Restorer(colour)
    strips = influence.extremes(colour.theta, influence.strip_size(3, restorer.side, influence.Geometry()))
    found = influence.measure_overlap(restorer.problem, colour.theta, strips)
    assert found == influence.Overlap(influence.MOST, 1.0)
    assert restorer.overlap == influence.MOST


def test_tiles_cover_thin_and_odd_pictures(colour: Model) -> None:
    for shape in ((3, 700), (701, 5), (97, 211)):
        noisy = noisy_picture(*shape)
        whole, _ = Restorer(colour, tol=TIGHT).run(noisy)
        tiled, report = Restorer(colour, tol=TIGHT, tile=40).run(noisy)
        assert report.tiles > 1
        assert np.abs(tiled - whole).max() < 1e-4


# Small pictures


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 3), (4, 4), (5, 1), (17, 23)])
@pytest.mark.parametrize("operator", ["identity", {"name": "blur", "size": 9}])
def test_pictures_smaller_than_the_kernel(shape: tuple[int, int], operator: Any) -> None:
    model = toy_model(operator=operator, strong_convexity=0.0 if operator == "identity" else 0.01)
    noisy = as_bytes(noisy_picture(*shape))
    restored = model.restore(noisy)
    assert restored.shape == noisy.shape and restored.dtype == np.uint8
    flat = np.full((*shape, 3), 100, np.uint8)
    np.testing.assert_allclose(model.restore(flat), flat, atol=1 if operator == "identity" else 2)


# Channels


def test_a_gray_picture_through_a_colour_model(colour: Model) -> None:
    clean, noisy = clean_picture(64, 64, 1), noisy_picture(64, 64, 1, sigma=25 / 255)
    restored, report = Restorer(colour).run(noisy)
    assert restored.shape == noisy.shape
    assert psnr(restored, clean) > psnr(noisy, clean) + 4
    assert "averaged" in report.notes[0]
    less = colour.restore(noisy, noise=25 / 255 / math.sqrt(3))
    assert psnr(restored, clean) > psnr(less, clean), "the same noise in all channels is stronger noise"


def test_a_colour_picture_through_a_gray_model(gray: Model) -> None:
    noisy = noisy_picture(40, 50)
    restored, report = Restorer(gray, tol=TIGHT).run(noisy)
    assert "separately" in report.notes[0]
    for channel in range(3):
        alone = gray.restore(noisy[..., channel], tol=TIGHT)
        np.testing.assert_allclose(restored[..., channel], alone, atol=1e-5)


def test_gray_data_make_a_gray_model(gray: Model, colour: Model) -> None:
    assert (gray.channels, colour.channels) == (1, 3)
    unlabelled = Model(gray.problem, gray.solver, gray.theta, colour.recipe)
    assert unlabelled.channels == 1


# Noise levels


def test_noise_levels(colour: Model) -> None:
    noisy = noisy_picture(48, 48, sigma=0.02)
    own, report = Restorer(colour).run(noisy)
    assert report.noise == 25 / 255 and not report.estimated
    np.testing.assert_array_equal(own, colour.restore(noisy, noise="25/255"))
    _, report = Restorer(colour).run(noisy, "auto")
    assert report.estimated and report.noise == pytest.approx(0.02, rel=0.2)
    clean = clean_picture(48, 48)
    assert psnr(colour.restore(noisy, "auto"), clean) > psnr(own, clean)


def test_restoring_scales_with_the_noise(colour: Model) -> None:
    noisy = noisy_picture(32, 40)
    half = colour.restore(noisy / 2, noise=12.5 / 255, tol=TIGHT)
    np.testing.assert_allclose(half, colour.restore(noisy, tol=2 * TIGHT) / 2, atol=3e-5)


def test_a_model_without_noise_has_no_other_levels() -> None:
    model = toy_model(noise=0)
    noisy = noisy_picture(20, 20)
    assert model.restore(noisy).shape == noisy.shape
    with pytest.raises(BltError, match="trained without noise"):
        model.restore(noisy, noise=0.1)


# Arrays and tensors


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(20, 24), (20, 24, 1), (20, 24, 3)])
def test_arrays_come_back_as_they_are(colour: Model, dtype: Any, shape: tuple[int, ...]) -> None:
    noisy = noisy_picture(20, 24, 3 if shape[-1] == 3 else 1).reshape(shape)
    top = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else 1
    given = (noisy.clip(0, 1) * top).astype(dtype)
    before = given.copy()
    found = colour.restore(given)
    assert isinstance(found, np.ndarray)
    assert found.shape == shape and found.dtype == dtype
    np.testing.assert_array_equal(given, before)
    reference = colour.restore(noisy.clip(0, 1))
    np.testing.assert_allclose(found / top, reference.clip(0, 1), atol=1.5 / 255 if top == 255 else 2e-3)
    flipped = colour.restore(given[::-1])  # negative strides
    assert flipped.shape == shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 24), (1, 20, 24), (3, 20, 24), (2, 3, 20, 24)])
def test_tensors_come_back_as_they_are(colour: Model, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    top = {torch.uint8: 255, torch.uint16: 65535}.get(dtype, 1)
    found = colour.restore((values * top).to(dtype))
    assert isinstance(found, torch.Tensor)
    assert tuple(found.shape) == shape and found.dtype == dtype


def test_a_batch_changes_nothing(colour: Model) -> None:
    batch = torch.from_numpy(np.stack([noisy_picture(20, 24, seed=k) for k in range(3)])).permute(0, 3, 1, 2)
    together = colour.restore(batch)
    for one, alone in zip(together, batch, strict=True):
        torch.testing.assert_close(one, colour.restore(alone), rtol=0, atol=0)
    as_array = colour.restore(batch[0].permute(1, 2, 0).numpy())
    np.testing.assert_array_equal(as_array, together[0].permute(1, 2, 0).numpy())
    assert colour.restore(batch[:0]).shape == (0, 3, 20, 24)


@pytest.mark.parametrize("colours", [1, 3])
def test_alpha_is_kept(colour: Model, colours: int) -> None:
    noisy = as_bytes(noisy_picture(20, 24, colours))
    alpha = np.random.default_rng(0).integers(0, 256, (20, 24, 1), dtype=np.uint8)
    found = colour.restore(np.concatenate([noisy, alpha], axis=2))
    np.testing.assert_array_equal(found[..., colours:], alpha)
    np.testing.assert_array_equal(found[..., :colours], colour.restore(noisy))


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (np.zeros((3, 20, 24)), "would have 24 channels"),
        (np.zeros((2, 3, 20, 24)), "expected an array of shape"),
        (np.zeros((20, 24), bool), "not bool"),
        (np.zeros((20, 24), np.int64), "not int64"),
        (np.zeros((0, 24), np.uint8), "is empty"),
        (np.full((20, 24), np.nan), "or NaN"),
        (np.full((20, 24), 200.0), "far outside"),
        ([[1, 2]], "got list"),
        (torch.zeros(5), "expected a tensor of shape"),
    ],
)
def test_other_arrays_are_refused(colour: Model, image: Any, sentence: str) -> None:
    with pytest.raises(BltError, match=sentence):
        colour.restore(image)


def test_other_settings_are_refused(colour: Model) -> None:
    noisy = noisy_picture(20, 24)
    with pytest.raises(UsageError, match="noise level"):
        colour.restore(noisy, noise=-1)
    for settings in ({"tol": 0.0}, {"tol": math.nan}, {"tile": 0}):
        with pytest.raises(BltError, match="positive"):
            colour.restore(noisy, **settings)  # type: ignore[type-var]


# Operators


def blurred(clean: np.ndarray, operator: Blur) -> np.ndarray:
    x = torch.from_numpy(clean).permute(2, 0, 1).unsqueeze(0)
    return operator.apply(x, {}, {})[0].permute(1, 2, 0).numpy()


def test_another_kernel(colour: Model) -> None:
    kernel = Blur(size=5, sigma=1.5, boundary="valid")
    clean = clean_picture(64, 70)
    y = blurred(clean, kernel) + np.random.default_rng(0).normal(0, 1 / 255, (60, 66, 3))
    seen = clean[2:-2, 2:-2]
    model = colour.with_operator("blur", size=5, sigma=1.5)
    restored = model.restore(y, noise=1 / 255)
    assert restored.shape == y.shape
    assert psnr(restored, seen) > psnr(y, seen) + 1
    honest = colour.with_operator(kernel).restore(y, noise=1 / 255)
    assert honest.shape == y.shape and psnr(honest, seen) > psnr(y, seen) + 1
    assert "blur" in repr(model) and "identity" in repr(colour)
    refused = {
        "did you mean 'size'": {"sise": 3},
        "there is no kernel file": {"kernel": "no.npy"},
        "size": {"size": -1},
    }
    for sentence, options in refused.items():
        with pytest.raises(UsageError, match=sentence):
            colour.with_operator("blur", **options)
    with pytest.raises(UsageError, match="did you mean 'blur'"):
        colour.with_operator("blurr")


@pytest.mark.parametrize("boundary", ["zero", "periodic", "symmetric"])
def test_the_border_of_a_photograph_does_not_ring(boundary: str) -> None:
    """What was beyond the border in the scene is in the photograph, whatever rule a model was trained with."""
    model = toy_model(
        operator={"name": "blur", "size": 7, "sigma": 2, "boundary": boundary},
        strong_convexity=1e-2,
        noise=1 / 255,
        regularizer={"name": "foe", "filters": 10, "kernel_size": 5, "weight": 1e-3},
    )
    scene = np.broadcast_to(np.linspace(0.1, 0.9, 70)[:, None, None], (70, 70, 3))
    y = blurred(np.ascontiguousarray(scene), Blur(size=7, sigma=2.0, boundary="valid"))
    restored = model.restore(y, tol=1e-5)
    assert np.abs(restored - scene[3:-3, 3:-3]).max() < 0.05


def test_a_model_that_enlarges(colour: Model) -> None:
    model = colour.with_operator("downsampling", factor=2)
    y = noisy_picture(20, 24)
    assert model.restore(y).shape == (40, 48, 3)
    with pytest.raises(BltError, match="alpha channel does not fit"):
        model.restore(np.concatenate([y, y[..., :1]], axis=2))


def strong(operator: dict[str, Any], color: str = "gray") -> Model:
    """A model whose minimisers are unique, whatever the operator does not see; so accurate that only cuts count."""
    return toy_model(
        operator=operator,
        strong_convexity=5e-2,
        noise=5 / 255,
        color=color,
        dtype="float64",
        lower_solver="agd",
        regularizer={"name": "foe", "filters": 4, "kernel_size": 3, "weight": 1e-2, "nu": 0.1},
    )


@pytest.mark.parametrize(
    ("operator", "scale"),
    [
        ({"name": "downsampling", "factor": 2}, 2),
        ({"name": "downsampling", "factor": 3}, 3),
        ({"name": "composed", "parts": [{"name": "blur", "size": 3}, {"name": "downsampling"}]}, 2),
    ],
    ids=["2", "3", "blurred"],
)
def test_enlarging_in_tiles_is_enlarging_the_whole(operator: dict[str, Any], scale: int) -> None:
    model = strong(operator)
    y = noisy_picture(70, 61, 1, sigma=5 / 255)
    whole, _ = Restorer(model, tol=TIGHT).run(y)
    restorer = Restorer(model, tol=TIGHT, tile=100)
    assert restorer.around is not None and restorer.around.scale == scale
    tiled, report = restorer.run(y)
    assert whole.shape == tiled.shape == (70 * scale, 61 * scale, 1)
    assert report.tiles > 1 and report.overlap % scale == 0
    assert np.abs(tiled - whole).max() < 1e-4
    assert report.seam < 1e-4


@pytest.mark.parametrize(("mask", "color"), [("random", "gray"), ("file", "gray"), ("file", "rgb")])
def test_inpainting_in_tiles_is_inpainting_the_whole(mask: str, color: str, tmp_path: Path) -> None:
    """Each tile has its own part of the mask."""
    operator: dict[str, Any] = {"name": "inpainting", "missing": 0.4}
    if mask == "file":
        known = np.random.default_rng(0).random((100, 420)) > 0.3
        known[30:44, 60:330] = False  # a scratch across several tiles
        np.save(tmp_path / "mask.npy", known)
        operator = {"name": "inpainting", "mask": str(tmp_path / "mask.npy")}
    model = strong(operator, color)
    y = noisy_picture(100, 420, model.channels, sigma=5 / 255)
    whole, _ = Restorer(model, tol=TIGHT).run(y)
    tiled, report = Restorer(model, tol=TIGHT, tile=96).run(y)
    assert report.tiles > 2 and report.overlap == influence.MOST
    assert np.abs(tiled - whole).max() < 1e-4
    assert report.seam < 1e-4


def test_pictures_too_small_for_a_comparison_of_parts_are_seen_as_a_whole(colour: Model) -> None:
    model = colour.with_operator("inpainting", missing=0.3)
    _, report = Restorer(model, tile=16).run(noisy_picture(40, 50))
    assert report.tiles == 1


def test_a_mask_of_another_size_is_one_sentence(colour: Model, tmp_path: Path) -> None:
    np.save(tmp_path / "mask.npy", np.eye(20, 24))
    model = colour.with_operator("inpainting", mask=str(tmp_path / "mask.npy"))
    assert model.restore(noisy_picture(20, 24)).shape == (20, 24, 3)
    with pytest.raises(BltError, match="the mask is 20×24 but the images are 24×20"):
        model.restore(noisy_picture(24, 20))
    with pytest.raises(BltError, match="the mask is 20×24 but the images are 150×150"):
        model.restore(noisy_picture(150, 150), tile=100)


class Windowed(Identity):
    """An operator that cannot do without something about each image."""

    def example_contexts(self, shape: Sequence[int], count: int) -> list[Rows]:
        return [{"window": torch.ones(count, *shape[1:])}]


def test_a_picture_brings_no_context(colour: Model) -> None:
    with pytest.raises(BltError, match="needs 'window' of each measurement, so it cannot restore pictures"):
        colour.with_operator(Windowed()).restore(noisy_picture(20, 24))


class Weighted(Identity):
    """A factor of each pixel, learned: θ has the size of the images."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"weight": torch.ones(*shape[1:], dtype=torch.float64)}

    def apply(self, x: torch.Tensor, theta: Theta, context: Rows) -> torch.Tensor:
        return x * theta.get("weight", 1.0)

    def adjoint(self, y: torch.Tensor, theta: Theta, context: Rows) -> torch.Tensor:
        return self.apply(y, theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        weight = theta.get("weight", torch.ones(1))
        return float(weight.min()) ** 2, float(weight.max()) ** 2


def test_parameters_of_the_size_of_the_images_are_not_cut(colour: Model) -> None:
    weights = 0.5 + torch.rand(40, 50, generator=torch.Generator().manual_seed(0))
    model = colour.with_operator(Weighted())
    model = replace(model, theta={**model.theta, "operator.weight": weights})
    restorer = Restorer(model, tile=16)
    assert restorer.around is None
    _, report = restorer.run(noisy_picture(40, 50))
    assert report.tiles == 1


def test_measurements_that_are_no_pictures(colour: Model) -> None:
    with pytest.raises(BltError, match="'mri' does not measure pictures"):
        colour.with_operator("mri").restore(noisy_picture(20, 24))


def test_a_limit_is_told(colour: Model) -> None:
    short = Model(colour.problem, colour.solver, colour.theta, replace(colour.recipe, iteration_limit=2))
    _, report = Restorer(short).run(noisy_picture(30, 30))
    assert "less accurate than requested: the iteration limit" in report.notes[0]
