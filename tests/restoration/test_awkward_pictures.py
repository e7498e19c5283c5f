"""Pictures and names that are rarely met, each of which once went wrong: what is shown stays what is shown."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from commands import Call, caller
from PIL import Image
from toy_models import clean_picture, toy_model

from bltoolbox.errors import BltError, UsageError
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.noise_level import estimate_noise
from bltoolbox.restoration.pictures.files import read_picture, write_picture
from bltoolbox.restoration.pictures.jobs import plan
from bltoolbox.restoration.pictures.kernels import parse_kernel


def shown(path: Path) -> np.ndarray:
    from PIL import ImageOps

    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).astype(int)


def sixteen(height: int, width: int, channels: int) -> np.ndarray:
    return (clean_picture(height, width, channels) * 65535).astype(np.uint16)


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_turned_photograph_is_upright_in_every_format(turn: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = turn
    pixels = (clean_picture(32, 48, 3) * 255).astype(np.uint8)
    source = tmp_path / "a.png"
    Image.fromarray(pixels).save(source, exif=exif)
    for name in ("b.tif", "b.png", "b.webp"):
        write_picture(tmp_path / name, read_picture(source))
        assert shown(tmp_path / name).shape == shown(source).shape, name
        assert np.abs(shown(tmp_path / name) - shown(source)).mean() < 3, name


def test_white_may_be_zero(tmp_path: Path) -> None:
    values = sixteen(12, 16, 1)[..., 0]
    tifffile.imwrite(tmp_path / "a.tif", 65535 - values, photometric="miniswhite")
    picture = read_picture(tmp_path / "a.tif")
    np.testing.assert_array_equal(picture.colours[..., 0], values)
    write_picture(tmp_path / "b.tif", picture)
    np.testing.assert_array_equal(read_picture(tmp_path / "b.tif").colours[..., 0], values)


def test_colours_that_are_multiplied_by_alpha(tmp_path: Path) -> None:
    colours = sixteen(12, 16, 3)
    alpha = np.full((12, 16, 1), 30000, np.uint16)
    stored = np.concatenate([(colours * (alpha / 65535)).round().astype(np.uint16), alpha], axis=2)
    tifffile.imwrite(tmp_path / "a.tif", stored, photometric="rgb", extrasamples=["assocalpha"])
    found = read_picture(tmp_path / "a.tif")
    assert np.abs(found.colours.astype(int) - colours).max() <= 3
    assert found.alpha is not None and (found.alpha == 30000).all()


def test_bits_are_not_lost_silently(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", sixteen(8, 8, 4), photometric="separated")
    assert any("16 bits become 8" in note for note in read_picture(tmp_path / "a.tif").notes)
    values = Image.fromarray(sixteen(8, 8, 1)[..., 0])
    values.save(tmp_path / "b.png", transparency=0)
    picture = read_picture(tmp_path / "b.png")
    assert picture.colours.dtype == np.uint16 and any("transparent" in note for note in picture.notes)


def test_texts_of_a_deep_tiff_are_kept(tmp_path: Path) -> None:
    texts = [(271, "s", 0, "a maker", True), (315, "s", 0, "an artist", True)]
    pixels = sixteen(8, 8, 3)
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", description="words", extratags=texts)
    write_picture(tmp_path / "b.tif", read_picture(tmp_path / "a.tif"))
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        tags = {tag.code: tag.value for tag in file.pages[0].tags}  # type: ignore[union-attr]
    assert (tags[270], tags[271], tags[315]) == ("words", "a maker", "an artist")


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_xmp_is_kept(suffix: str, tmp_path: Path) -> None:
    packet = b"<x:xmpmeta xmlns:x='adobe:ns:meta/'>words</x:xmpmeta>"
    image = Image.fromarray((clean_picture(16, 16, 3) * 255).astype(np.uint8))
    image.save(tmp_path / f"a{suffix}", xmp=packet)
    write_picture(tmp_path / f"b{suffix}", read_picture(tmp_path / f"a{suffix}"))
    with Image.open(tmp_path / f"b{suffix}") as written:
        assert written.info.get("xmp") == packet


class TestKernels:
    def test_a_file_may_be_called_gaussian(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        np.save("gaussian.npy", np.ones((3, 3)))
        assert parse_kernel("gaussian.npy") == {"kernel": [[1 / 9] * 3] * 3}

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        path = tmp_path / "k.npy"
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a", b"0" * 1000)
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000, 1000000), }"
        huge = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
        for content in (archive.getvalue()[:300], huge):
            path.write_bytes(content)
            with pytest.raises(UsageError, match="cannot be read"):
                parse_kernel(str(path))
        np.save(path, np.float64(3))
        with pytest.raises(UsageError, match="a single number"):
            parse_kernel(str(path))

    def test_python_keeps_the_brightness_as_the_command_does(self, tmp_path: Path) -> None:
        np.save(tmp_path / "k.npy", np.ones((3, 3)))
        model, gray = toy_model(), np.full((20, 20, 3), 0.5, np.float32)
        results = [
            model.with_operator("blur", kernel=kernel).restore(gray, noise=5 / 255)
            for kernel in (str(tmp_path / "k.npy"), np.ones((3, 3)), [[1, 1, 1]] * 3)
        ]
        for result in results:
            assert abs(result.mean() - 0.5) < 1e-3
        with pytest.raises(UsageError, match="not a matrix"):
            model.with_operator("blur", kernel=[["a"]])


@pytest.mark.parametrize("what", ["checkerboard", "dither"])
def test_what_cannot_be_noise_is_not_taken_for_it(what: str) -> None:
    rows, columns = np.mgrid[:64, :64]
    board = (rows + columns) % 2
    dither = np.random.default_rng(0).integers(0, 2, (64, 64))
    image = (255 * (board if what == "checkerboard" else dither)).astype(np.uint8)
    with pytest.raises(ValueError, match="not noise"):
        estimate_noise(image)


class TestNames:
    def test_an_empty_name_is_not_the_folder_here(self) -> None:
        with pytest.raises(UsageError, match="empty name"):
            plan([""], None, force=False)

    def test_a_name_that_is_too_long_does_not_end_the_others(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").touch()
        jobs, _ = plan([str(tmp_path / ("c" * 300 + ".png")), str(tmp_path / "a.png")], None, force=False)
        assert [bool(job.trouble) for job in jobs] == [True, False]

    def test_a_folder_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "a.png").touch()
        monkeypatch.setattr(os, "access", lambda path, mode: "secret" not in str(path))
        jobs, _ = plan([str(tmp_path / "secret"), str(tmp_path / "a.png")], None, force=False)
        assert sorted(job.trouble.endswith("cannot be read") for job in jobs) == [False, True]


@pytest.fixture
def blt_apply(capfd: pytest.CaptureFixture[str]) -> Call:
    return caller("apply", capfd)


def test_random_measurements_are_refused(blt_apply: Call, tmp_path: Path) -> None:
    model = toy_model()
    model.save(tmp_path / "toy.safetensors")
    picture = tmp_path / "a.png"
    Image.fromarray((clean_picture(20, 20, 3) * 255).astype(np.uint8)).save(picture)
    done = blt_apply(str(tmp_path / "toy.safetensors"), str(picture), "--operator", "inpainting")
    assert done.returncode == 2 and "at random positions" in done.stderr and "--mask" in done.stderr
    assert not (tmp_path / "a-restored.png").exists()


def test_missing_pixels_are_filled_where_a_mask_says_so(blt_apply: Call, tmp_path: Path) -> None:
    trained = toy_model(operator={"name": "inpainting", "missing": 0.5}, strong_convexity=0.01)
    trained.save(tmp_path / "holes.safetensors")
    toy_model(strong_convexity=0.01).save(tmp_path / "toy.safetensors")
    clean = (clean_picture(20, 24, 3) * 255).astype(np.uint8)
    known = np.ones((20, 24), dtype=np.uint8)
    known[8:10, 3:20] = 0
    Image.fromarray(np.where(known[..., None] == 1, clean, 255).astype(np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(clean).save(tmp_path / "truth.png")
    Image.fromarray(255 * known).save(tmp_path / "mask.png")
    np.save(tmp_path / "mask.npy", known)
    for model, mask in (("holes", "mask.npy"), ("toy", "mask.png")):
        words = [
            str(tmp_path / f"{model}.safetensors"),
            str(tmp_path / "a.png"),
            "--noise",
            "2/255",
            "--json",
            "--force",
        ]
        done = blt_apply(*words, "--mask", str(tmp_path / mask), "--truth", str(tmp_path / "truth.png"))
        (found,) = json.loads(done.stdout)["pictures"]
        assert found["psnr"] > found["psnr_before"] + 5
    refused = blt_apply(str(tmp_path / "holes.safetensors"), str(tmp_path / "a.png"), "--force")
    assert refused.returncode == 2 and "needs the missing pixels: --mask" in refused.stderr
    words = [
        str(tmp_path / "toy.safetensors"),
        str(tmp_path / "a.png"),
        "--force",
        "--mask",
        str(tmp_path / "mask.npy"),
    ]
    for more, sentence in (
        (["--kernel", "gaussian:1"], "belong to different operators"),
        (["--operator", "downsampling"], "operator 'downsampling' has no mask"),
    ):
        refused = blt_apply(*words, *more)
        assert refused.returncode == 2 and sentence in refused.stderr


@pytest.mark.parametrize("damage", ["words", "list", "nothing"])
def test_a_damaged_model_is_one_sentence(damage: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = toy_model()
    metadata = {"recipe": {"words": "not JSON", "list": "[1, 2]", "nothing": "{}"}[damage]}
    save_file(dict(model.theta) if damage != "nothing" else {}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(BltError, match=r"damaged|holds no"):
        Model.load(tmp_path / "a.safetensors")


def test_a_truth_that_does_not_fit_is_not_a_lost_picture(blt_apply: Call, tmp_path: Path) -> None:
    toy_model().save(tmp_path / "toy.safetensors")
    for name, side in (("a", 20), ("b", 24)):
        picture = (clean_picture(side, side, 3) * 255).astype(np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    words = [str(tmp_path / "toy.safetensors"), str(tmp_path / "a.png"), "--truth", str(tmp_path / "b.png")]
    done = blt_apply(*words)
    assert done.returncode == 1 and "1 of them only in the comparison" in done.stderr
    facts = json.loads(blt_apply(*words, "--json", "--force").stdout)
    assert (facts["restored"], facts["failed"]) == (1, 1)
    assert (tmp_path / "a-restored.png").exists()


def test_the_size_is_that_of_the_result(blt_apply: Call, tmp_path: Path) -> None:
    toy_model().save(tmp_path / "toy.safetensors")
    Image.fromarray((clean_picture(20, 24, 3) * 255).astype(np.uint8)).save(tmp_path / "a.png")
    words = [str(tmp_path / "toy.safetensors"), str(tmp_path / "a.png"), "--operator", "downsampling"]
    (found,) = json.loads(blt_apply(*words, "--json", "--noise", "5/255").stdout)["pictures"]
    with Image.open(tmp_path / "a-restored.png") as image:
        assert image.size == (found["width"], found["height"]) != (24, 20)


def test_a_picture_becomes_larger(blt_apply: Call, tmp_path: Path) -> None:
    toy_model(strong_convexity=0.01).save(tmp_path / "toy.safetensors")
    Image.fromarray((clean_picture(20, 24, 3) * 255).astype(np.uint8)).save(tmp_path / "a.png")
    words = [str(tmp_path / "toy.safetensors"), str(tmp_path / "a.png"), "--factor", "3", "--noise", "2/255"]
    assert blt_apply(*words).returncode == 0
    with Image.open(tmp_path / "a-restored.png") as image:
        assert image.size == (72, 60)
