"""``blt apply`` and ``blt models`` as a person or a script sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from commands import caller
from conftest import BLT
from PIL import Image
from toy_models import as_bytes, clean_picture, noisy_picture, toy_model

from bltoolbox.config.block import Block
from bltoolbox.restoration import shipped as shipped_models
from bltoolbox.restoration.metrics import psnr, ssim
from bltoolbox.restoration.model import Model

SHARED = Path(__file__).parents[3] / "shared" / "data" / "images"

CARD = """---
summary: A toy.
task: denoising
parameters: 762
noise: 25/255
psnr: 28.9
levels: 5–50/255
images: four drawings
start: toys
---
# toy

Nobody trained it.
"""


class Outcome(NamedTuple):
    code: Any
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, where the commands run."""
    monkeypatch.chdir(tmp_path)
    toy_model().save(tmp_path / "toy.safetensors")
    return tmp_path


@pytest.fixture
def blt_here(here: Path, capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str) -> Outcome:
        device = ["--device", "cpu"] if arguments[0] == "apply" else []
        done = caller("", capfd)(*arguments, *device)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


def save(path: str, height: int = 24, width: int = 30, channels: int = 3, seed: int = 0) -> Path:
    pixels = as_bytes(noisy_picture(height, width, channels, sigma=25 / 255, seed=seed))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(path)
    return Path(path)


def pixels_of(path: Path | str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


# Inputs and outputs


def test_one_picture(blt_here: Call) -> None:
    source = save("a.png")
    done = blt_here("apply", "toy.safetensors", "a.png")
    assert done.code == 0
    assert "a-restored.png" in done.out and "30×24" in done.out
    assert "foe of 762 parameters, colour" in done.err
    model = Model.load("toy.safetensors", device="cpu")
    np.testing.assert_array_equal(pixels_of("a-restored.png"), model.restore(pixels_of(source), "auto"))


def test_folders_patterns_and_files(blt_here: Call) -> None:
    for name in ("in/b.png", "in/a.jpg", "in/.hidden.png", "deep/er/c.png", "d.webp"):
        save(name)
    Path("in/readme.txt").write_text("no picture")
    done = blt_here(
        "apply", "toy.safetensors", "in", "deep/**/*.png", "d.webp", "in/a.jpg", "-o", "out", "--json"
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [one["input"] for one in result["pictures"]] == ["in/a.jpg", "in/b.png", "deep/er/c.png", "d.webp"]
    expected = {"a-restored.jpg", "b-restored.png", "c-restored.png", "d-restored.webp"}
    assert {path.name for path in Path("out").iterdir()} == expected
    assert (result["restored"], result["failed"]) == (4, 0)


def test_results_are_not_restored_again(blt_here: Call) -> None:
    save("in/a.png")
    assert blt_here("apply", "toy.safetensors", "in").code == 0
    again = blt_here("apply", "toy.safetensors", "in", "--force")
    assert again.code == 0 and "1 files in in are already results" in again.err
    assert {path.name for path in Path("in").iterdir()} == {"a.png", "a-restored.png"}


def test_out_may_be_a_file_of_another_format(blt_here: Call) -> None:
    save("a.png")
    assert blt_here("apply", "toy.safetensors", "a.png", "-o", "new/b.jpg").code == 0
    with Image.open("new/b.jpg") as image:
        assert image.format == "JPEG" and image.size == (30, 24)


def test_formats_that_are_not_written_become_png(blt_here: Call) -> None:
    save("a.bmp")
    done = blt_here("apply", "toy.safetensors", "a.bmp")
    assert done.code == 0 and ".bmp cannot be written, so it becomes PNG" in done.err
    with Image.open("a-restored.png") as image:
        assert image.format == "PNG"


def test_what_exists_is_kept_unless_forced(blt_here: Call) -> None:
    save("in/a.png")
    save("in/b.png")
    Path("in/a-restored.png").write_text("mine")
    done = blt_here("apply", "toy.safetensors", "in/a.png", "in/b.png")
    assert done.code == 1 and "a-restored.png exists" in done.err and "1 of 2 pictures failed" in done.err
    assert Path("in/a-restored.png").read_text() == "mine" and Path("in/b-restored.png").is_file()
    done = blt_here("apply", "toy.safetensors", "in/a.png")
    assert done.code == 2 and "--force" in done.err and done.out == ""
    assert blt_here("apply", "toy.safetensors", "in/a.png", "--force").code == 0
    assert pixels_of("in/a-restored.png").shape == (24, 30, 3)


def test_a_broken_file_does_not_stop_the_rest(blt_here: Call) -> None:
    save("in/a.png")
    whole = save("in/b.jpg").read_bytes()
    Path("in/cut.jpg").write_bytes(whole[:300])
    Path("in/text.png").write_text("no picture")
    done = blt_here("apply", "toy.safetensors", "in", "missing.png", "none*.png", "--json")
    assert done.code == 1
    result = json.loads(done.out)
    assert (result["restored"], result["failed"]) == (2, 4)
    errors = {one["input"]: one["error"] for one in result["pictures"]}
    assert errors["in/a.png"] is None and errors["in/b.jpg"] is None
    assert "not an image" in errors["in/text.png"]
    assert "cut.jpg" in errors["in/cut.jpg"]
    assert errors["missing.png"] == "there is no file missing.png"
    assert errors["none*.png"] == "no picture matches none*.png"
    assert "4 of 6 pictures failed" in done.err


REFUSALS: dict[str, tuple[list[str], int, str]] = {
    "no such model": (["nothing", "a.png"], 4, "there is no such run directory, θ file or shipped model"),
    "an empty folder as model": (["empty", "a.png"], 4, "there is no such θ file"),
    "an unfinished run": (["half", "a.png"], 4, "the run is not finished"),
    "a model that is none": (["a.png", "a.png"], 1, "is not a readable θ file"),
    "no pictures": (["toy.safetensors", "empty"], 2, "there is no picture in empty"),
    "noise": (["toy.safetensors", "a.png", "--noise", "loud"], 2, "not a noise level"),
    "no noise": (["toy.safetensors", "a.png", "--noise", "0"], 2, "not a noise level"),
    "tol": (["toy.safetensors", "a.png", "--tol", "0"], 2, "--tol 0 is out of range"),
    "truth": (["toy.safetensors", "a.png", "--truth", "none.png"], 2, "none.png does not exist"),
    "one truth": (
        ["toy.safetensors", "a.png", "b.png", "--truth", "a.png"],
        2,
        "one file, but there are 2 pictures",
    ),
    "one file": (
        ["toy.safetensors", "a.png", "b.png", "-o", "c.png"],
        2,
        "one file, but there are 2 pictures",
    ),
    "a format": (["toy.safetensors", "a.png", "-o", "c.gif"], 2, ".gif files cannot be written"),
    "a file as folder": (["toy.safetensors", "a.png", "-o", "some.txt"], 2, "give a folder"),
    "a clash": (["toy.safetensors", "a.png", "in/a.png", "-o", "out"], 2, "would both become"),
    "operator": (["toy.safetensors", "a.png", "--operator", "blurr"], 4, "did you mean 'blur'"),
    "no kernel": (["toy.safetensors", "a.png", "--operator", "blur"], 2, "needs a kernel"),
    "needless kernel": (
        ["toy.safetensors", "a.png", "--operator", "identity", "--kernel", "gaussian:1"],
        2,
        "has no kernel",
    ),
    "missing kernel": (["toy.safetensors", "a.png", "--kernel", "k.npy"], 2, "no kernel file k.npy"),
    "bad Gaussian": (["toy.safetensors", "a.png", "--kernel", "gaussian:x"], 2, "gaussian:2"),
    "kernel of zeros": (["toy.safetensors", "a.png", "--kernel", "zero.npy"], 2, "no positive finite sum"),
    "kernel of text": (["toy.safetensors", "a.png", "--kernel", "some.txt"], 2, "some.txt"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_a_sentence_and_writes_nothing(name: str, blt_here: Call, here: Path) -> None:
    for path in ("a.png", "b.png", "in/a.png"):
        save(path)
    (here / "empty").mkdir()
    (here / "half" / "checkpoints").mkdir(parents=True)
    (here / "half" / "checkpoints" / "last.safetensors").write_bytes(b"")
    (here / "some.txt").write_text("mine")
    np.save(here / "zero.npy", np.zeros((3, 3)))
    before = sorted(here.rglob("*"))
    arguments, code, sentence = REFUSALS[name]
    done = blt_here("apply", *arguments)
    assert sentence in done.err, done.err
    assert done.code == code and done.out == ""
    assert len(done.err.strip().splitlines()) == 1
    assert sorted(here.rglob("*")) == before


# Options


def test_noise_levels_are_said(blt_here: Call) -> None:
    save("a.png", 64, 64)
    done = blt_here("apply", "toy.safetensors", "a.png", "--noise", "10", "-o", "ten.png")
    assert "noise 10 is above 1; using 10/255" in done.err
    assert "noise 10/255" in done.err
    done = blt_here("apply", "toy.safetensors", "a.png", "--noise", "auto", "-o", "auto.png")
    assert "(estimated)" in done.err
    done = blt_here("apply", "toy.safetensors", "a.png", "--noise", "auto", "-o", "json.png", "--json")
    (picture,) = json.loads(done.out)["pictures"]
    assert picture["noise_estimated"] and picture["noise"] == pytest.approx(25 / 255, rel=0.2)
    save("dot.png", 2, 2)
    done = blt_here("apply", "toy.safetensors", "dot.png", "--noise", "auto")
    assert done.code == 1 and "too few to estimate the noise" in done.err


def test_the_noise_is_estimated_unless_it_is_given(blt_here: Call) -> None:
    save("a.png", 64, 64)
    for how, expected, estimated in (((), 25, True), (("--noise", "model"), 25, False)):
        done = blt_here("apply", "toy.safetensors", "a.png", *how, "--force", "--json")
        (picture,) = json.loads(done.out)["pictures"]
        assert picture["noise_estimated"] is estimated
        assert picture["noise"] == pytest.approx(expected / 255, rel=0.2)
        assert not any("the noise looks like" in note for note in picture["notes"])
    done = blt_here("apply", "toy.safetensors", "a.png", "--noise", "10", "--force")
    assert "warning: the noise looks like 2" in done.err and "but 10/255 is used" in done.err
    # What is too small to tell is restored all the same.
    save("dot.png", 4, 4)
    done = blt_here("apply", "toy.safetensors", "dot.png")
    assert done.code == 0 and "too few to estimate the noise; using the model's 25/255" in done.err


def test_a_jpeg_file_with_noise_that_the_estimate_misses(blt_here: Call) -> None:
    noisy = Image.fromarray(as_bytes(noisy_picture(96, 96, sigma=25 / 255)))
    noisy.save("strong.jpg", quality=40)
    noisy.save("white.png")
    done = blt_here("apply", "toy.safetensors", "strong.jpg", "white.png", "--json")
    compressed, white = json.loads(done.out)["pictures"]
    assert any("may be correlated" in note for note in compressed["notes"])
    assert not any("correlated" in note for note in white["notes"])


def test_a_model_whose_training_components_are_missing(blt_here: Call, here: Path) -> None:
    """Neither to restore pictures nor to load it and save it again: nothing of its recipe is lost."""
    model = toy_model()
    sections = {"sampler": "theirs", "upper_optimizer": "secret", "data": "private"}
    blocks = {key: Block(key, name) for key, name in sections.items()}
    replace(model, recipe=replace(model.recipe, **blocks)).save(here / "foreign.safetensors")
    save("a.png")
    assert blt_here("apply", "foreign.safetensors", "a.png").code == 0
    loaded = Model.load(here / "foreign.safetensors", device="cpu")
    loaded.save(here / "again.safetensors")
    again = Model.load(here / "again.safetensors", device="cpu").recipe
    assert (again.sampler.name, again.upper_optimizer.name, again.data.name) == (
        "theirs",
        "secret",
        "private",
    )
    done = blt_here("evaluate", "foreign.safetensors", "regularizer=theirs")
    assert done.code == 3 and "add --plugin FILE.py" in done.err


def test_truth(blt_here: Call) -> None:
    save("in/a.png", 40, 50)
    save("in/b.jpg", 40, 50, channels=1)
    Path("clean").mkdir()
    clean = as_bytes(clean_picture(40, 50))
    Image.fromarray(clean).save("clean/a.png")
    Image.fromarray(as_bytes(clean_picture(40, 50, 1))[..., 0]).save("clean/b.png")
    done = blt_here("apply", "toy.safetensors", "in", "-o", "out", "--truth", "clean", "--json")
    assert done.code == 0, done.err
    colour, gray = json.loads(done.out)["pictures"]
    assert colour["psnr_before"] == pytest.approx(psnr(pixels_of("in/a.png"), clean))
    assert colour["psnr"] == pytest.approx(psnr(pixels_of("out/a-restored.png"), clean))
    assert colour["ssim"] == pytest.approx(ssim(pixels_of("out/a-restored.png"), clean))
    assert colour["psnr"] > colour["psnr_before"] + 3 and gray["psnr"] > gray["psnr_before"] + 3
    assert any("averaged" in note for note in gray["notes"])
    done = blt_here("apply", "toy.safetensors", "in", "-o", "out", "--truth", "clean", "--force")
    assert f"{colour['psnr_before']:.2f} → {colour['psnr']:.2f}" in done.out
    done = blt_here("apply", "toy.safetensors", "in/a.png", "-o", "c.png", "--truth", "clean/a.png", "-q")
    assert done.code == 0 and done.err == "" and "SSIM" in done.out


def test_a_truth_that_does_not_fit_is_told(blt_here: Call) -> None:
    save("in/a.png")
    save("in/b.png")
    save("clean/a.png", 10, 10)
    done = blt_here("apply", "toy.safetensors", "in", "-o", "out", "--truth", "clean")
    assert done.code == 1
    assert "it is 10×10 and the result 30×24" in done.err
    assert "clean contains no picture named b" in done.err
    assert {path.name for path in Path("out").iterdir()} == {"a-restored.png", "b-restored.png"}


@pytest.mark.parametrize("how", ["npy", "png", "gaussian"])
def test_another_kernel(blt_here: Call, how: str) -> None:
    save("a.png", 40, 40)
    matrix = np.outer([1, 2, 1], [1, 2, 1])
    np.save("k.npy", matrix)
    Image.fromarray((matrix * 50).astype(np.uint8)).save("k.png")
    kernel = {"npy": "k.npy", "png": "k.png", "gaussian": "gaussian:1:5"}[how]
    done = blt_here(
        "apply", "toy.safetensors", "a.png", "--operator", "blur", "--kernel", kernel, "--noise", "5/255"
    )
    assert done.code == 0, done.err
    assert "operator blur" in done.err
    model = Model.load("toy.safetensors", device="cpu")
    options = {"size": 5, "sigma": 1.0} if how == "gaussian" else {"kernel": (matrix / 16).tolist()}
    expected = model.with_operator("blur", **options).restore(pixels_of("a.png"), noise=5 / 255)
    np.testing.assert_allclose(pixels_of("a-restored.png").astype(int), expected.astype(int), atol=1)


def test_tiles_of_a_large_picture(blt_here: Call) -> None:
    save("a.png", 150, 160)
    done = blt_here("apply", "toy.safetensors", "a.png", "--tile", "110", "--tol", "1e-5")
    assert done.code == 0 and "tiles overlapping by" in done.err
    model = Model.load("toy.safetensors", device="cpu")
    whole = model.restore(pixels_of("a.png"), "auto", tol=1e-5).astype(int)
    assert np.abs(pixels_of("a-restored.png").astype(int) - whole).max() <= 1


def test_inks_are_not_mixed(blt_here: Call) -> None:
    clean = as_bytes(clean_picture(40, 40, 4))
    noise = np.random.default_rng(0).normal(0, 20, clean.shape)
    noisy = (clean + noise).clip(0, 255).astype(np.uint8)
    noisy[..., 3] = 0
    image = Image.frombytes("CMYK", (40, 40), noisy.tobytes())
    image.save("a.tif")
    assert blt_here("apply", "toy.safetensors", "a.tif").code == 0
    found = pixels_of("a-restored.tif")
    assert found.shape == (40, 40, 4) and found[..., 3].max() == 0
    assert psnr(found[..., :3], clean[..., :3]) > psnr(noisy[..., :3], clean[..., :3]) + 3


def test_a_run_directory_is_a_model(blt_here: Call, here: Path) -> None:
    save("a.png")
    tiny = [
        "data={name: dead-leaves, count: 4, size: 16}",
        "evaluation=",
        "regularizer={name: foe, filters: 2, kernel_size: 3}",
        "sampler.size=2",
        "validation={count: 0}",
        "budget={steps: 1}",
        "device=cpu",
    ]
    assert blt_here("run", "smoke", *tiny, "-q", "-o", "run").code == 0
    assert blt_here("apply", "run", "a.png").code == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of awkward pictures is not here")
def test_awkward_pictures(blt_here: Call) -> None:
    done = blt_here(
        "apply", "toy.safetensors", str(SHARED), "-o", "out", "--noise", "10", "--json", "--tol", "1e-2"
    )
    assert done.code == 0, done.err
    for one in json.loads(done.out)["pictures"]:
        with Image.open(one["input"]) as before, Image.open(one["output"]) as after:
            palette = before.mode == "P"
            assert (after.format, after.size) == (before.format, before.size)
            assert after.mode == ("RGB" if palette else before.mode)
            assert after.info.get("icc_profile") == before.info.get("icc_profile")
            assert dict(after.getexif()) == dict(before.getexif())
            kind = "RGB" if after.mode == "CMYK" or palette else after.mode
            values = [
                np.asarray(image if image.mode == kind else image.convert(kind), float)
                for image in (before, after)
            ]
            change = np.abs(values[0] - values[1]).mean() / (65535 if after.mode == "I;16" else 255)
            assert change < 0.05, one["input"]
            if after.mode == "RGBA":
                np.testing.assert_array_equal(values[0][..., 3], values[1][..., 3])


# Memory and imports

MEMORY = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from bltoolbox.restoration.apply import apply_to
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.pictures.jobs import Job
from bltoolbox.restoration.tiles import Restorer

model = Model.load("tiny.safetensors", device="cpu")
model = Model(model.problem, model.solver, model.theta, replace(model.recipe, iteration_limit=1))
restorer = Restorer(model)
restorer.run(np.zeros((800, 800, 3), np.uint8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcome = apply_to(Job(Path("large.tif"), Path("result.tif")), restorer, None, None, ())
assert outcome.status == "restored" and outcome.tiles > 20, outcome
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_bounded(here: Path) -> None:
    """24 million pixels: some bytes a pixel for decoding and encoding, where all tiles at once would take
    hundreds."""
    toy_model(regularizer="tikhonov", lower_solver="gd").save(here / "tiny.safetensors")
    pixels = np.zeros((4000, 6000, 3), np.uint8)
    pixels[::7] = 200
    Image.fromarray(pixels).save("large.tif")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16 * 24e6
    with Image.open("result.tif") as image:
        assert image.size == (6000, 4000)


def test_help_is_light() -> None:
    script = (
        "import sys\n"
        "from bltoolbox.cli import main\n"
        "for words in (['--help'], ['apply', '--help'], ['models']):\n"
        "    try: main(words)\n"
        "    except SystemExit as done: assert done.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_model_is_told_at_once(here: Path) -> None:
    done = subprocess.run([*BLT, "apply", "none", "a.png"], text=True, capture_output=True, timeout=120)
    assert done.returncode == 4 and "none: there is no such" in done.stderr


# Shipped models


@pytest.fixture
def shipped(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = here / "shipped"
    folder.mkdir()
    monkeypatch.setattr(shipped_models, "FOLDER", folder)
    toy_model().save(folder / "toy.safetensors")
    (folder / "toy.md").write_text(CARD, encoding="utf-8")
    toy_model(color="gray").save(folder / "bare.safetensors")
    (folder / "README.md").write_text("no model")
    return folder


def test_models_are_listed(shipped: Path, blt_here: Call) -> None:
    done = blt_here("models")
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert lines == [
        ["name", "task", "parameters", "trained", "σ", "usable", "σ", "PSNR"],
        ["bare", "–", "–", "–", "–", "–"],
        ["toy", "denoising", "762", "25/255", "5–50/255", "28.90"],
    ]
    assert "start with toy for toys" in done.err
    assert "toy: A toy. PSNR on four drawings." in done.err
    bare, toy = json.loads(blt_here("models", "--json").out)
    assert bare["name"] == "bare" and bare["task"] is None
    assert toy["parameters"] == 762 and toy["psnr"] == 28.9 and Path(toy["path"]).is_file()


def test_the_card_of_a_model(shipped: Path, blt_here: Call) -> None:
    done = blt_here("models", "toy")
    assert (done.code, done.out) == (0, "# toy\n\nNobody trained it.\n")
    assert json.loads(blt_here("models", "toy", "--json").out)["card"] == done.out
    assert "has no card" in blt_here("models", "bare").out
    done = blt_here("models", "toi")
    assert done.code == 4 and "did you mean 'toy'" in done.err


def test_a_shipped_model_is_applied_by_its_name(shipped: Path, blt_here: Call) -> None:
    save("a.png")
    assert blt_here("apply", "toy", "a.png").code == 0
    done = blt_here("apply", "toi", "a.png")
    assert done.code == 4 and "did you mean 'toy'" in done.err
    assert Model.load("toy", device="cpu").size == 762


def test_no_model_at_all(shipped: Path, blt_here: Call) -> None:
    for path in shipped.iterdir():
        path.unlink()
    done = blt_here("models")
    assert (done.code, done.out) == (0, "") and "blt run denoise" in done.err
    assert json.loads(blt_here("models", "--json").out) == []


def test_the_cards_of_the_models_that_are_shipped() -> None:
    for name in shipped_models.shipped_models():
        card = shipped_models.read_card(name)
        assert {"summary", "task", "parameters", "noise", "psnr", "levels", "images"} <= set(card.facts), name
        assert card.text.startswith("#"), name
        assert Model.load(name, device="cpu").size == card.facts["parameters"], name
