"""Image files of any ordinary format as arrays in [0, 1], read safely.

Only decoders of plain pictures are used (no PostScript, no vector formats). The number of pixels is taken from the
header and refused above ``PIXELS`` before anything is decoded: a file of a few bytes may declare an image that no
memory holds. Everything else that can be wrong with a file ends in an ``ImageError``, too: one sentence with its
name.

A photograph is turned as its EXIF orientation says. Transparent pixels are laid over white; palettes, CMYK and other
colour spaces become RGB; gray of 16 bits keeps its precision. Gray stays one channel unless three are asked for.
Torch is not needed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bltoolbox.config.reading import IMAGE_FILE, PIXELS, FileRefused, file_size, open_file
from bltoolbox.restoration.pictures.tiff_header import check_tiff, is_tiff

#: Suffixes of image files that can be read, in lower case.
SUFFIXES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".webp", ".bmp", ".dib", ".gif"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif"}
)
_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "AVIF")
_GRAY = frozenset({"1", "L", "LA", "La", "I", "F"})
#: The EXIF tag, and what each of its values asks for.
_ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
#: Bytes at the end of a file in which its format's closing mark is looked for.
_TAIL = 1024

# Filters of warnings belong to the process, not to the thread: images are opened one after the other, and decoded
# side by side.
_opening = threading.Lock()


class ImageError(ValueError):
    """A file is not a usable image; the message names it."""


@dataclass(frozen=True)
class Header:
    """The properties of an image before it is decoded: its displayed height and width, and 1 or 3 channels."""

    height: int
    width: int
    channels: int


def read_header(path: Path | str) -> Header:
    """Open an image without decoding it; one that seems truncated is decoded once to verify it."""
    with opened(path) as image:
        header = Header(*_shown_size(image), channels=1 if _is_gray(image) else 3)
        if _cut_off(image, path):
            image.load()
        return header


def read_image(
    path: Path | str,
    *,
    resize: int | None = None,
    crop: int | None = None,
    channels: int | None = None,
) -> NDArray[np.float32]:
    """The image as H×W×C, values in [0, 1].

    ``resize`` scales the shorter side to it and cuts the middle square; ``crop`` then cuts a square around the
    centre. ``channels`` 3 repeats gray, 1 takes the luma of colour; by default as in the file.
    """
    with opened(path) as image:
        image.load()
        turn = TURNS.get(orientation(image))
        image = _plain(image, path)
        if turn is not None:
            image = image.transpose(turn)
        if channels == 3 and image.mode == "L":
            image = image.convert("RGB")
        if channels == 1 and image.mode == "RGB":
            image = image.convert("L")
        if resize is not None:
            image = _centre(_scaled(image, resize), resize, path)
        if crop is not None:
            image = _centre(image, crop, path)
        values = np.asarray(image, dtype=np.float32)
        values = values.clip(0, 1) if image.mode == "F" else values / np.float32(255)
    if values.ndim == 2:
        values = values[..., None]
    return np.repeat(values, 3, axis=2) if channels == 3 and values.shape[2] == 1 else values


@contextlib.contextmanager
def opened(path: Path | str) -> Iterator[Image.Image]:
    """A file whose header is read and harmless; whatever goes wrong with it in this block is an ImageError."""
    name = os.fspath(path)
    try:
        with open_file(name) as file, _identified(file, name) as image:
            yield image
    except ImageError:
        raise
    except FileRefused as error:
        raise ImageError(str(error)) from error
    except FileNotFoundError as error:
        raise ImageError(f"there is no file {name}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is not an image of a known format, or is damaged") from error
    except MemoryError as error:
        raise ImageError(f"{name} does not fit into memory") from error
    except Exception as error:  # damaged files make decoders raise anything
        reason = (
            (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        )
        raise ImageError(f"{name} cannot be read: {reason}") from error


def _identified(file: BinaryIO, name: str) -> Image.Image:
    IMAGE_FILE.check(name, file_size(file))
    if is_tiff(file.read(4)):
        check_tiff(file, name)
    file.seek(0)
    huge = (
        f"{name} declares more than {PIXELS.most / 1e6:.0f} million pixels and is not decoded; make it smaller, or set"
        f" {PIXELS.variable} to a larger number"
    )
    with _opening, warnings.catch_warnings(), _pixel_limit():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.init()
        try:
            image = Image.open(
                file, formats=[format_name for format_name in _FORMATS if format_name in Image.OPEN]
            )
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise ImageError(huge) from error
    if image.width * image.height > PIXELS.most:
        raise ImageError(huge)
    return image


@contextlib.contextmanager
def _pixel_limit() -> Iterator[None]:
    """Pillow has a limit of its own, for the whole process."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = PIXELS.most
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def orientation(image: Image.Image) -> int:
    """The EXIF orientation; damaged metadata are no reason to refuse the pixels."""
    with contextlib.suppress(Exception), _opening, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def _shown_size(image: Image.Image) -> tuple[int, int]:
    """Height and width after the turn that the metadata ask for, without decoding."""
    width, height = image.size
    if image.format == "PNG" and "exif" not in image.info:
        return height, width  # to look for metadata behind the pixels would decode these
    if image.format == "TIFF":  # Pillow has turned the size, or not, depending on its version
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        width, height = tags[256], tags[257]
    return (width, height) if orientation(image) in (5, 6, 7, 8) else (height, width)


def _is_gray(image: Image.Image) -> bool:
    return image.mode in _GRAY or image.mode.startswith("I;16")


def _plain(image: Image.Image, path: Path | str) -> Image.Image:
    """8-bit L or RGB, or F in [0, 1]."""
    gray = _is_gray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray(np.asarray(image).astype(np.float32) / np.float32(65535))
    if image.mode == "I":
        raise ImageError(
            f"{os.fspath(path)} contains 32-bit integers, whose range is unknown; save it with 8 or 16 bits"
        )
    if image.mode == "F":
        values = np.asarray(image)
        # `not (… <= …)` also catches NaN, for which every comparison is false.
        if not (values.min() >= 0 and values.max() <= 1):
            raise ImageError(
                f"{os.fspath(path)} contains floats outside [0, 1] or NaN; divide by the peak value"
            )
        return image
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    wanted = "L" if gray else "RGB"
    return image if image.mode == wanted else image.convert(wanted)


def _scaled(image: Image.Image, side: int) -> Image.Image:
    factor = side / min(image.size)
    size = (max(side, round(image.width * factor)), max(side, round(image.height * factor)))
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _centre(image: Image.Image, side: int, path: Path | str) -> Image.Image:
    if side > min(image.size):
        raise ImageError(f"{os.fspath(path)} is {image.height}×{image.width}, smaller than a crop of {side}")
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _cut_off(image: Image.Image, path: Path | str) -> bool:
    """Whether the file seems to end too early, as an interrupted copy does; from its length and last bytes alone."""
    with open_file(path) as file:
        size = file_size(file)
        if image.format == "TIFF":
            tags: Any = image.tag_v2  # type: ignore[attr-defined]
            starts, lengths = (tags.get(a, tags.get(b, ())) for a, b in ((273, 324), (279, 325)))
            return any(a + b > size for a, b in zip(starts, lengths, strict=False))
        if image.format == "WEBP":
            file.seek(4)
            return int.from_bytes(file.read(4), "little") + 8 > size
        mark = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}.get(image.format or "")
        file.seek(max(0, size - _TAIL))
        return mark is not None and mark not in file.read()
