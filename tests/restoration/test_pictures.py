"""Picture files come back as they were: format, bits, mode, transparency, orientation and metadata."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageCms, ImageOps, PngImagePlugin, TiffImagePlugin
from toy_models import as_bytes, clean_picture

from bltoolbox.restoration.pictures.files import read_picture, write_picture
from bltoolbox.restoration.pictures.images import ImageError
from bltoolbox.restoration.pictures.png16 import encode_deep, is_deep, read_deep

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ORIENTATION, ARTIST = 0x0112, 0x013B


def image(mode: str, height: int = 31, width: int = 45) -> Image.Image:
    rgb = Image.fromarray(as_bytes(clean_picture(height, width)))
    if mode.startswith("I;16"):
        return Image.fromarray((clean_picture(height, width, 1)[..., 0] * 65535).astype(np.uint16))
    if mode == "F":
        return Image.fromarray(clean_picture(height, width, 1)[..., 0].astype(np.float32))
    if mode in ("RGBA", "LA"):
        alpha = Image.fromarray(
            np.arange(height * width, dtype=np.uint16).astype(np.uint8).reshape(height, width)
        )
        made = rgb.convert(mode)
        made.putalpha(alpha)
        return made
    return rgb.convert(mode)


def same(picture_path: Path, result: Path) -> list[str]:
    """Read and written unchanged."""
    return write_picture(result, read_picture(picture_path))


MODES = [
    ("PNG", "L"),
    ("PNG", "LA"),
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "I;16"),
    ("TIFF", "L"),
    ("TIFF", "RGB"),
    ("TIFF", "RGBA"),
    ("TIFF", "CMYK"),
    ("TIFF", "I;16"),
    ("TIFF", "F"),
    ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
]


@pytest.mark.parametrize(("format", "mode"), MODES)
def test_lossless_files_come_back_equal(format: str, mode: str, tmp_path: Path) -> None:
    source, target = (tmp_path / f"{name}.{format.lower()}" for name in ("source", "target"))
    options: dict[str, Any] = {"lossless": True, "exact": True} if format == "WEBP" else {}
    image(mode).save(source, format, dpi=(300, 300), icc_profile=PROFILE, **options)
    assert same(source, target) == []
    with Image.open(source) as before, Image.open(target) as after:
        assert (after.format, after.mode, after.size) == (format, mode, before.size)
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before))
        assert after.info["icc_profile"] == PROFILE
        if format != "WEBP":
            assert after.info["dpi"] == pytest.approx((300, 300), rel=1e-3)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("suffix", ["jpg", "JPEG"])
def test_jpeg(mode: str, suffix: str, tmp_path: Path) -> None:
    source, target = tmp_path / f"source.{suffix}", tmp_path / f"target.{suffix}"
    image(mode).save(
        source, "JPEG", quality=95, dpi=(240, 240), icc_profile=PROFILE, progressive=True, comment="hello"
    )
    assert same(source, target) == []
    with Image.open(source) as before, Image.open(target) as after:
        assert (after.format, after.mode, after.size) == ("JPEG", mode, before.size)
        assert np.abs(np.asarray(after, int) - np.asarray(before, int)).mean() < 2
        assert after.info["icc_profile"] == PROFILE
        assert after.info["dpi"] == (240, 240)
        assert after.info["comment"] == b"hello" and after.info["progressive"]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_a_turned_picture_is_seen_upright_and_stays_as_it_is(
    format: str, turned: int, tmp_path: Path
) -> None:
    source, target = (tmp_path / f"{name}.{format.lower()}" for name in ("source", "target"))
    exif = Image.Exif()
    exif[ORIENTATION], exif[ARTIST] = turned, "somebody"
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(format, {})
    image("RGB").save(source, format, exif=exif, **options)  # type: ignore[arg-type]
    picture = read_picture(source)
    with Image.open(source) as opened:
        shown = np.asarray(ImageOps.exif_transpose(opened))
    np.testing.assert_array_equal(picture.colours, shown)
    write_picture(target, picture)
    with Image.open(target) as after:
        assert after.getexif()[ARTIST] == "somebody"
        if format != "TIFF":
            assert after.getexif()[ORIENTATION] == turned
        again = np.asarray(ImageOps.exif_transpose(after))
    assert again.shape == shown.shape
    assert np.abs(again.astype(int) - shown).mean() < (2 if format == "JPEG" else 1e-9)


def test_text_of_png_is_kept(tmp_path: Path) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Title", "A picture")
    texts.add_itxt("Beschreibung", "größer")
    image("RGB").save(tmp_path / "a.png", pnginfo=texts)
    same(tmp_path / "a.png", tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as after:
        assert after.text == {"Title": "A picture", "Beschreibung": "größer"}  # type: ignore[attr-defined]


def test_tags_of_tiff_are_kept(tmp_path: Path) -> None:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[0x010E], tags[0x010F] = "a description", "a camera"
    image("RGB").save(tmp_path / "a.tif", tiffinfo=tags, compression="tiff_lzw")
    assert same(tmp_path / "a.tif", tmp_path / "b.tif") == []
    with Image.open(tmp_path / "b.tif") as after:
        assert after.getexif()[0x010F] == "a camera"
        assert after.info["compression"] == "tiff_lzw"
    tags[0x8769] = {0x829A: 0.01}
    image("RGB").save(tmp_path / "a.tif", tiffinfo=tags)
    same(tmp_path / "a.tif", tmp_path / "b.tif")
    with Image.open(tmp_path / "b.tif") as after:
        assert after.getexif()[0x010E] == "a description" and after.getexif()[0x010F] == "a camera"
        assert float(after.getexif().get_ifd(0x8769)[0x829A]) == pytest.approx(0.01)
    assert same(tmp_path / "a.tif", tmp_path / "c.jpg") == []
    with Image.open(tmp_path / "c.jpg") as after:
        assert after.getexif()[0x010F] == "a camera"
        assert float(after.getexif().get_ifd(0x8769)[0x829A]) == pytest.approx(0.01)
    picture = read_picture(tmp_path / "a.tif")
    notes = write_picture(tmp_path / "d.tif", replace(picture, options={"compression": "tiff_lzw"}))
    assert "without compression" in notes[0]


def test_palettes_and_bilevel_become_what_can_hold_the_result(tmp_path: Path) -> None:
    image("P").save(tmp_path / "p.png")
    assert "becomes RGB" in read_picture(tmp_path / "p.png").notes[0]
    clear = image("P")
    clear.save(tmp_path / "t.png", transparency=0)
    picture = read_picture(tmp_path / "t.png")
    assert picture.alpha is not None and picture.colours.shape[2] == 3
    image("1").save(tmp_path / "b.png")
    picture = read_picture(tmp_path / "b.png")
    assert picture.kind == "gray" and "become gray" in picture.notes[0]
    same(tmp_path / "t.png", tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as after, Image.open(tmp_path / "t.png") as before:
        assert after.mode == "RGBA"
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before.convert("RGBA")))


def test_only_the_first_frame(tmp_path: Path) -> None:
    frames = [image("RGB"), ImageOps.invert(image("RGB"))]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    picture = read_picture(tmp_path / "a.webp")
    assert picture.notes == ("only its first frame is used",)
    np.testing.assert_array_equal(picture.colours, np.asarray(frames[0]))
    assert picture.options == {"lossless": True}


def test_lossy_webp_stays_lossy(tmp_path: Path) -> None:
    image("RGBA").save(tmp_path / "a.webp", quality=90)
    assert read_picture(tmp_path / "a.webp").options == {"lossless": False}
    same(tmp_path / "a.webp", tmp_path / "b.webp")
    assert read_picture(tmp_path / "b.webp").options == {"lossless": False}


@pytest.mark.parametrize(
    ("mode", "suffix", "expected", "note"),
    [
        ("RGBA", "jpg", "RGB", "become white"),
        ("LA", "jpg", "L", "become white"),
        ("I;16", "jpg", "L", "16 bits become 8"),
        ("I;16", "webp", "RGB", "16 bits become 8"),
        ("CMYK", "png", "RGB", "CMYK becomes RGB"),
        ("F", "png", "I;16", "floats become 16 bits"),
        ("F", "jpg", "L", "floats become 8 bits"),
        ("RGB", "webp", "RGB", ""),
        ("L", "tiff", "L", ""),
    ],
)
def test_another_format(mode: str, suffix: str, expected: str, note: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source.tif", tmp_path / f"target.{suffix}"
    image(mode).save(source)
    assert note in " ".join(same(source, target))
    with Image.open(source) as before, Image.open(target) as after:
        assert after.mode == expected and after.size == before.size
        if mode not in ("RGBA", "LA"):
            top = {"I;16": 65535, "F": 1.0}
            values = [
                np.asarray(one.convert("RGB") if one.mode == "CMYK" else one, float) / top.get(one.mode, 255)
                for one in (before, after)
            ]
            expected_values = values[0][..., None] if values[1].ndim > values[0].ndim else values[0]
            assert np.abs(values[1] - expected_values).mean() < 0.01


def test_transparent_pixels_become_white(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "a.png")
    same(tmp_path / "a.png", tmp_path / "b.jpg")
    with Image.open(tmp_path / "b.jpg") as after:
        assert np.asarray(after).min() >= 254


# 16 bits in several channels


def deep(channels: int, height: int = 37, width: int = 53) -> np.ndarray:
    return np.random.default_rng(channels).integers(0, 65536, (height, width, channels), dtype=np.uint16)


def filtered_png(pixels: np.ndarray, filters: list[int]) -> bytes:
    """As other programs write it: each row with a filter of its own."""
    height, width, channels = pixels.shape
    raw = pixels.astype(">u2").view(np.uint8).reshape(height, -1).astype(int)
    size = 2 * channels
    data = bytearray()
    for i in range(height):
        kind = filters[i % len(filters)]
        data.append(kind)
        for j in range(raw.shape[1]):
            a = raw[i, j - size] if j >= size else 0
            b = raw[i - 1, j] if i else 0
            c = raw[i - 1, j - size] if i and j >= size else 0
            p = a + b - c
            paeth = min((a, b, c), key=lambda one: abs(p - one))
            data.append((raw[i, j] - (0, a, b, (a + b) // 2, paeth)[kind]) % 256)

    def chunk(name: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 2: 4, 4: 6}[channels], 0, 0, 0)
    packed = zlib.compress(bytes(data))
    parts = [chunk(b"IDAT", packed[:100]), chunk(b"IDAT", packed[100:])]
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(parts) + chunk(b"IEND", b"")


@pytest.mark.parametrize("channels", [2, 3, 4])
@pytest.mark.parametrize("filters", [[0], [1], [2], [0, 1, 2], [3], [4], [4, 3, 2, 1, 0]])
def test_every_filter_of_png(channels: int, filters: list[int], tmp_path: Path) -> None:
    pixels = deep(channels, 13, 9)
    path = tmp_path / "a.png"
    path.write_bytes(filtered_png(pixels, filters))
    assert is_deep(path)
    np.testing.assert_array_equal(read_deep(path), pixels)


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_png_of_16_bits_is_written_as_pillow_reads_it(channels: int, tmp_path: Path) -> None:
    pixels, path = deep(channels), tmp_path / "a.png"
    path.write_bytes(encode_deep(pixels, icc_profile=PROFILE, dpi=(300, 300)))
    np.testing.assert_array_equal(read_deep(path), pixels)
    with Image.open(path) as eight:
        if channels != 2:
            np.testing.assert_array_equal(np.asarray(eight), pixels >> 8)
        assert eight.info["icc_profile"] == PROFILE
    assert same(path, tmp_path / "b.png") == []
    np.testing.assert_array_equal(read_deep(tmp_path / "b.png"), pixels)
    with Image.open(tmp_path / "b.png") as after:
        assert after.info["icc_profile"] == PROFILE and after.info["dpi"] == pytest.approx(
            (300, 300), rel=1e-3
        )


@pytest.mark.parametrize("channels", [3, 4])
def test_tiff_of_16_bits(channels: int, tmp_path: Path) -> None:
    pixels, path = deep(channels), tmp_path / "a.tif"
    extra = {"extrasamples": ["unassalpha"]} if channels == 4 else {}
    tifffile.imwrite(path, pixels, photometric="rgb", iccprofile=PROFILE, **extra)
    assert same(path, tmp_path / "b.tif") == []
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "b.tif"), pixels)
    with Image.open(tmp_path / "b.tif") as after:
        assert after.info["icc_profile"] == PROFILE
    same(path, tmp_path / "c.png")
    np.testing.assert_array_equal(read_deep(tmp_path / "c.png"), pixels)


def test_a_damaged_png_of_16_bits(tmp_path: Path) -> None:
    path, data = tmp_path / "a.png", encode_deep(deep(3))
    for broken in (data[:2000], data[:200] + bytes(50) + data[250:]):
        path.write_bytes(broken)
        with pytest.raises(ImageError, match="cannot be read"):
            read_picture(path)


# What cannot be read or written


def test_troubles_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    image("RGB").save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:600])
    Image.fromarray(np.full((4, 4), 7.0, np.float32)).save(tmp_path / "far.tif")
    Image.fromarray(np.full((4, 4), 70000, np.int32)).save(tmp_path / "int.tif")
    sentences = {
        "text.png": "not an image",
        "cut.jpg": "cannot be read",
        "far.tif": "floats outside",
        "int.tif": "32-bit",
        "none.png": "there is no file",
    }
    for name, sentence in sentences.items():
        with pytest.raises(ImageError, match=sentence) as told:
            read_picture(tmp_path / name)
        assert name in str(told.value) and "\n" not in str(told.value)
    picture = read_picture(tmp_path / "whole.jpg")
    with pytest.raises(ImageError, match="cannot be written"):
        write_picture(tmp_path / "no" / "such.jpg", picture)


def test_pictures_that_a_format_cannot_hold(tmp_path: Path) -> None:
    Image.new("L", (16400, 2)).save(tmp_path / "long.png")
    with pytest.raises(ImageError, match=r"long\.webp cannot be written"):
        same(tmp_path / "long.png", tmp_path / "long.webp")
    assert not (tmp_path / "long.webp").exists()


@pytest.mark.parametrize("format", ["BMP", "GIF", "PPM", "JPEG", "WEBP", "TIFF"])
def test_formats_under_another_name(format: str, tmp_path: Path) -> None:
    """What a file is, its content says; what it becomes, its name."""
    options: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    image("RGB").save(tmp_path / "a.png", format, **options)
    same(tmp_path / "a.png", tmp_path / "b.png")
    with Image.open(tmp_path / "a.png") as before, Image.open(tmp_path / "b.png") as after:
        assert (before.format, after.format) == (format, "PNG")
        np.testing.assert_array_equal(np.asarray(after), np.asarray(before.convert("RGB")))


def test_values_are_written_as_given(tmp_path: Path) -> None:
    image("RGBA").save(tmp_path / "a.png")
    picture = read_picture(tmp_path / "a.png")
    changed = 255 - picture.colours
    write_picture(tmp_path / "b.png", replace(picture, colours=changed))
    again = read_picture(tmp_path / "b.png")
    np.testing.assert_array_equal(again.colours, changed)
    assert again.alpha is not None and picture.alpha is not None
    np.testing.assert_array_equal(again.alpha, picture.alpha)


def test_damaged_metadata_are_no_reason_to_lose_the_pixels(tmp_path: Path) -> None:
    image("RGB").save(tmp_path / "a.png", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert read_picture(tmp_path / "a.png").colours.shape == (31, 45, 3)
    same(tmp_path / "a.png", tmp_path / "b.tif")
    assert read_picture(tmp_path / "b.tif").colours.shape == (31, 45, 3)
