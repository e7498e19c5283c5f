"""``blt evaluate --images``: whole photographs, the same noise in every run, and baselines."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import caller
from PIL import Image
from toy_models import as_bytes, clean_picture, toy_model

from bltoolbox.config.registry import load_registry
from bltoolbox.errors import UsageError
from bltoolbox.restoration.layout import LUMA
from bltoolbox.restoration.metrics import METRICS, psnr
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.protocol import Photograph, compare_on_photographs, means

SIGMA = 25 / 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two photographs of different sizes, and a file that is none."""
    path = tmp_path_factory.mktemp("photographs")
    for name, shape in (("b.png", (40, 31)), ("a.png", (24, 50))):
        Image.fromarray(as_bytes(clean_picture(*shape))).save(path / name)
    (path / "notes.txt").write_text("no picture")
    return path


def table(
    model: Model, folder: Path, against: tuple[str, ...] = ("noisy",), seed: int = 0
) -> list[Photograph]:
    chosen = [METRICS["psnr"], METRICS["ssim"]]
    rows = compare_on_photographs(model, "toy", folder, SIGMA, chosen, against, load_registry(), seed=seed)
    return list(rows)


def test_noise_depends_on_seed_and_name_only(folder: Path, tmp_path: Path) -> None:
    model = toy_model()
    first, second = table(model, folder)
    assert [(row.name, row.width, row.height) for row in (first, second)] == [
        ("a.png", 50, 24),
        ("b.png", 31, 40),
    ]
    Image.open(folder / "b.png").save(tmp_path / "b.tif")
    (alone,) = table(model, tmp_path)
    assert alone.metrics == second.metrics
    assert table(model, tmp_path, seed=1)[0].metrics["noisy"] != alone.metrics["noisy"]
    assert means([first, second], "psnr")["toy"] == pytest.approx(
        (first.metrics["toy"]["psnr"] + second.metrics["toy"]["psnr"]) / 2
    )


def test_noise_has_the_level_and_is_not_clipped(tmp_path: Path) -> None:
    """On a black picture, half of the noise would be lost if it were clipped before restoring: the mean of x̂ would be
    far above 0."""
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(tmp_path / "black.png")
    seen: dict[str, Any] = {}
    metric = METRICS["psnr"]

    def spy(x: np.ndarray, truth: np.ndarray, span: Any) -> float:
        seen[str(len(seen))] = x
        return psnr(x, truth, span)

    spying = [replace(metric, of=spy)]
    list(compare_on_photographs(toy_model(), "toy", tmp_path, SIGMA, spying, ("noisy",), load_registry()))
    restored, noisy = seen["0"], seen["1"]
    assert noisy.std() == pytest.approx(SIGMA, rel=0.03) and noisy.min() < -2 * SIGMA
    assert abs(float(restored.mean())) < 0.1 * SIGMA


def test_gray_models_see_the_luma(folder: Path, tmp_path: Path) -> None:
    pixels = np.asarray(Image.open(folder / "a.png")).astype(float)
    luma = np.floor(pixels @ np.array(LUMA) + 0.5).astype(np.uint8)
    Image.fromarray(luma).save(tmp_path / "a.png")
    gray = toy_model(color="gray")
    (expected,) = table(gray, tmp_path)
    assert table(gray, folder)[0].metrics == expected.metrics


def test_pictures_that_do_not_fit_are_named_before_anything_is_restored(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.png"):
        shutil.copy(path, tmp_path / path.name)
    picture = Image.open(folder / "a.png")
    picture.convert("L").save(tmp_path / "gray.png")
    picture.convert("CMYK").save(tmp_path / "print.jpg")
    began: list[str] = []
    for model, named in (
        (
            toy_model(),
            "2 of 4 pictures cannot be used: gray.png is gray, print.jpg is CMYK; colour models take RGB",
        ),
        (
            toy_model(color="gray"),
            "1 of 4 pictures cannot be used: print.jpg is CMYK; gray models take gray or RGB",
        ),
    ):
        rows = compare_on_photographs(
            model,
            "toy",
            tmp_path,
            SIGMA,
            [METRICS["psnr"]],
            (),
            load_registry(),
            started=lambda *_: began.append(""),
        )
        with pytest.raises(UsageError, match=named):
            list(rows)
    assert not began


def test_baselines(folder: Path) -> None:
    model = toy_model()
    for row in table(model, folder, ("noisy", "tv")):
        assert row.metrics["tv"]["psnr"] > row.metrics["noisy"]["psnr"] + 3
        assert set(row.seconds) == {"toy", "noisy", "tv"}
    with pytest.raises(UsageError, match="no baseline 'tvv'; did you mean 'tv'"):
        table(model, folder, ("tvv",))
    with pytest.raises(UsageError, match="it removes noise"):
        table(model.with_operator("blur", size=5, sigma=1.0), folder, ("tv",))
    with pytest.raises(UsageError, match="cannot be simulated on photographs"):
        table(model.with_operator("downsampling", factor=2), folder)


def test_deblurring_is_measured_on_blurred_photographs(folder: Path) -> None:
    model = toy_model().with_operator("blur", size=5, sigma=2.0)
    (row, _) = table(model, folder)
    assert row.metrics["noisy"]["psnr"] < table(toy_model(), folder)[0].metrics["noisy"]["psnr"]


@pytest.mark.skipif(importlib.util.find_spec("bm3d") is None, reason="bm3d is not installed")
def test_bm3d(folder: Path) -> None:
    for model in (toy_model(), toy_model(color="gray")):
        row = table(model, folder, ("bm3d", "noisy"))[0]
        assert row.metrics["bm3d"]["psnr"] > row.metrics["noisy"]["psnr"] + 3


def test_the_command(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blt = caller("", capfd)
    toy_model().save(tmp_path / "toy.safetensors")
    words = ["evaluate", str(tmp_path / "toy.safetensors"), "--images", str(folder), "--noise", "25/255"]
    done = blt(*words)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["image", "size", "toy", "noisy"] in lines and "PSNR" in done.stdout and "SSIM" in done.stdout
    assert lines[-1][:2] == ["seconds:", "toy"]
    facts = json.loads(blt(*words, "--json", "--metric", "psnr").stdout)
    assert facts["noise"] == SIGMA and list(facts["mean"]) == ["psnr"]
    assert [row["image"] for row in facts["photographs"]] == ["a.png", "b.png"]
    assert f"{facts['mean']['psnr']['toy']:.2f}" in lines[[line[:1] for line in lines].index(["mean"])]
    for more, sentence in (
        (["--images", str(tmp_path / "none")], "is not a folder"),
        (["--images", str(folder), "seed=1"], "remove the overrides"),
        (["--seed", "3"], "need --images"),
        (["--images", str(folder), "--noise", "auto"], "is not a level to simulate"),
    ):
        done = blt("evaluate", str(tmp_path / "toy.safetensors"), *more)
        assert done.returncode == 2 and sentence in done.stderr, done.stderr
