"""The safe reader of image files: every mode as the eye would see it, every bad file as one sentence."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from bltoolbox.config.reading import PIXELS
from bltoolbox.restoration.pictures.images import Header, ImageError, read_header, read_image

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)
GRAY = COLOUR[..., 0]


def save(path: Path, pixels: np.ndarray | Image.Image, **options: object) -> Path:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)  # type: ignore[arg-type]
    return path


def declared(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be of this size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["png", "bmp", "tif", "webp", "ppm", "gif"])
def test_formats_without_loss_are_exact(tmp_path: Path, kind: str) -> None:
    pixels = COLOUR if kind != "gif" else GRAY
    path = save(tmp_path / f"a.{kind}", pixels, **({"lossless": True} if kind == "webp" else {}))
    image = read_image(path, channels=3)
    assert image.dtype == np.float32
    expected = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    assert np.array_equal(image, expected.astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
def test_photographs_are_turned_as_they_should_be_shown(tmp_path: Path, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"a.{kind}", COLOUR, exif=exif)
    with Image.open(path) as file:
        shown = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    assert np.array_equal(read_image(path), shown.astype(np.float32) / np.float32(255))
    assert read_header(path) == Header(*shown.shape)
    assert (shown.shape[:2] == (30, 20)) == (orientation >= 5)


def test_transparent_pixels_are_laid_over_white(tmp_path: Path) -> None:
    alpha = np.zeros((20, 30, 1), np.uint8)
    alpha[:10] = 255
    image = read_image(save(tmp_path / "a.png", np.concatenate([COLOUR, alpha], axis=2)))
    assert image.shape == (20, 30, 3)
    assert np.array_equal(image[:10], COLOUR[:10].astype(np.float32) / np.float32(255))
    assert (image[10:] == 1).all()


def test_palettes_are_colours(tmp_path: Path) -> None:
    indexed = Image.fromarray(COLOUR).quantize(16)
    expected = np.asarray(indexed.convert("RGB"), np.float32) / np.float32(255)
    path = save(tmp_path / "a.png", indexed)
    assert read_header(path).channels == 3
    assert np.array_equal(read_image(path), expected)
    # The first entry transparent: white where it is used.
    image = read_image(save(tmp_path / "b.png", indexed, transparency=0))
    hidden = np.asarray(indexed) == 0
    assert hidden.any() and (image[hidden] == 1).all()
    assert np.array_equal(image[~hidden], expected[~hidden])


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    flat = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    image = read_image(save(tmp_path / "a.jpg", flat, quality=100))
    assert image.shape == (16, 16, 3)
    assert np.abs(image - np.array([1, 0, 0])).max() < 0.02


@pytest.mark.parametrize("kind", ["png", "tif"])
def test_sixteen_bits_keep_their_precision(tmp_path: Path, kind: str) -> None:
    deep = RNG.integers(0, 65536, (20, 30), dtype=np.uint16)
    deep[0, :2] = 0, 65535
    path = save(tmp_path / f"a.{kind}", deep)
    assert read_header(path) == Header(20, 30, 1)
    image = read_image(path)
    assert np.array_equal(np.rint(image[..., 0] * 65535).astype(np.uint16), deep)
    assert (image.min(), image.max()) == (0, 1)
    small = read_image(path, resize=10, channels=3)
    assert small.shape == (10, 10, 3) and small.min() >= 0 and small.max() <= 1


def test_one_bit_gray_with_alpha_and_floats(tmp_path: Path) -> None:
    assert set(np.unique(read_image(save(tmp_path / "a.png", Image.fromarray(GRAY > 128))))) == {0, 1}
    light = np.stack([GRAY, np.full_like(GRAY, 255)], axis=2)
    path = save(tmp_path / "b.png", light)
    assert read_header(path).channels == 1
    assert np.array_equal(read_image(path)[..., 0], GRAY.astype(np.float32) / np.float32(255))
    floats = RNG.random((20, 30), dtype=np.float32)
    assert np.array_equal(read_image(save(tmp_path / "c.tif", floats))[..., 0], floats)
    for bad in (255 * floats, floats - 1, np.full_like(floats, np.nan)):
        with pytest.raises(ImageError, match=r"d\.tif contains floats outside \[0, 1\]"):
            read_image(save(tmp_path / "d.tif", bad))
    with pytest.raises(ImageError, match="32-bit"):
        read_image(save(tmp_path / "e.tif", GRAY.astype(np.int32)))


def test_crops_are_central_and_gray_is_the_luma(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", COLOUR)
    whole = read_image(path)
    assert np.array_equal(read_image(path, crop=8), whole[6:14, 11:19])
    assert np.abs(read_image(path, channels=1)[..., 0] - whole @ [0.299, 0.587, 0.114]).max() < 0.6 / 255
    with pytest.raises(ImageError, match=r"a\.png is 20×30, smaller than a crop of 21"):
        read_image(path, crop=21)


def test_the_shorter_side_is_resized(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 120)[None, :, None].repeat(40, 0).repeat(3, 2).astype(np.uint8)
    image = read_image(save(tmp_path / "a.png", ramp), resize=20)
    assert image.shape == (20, 20, 3)
    # The middle third of the ramp.
    assert image[:, 0].mean() == pytest.approx(1 / 3, abs=0.02)
    assert image[:, -1].mean() == pytest.approx(2 / 3, abs=0.02)
    assert read_image(save(tmp_path / "b.png", COLOUR), resize=10, crop=6).shape == (6, 6, 3)


@pytest.mark.parametrize(("width", "height"), [(100_000, 100_000), (10_000, 10_000), (2**31 - 1, 1)])
@pytest.mark.parametrize("read", [read_header, read_image])
def test_a_tiny_file_that_declares_a_huge_image_is_not_decoded(
    tmp_path: Path, width: int, height: int, read: object
) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(declared(width, height))
    with pytest.raises(
        ImageError, match=r"bomb\.png declares more than 89 million pixels and is not decoded"
    ):
        read(path)  # type: ignore[operator]


def test_an_image_within_the_limit_only_lacks_its_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(declared(9000, 9000))
    assert PIXELS.most > 9000 * 9000
    assert read_header(path) == Header(9000, 9000, 3)


@pytest.mark.parametrize("kind", ["png", "jpg", "tif", "webp"])
def test_a_file_that_was_cut_off_is_found_by_its_end(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / f"a.{kind}", COLOUR)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(ImageError, match=rf"a\.{kind} (cannot be read|is not an image)"):
        read_header(path)
    path.write_bytes(content + b"\0" * 5000)  # what some cameras leave behind the image
    assert read_header(path) == Header(20, 30, 3)


@pytest.mark.parametrize("content", [b"", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>", b"\xff\xd8\xff"])
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for read in (read_header, read_image):
        with pytest.raises(ImageError, match=r"a\.png (is not an image of a known format|cannot be read)"):
            read(path)
    with pytest.raises(ImageError, match="there is no file"):
        read_header(tmp_path / "none.png")
    with pytest.raises(ImageError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


@given(st.data())
def test_damage_ends_in_an_image_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["png", "jpg", "tif", "webp", "gif", "bmp"]))
    path = save(tmp_path_factory.mktemp("damage") / f"a.{kind}", COLOUR)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    for read in (read_header, read_image):
        try:
            found = read(path)
        except ImageError as error:
            assert str(path) in str(error)
        else:
            assert isinstance(found, Header) or (found.min() >= 0 and found.max() <= 1)


def test_many_threads_see_the_same_pixels(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{i}.png", np.roll(COLOUR, i, 0)) for i in range(12)]
    found: dict[int, np.ndarray] = {}

    def work(offset: int) -> None:
        for i in range(offset, 12, 3):
            found[i] = read_image(paths[i])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[i], read_image(paths[i])) for i in range(12))


def test_torch_is_not_needed() -> None:
    code = "import sys; import bltoolbox.restoration.pictures.images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
