"""Picture files, changed and written back as they were: format, bits, mode, transparency and metadata. Without torch.

What is changed are the colours, H×W×C as the picture is shown; a picture that its EXIF orientation turns is turned
for that, and back again when it is written, so that the metadata stay true. Palettes and pure black and white cannot
hold what comes out: they become RGB and gray. JPEG is written with quality 95 and the chroma sampling of the input,
lossy WebP with quality 95, TIFF with the compression of the input if that loses nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin

from bltoolbox.config.reading import FileRefused, open_file
from bltoolbox.restoration.pictures.images import SUFFIXES, TURNS, ImageError, opened, orientation
from bltoolbox.restoration.pictures.png16 import encode_deep, is_16_bits, is_deep, read_deep
from bltoolbox.restoration.pictures.tiff_header import check_strips, check_tiff
from bltoolbox.runs.files import write_bytes

#: Suffixes of files that can be written.
FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".jpe": "JPEG",
    ".jfif": "JPEG",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
QUALITY = 95

Kind = Literal["gray", "rgb", "cmyk"]
_INVERSE = {6: TURNS[8], 8: TURNS[6]}
_LOSSLESS_TIFF = {"raw", "tiff_lzw", "tiff_adobe_deflate", "tiff_deflate", "packbits", "zstd", "lzma"}
#: Tags of TIFF that tell about the picture, not about how its pixels are stored.
_TELLING = (270, 271, 272, 285, 305, 306, 315, 316, 33432, 700, 33723, 34665, 34853)
#: Those that hold further tags: EXIF and GPS.
_DIRECTORIES = (34665, 34853)
_PHOTOMETRIC, _EXTRA_SAMPLES = 262, 338


@dataclass(frozen=True)
class Picture:
    """A decoded file, and all that is needed to write it back."""

    path: Path
    #: H×W×C: uint8, uint16 or float32.
    colours: NDArray[Any]
    #: H×W×1 of the same type.
    alpha: NDArray[Any] | None
    kind: Kind
    turned: int = 1
    #: What the writers of all formats share: exif, icc_profile, dpi.
    metadata: dict[str, Any] = field(default_factory=dict)
    #: What the writer of its own format needs besides.
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def format(self) -> str:
        return FORMATS.get(self.path.suffix.lower(), "PNG")


def is_picture(path: Path) -> bool:
    """Whether a file in a folder is meant: by its name."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def read_pixels(path: Path) -> NDArray[Any]:
    """The numbers of a picture as they are stored, H×W×C, whatever their range: for recorded data."""
    picture = read_picture(path, unit=False)
    if picture.kind == "cmyk":
        raise ImageError(f"{path} has the colours CMYK; save it as gray or RGB")
    if picture.alpha is not None and picture.alpha.min() < np.iinfo(picture.alpha.dtype).max:
        raise ImageError(f"{path} has transparent pixels; save it without an alpha channel")
    return picture.colours


def read_picture(path: Path, *, unit: bool = True) -> Picture:
    """Decode a file; an ImageError, one sentence with its name, if that is not possible.

    With ``unit`` the values stand for [0, 1], so that floats outside and integers without a largest one are refused.
    """
    with opened(path) as image:
        notes = ["only its first frame is used"] if _has_several(image, path) else []
        compression = image.info.get("compression")
        bits = _tiff_bits(image)
        if image.format == "PNG" and is_deep(path):
            _load_metadata(image)
            pixels, turned = read_deep(path), orientation(image)
        elif len(bits) > 1 and set(bits) == {16} and image.mode in ("RGB", "RGBA"):
            turned = orientation(image)
            pixels = _deep_tiff(path)
            if _tag(image, _EXTRA_SAMPLES) == 1 and pixels.shape[2] == 4:
                pixels = _unmultiplied(pixels)
        else:
            if is_16_bits(path) or (set(bits) == {16} and image.mode == "CMYK"):
                notes.append("16 bits become 8, since files of this kind are read with 8")
            image.load()
            turned = orientation(image)
            pixels = np.asarray(_plain(image, path, notes, unit))
            if image.mode.startswith("I;16") and _tag(image, _PHOTOMETRIC) == 0:
                pixels = 65535 - pixels  # white is 0, which Pillow minds for 8 bits only
            if image.mode.startswith("I") and "transparency" in image.info:
                notes.append("its transparent shade becomes opaque")
        picture = _picture(path, pixels, "cmyk" if image.mode == "CMYK" else None)
        options = _options(image, path, compression)
        metadata = _metadata(image)
    if (turn := TURNS.get(turned)) is not None:
        alpha = None if picture.alpha is None else _turn(picture.alpha, turn)
        picture = replace(picture, colours=_turn(picture.colours, turn), alpha=alpha)
    # The tag of a TIFF is not written again: its pixels stay as they are shown.
    turned = 1 if image.format == "TIFF" else turned
    return replace(picture, turned=turned, metadata=metadata, options=options, notes=tuple(notes))


def _has_several(image: Image.Image, path: Path) -> bool:
    """Whether there are more frames; Pillow would read the tags of all frames of a TIFF for that."""
    if image.format != "TIFF":
        return int(getattr(image, "n_frames", 1)) > 1
    with open_file(path) as file:
        return check_tiff(file, path).several


def _tag(image: Image.Image, number: int) -> int | None:
    """One of the tags of a TIFF."""
    value = getattr(image, "tag_v2", {}).get(number)
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, int) else None


def _unmultiplied(pixels: NDArray[Any]) -> NDArray[Any]:
    """Colours that were stored multiplied by their alpha, without that."""
    colours, alpha = pixels[..., :3].astype(np.float64), pixels[..., 3:]
    plain = np.where(alpha > 0, colours * 65535 / np.maximum(alpha, 1), colours)
    return np.concatenate([(plain.clip(0, 65535) + 0.5).astype(np.uint16), alpha], axis=2)


def _picture(path: Path, pixels: NDArray[Any], kind: Kind | None) -> Picture:
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if kind == "cmyk":
        return Picture(path, pixels, None, kind)
    count = pixels.shape[2]
    colours = count - (count in (2, 4))
    alpha = None if colours == count else np.ascontiguousarray(pixels[..., colours:])
    return Picture(path, pixels[..., :colours], alpha, "gray" if colours == 1 else "rgb")


def _load_metadata(image: Image.Image) -> None:
    """Of a PNG they may stand behind the pixels, which are decoded for that."""
    with contextlib.suppress(Exception):
        image.load()


def _plain(image: Image.Image, path: Path, notes: list[str], unit: bool) -> Image.Image:
    """One of the modes L, LA, RGB, RGBA, CMYK, I;16 and F."""
    mode = image.mode
    if mode in ("L", "RGB", "CMYK", "LA", "RGBA") and not (
        mode in ("L", "RGB") and image.has_transparency_data
    ):
        return image
    if mode.startswith("I;16"):
        return image if mode == "I;16" else _sixteen(image)
    if mode == "I" and image.format in ("PNG", "PPM"):
        return _sixteen(image)
    if mode in ("I", "F") and not unit:
        return image
    if mode == "I":
        raise ImageError(
            f"{path} contains 32-bit integers, whose range is unknown; save it with 8 or 16 bits"
        )
    if mode == "F":
        values = np.asarray(image)
        # `not (… <= …)` also catches NaN, for which every comparison is false.
        if not (values.min() >= 0 and values.max() <= 1):
            raise ImageError(f"{path} contains floats outside [0, 1] or NaN; divide by the peak value")
        return image
    gray = mode in ("1", "L", "La")
    wanted = ("LA" if gray else "RGBA") if image.has_transparency_data else ("L" if gray else "RGB")
    if mode in ("P", "PA"):
        notes.append(f"its palette cannot represent the result, which becomes {wanted}")
    elif mode == "1":
        notes.append("black and white become gray")
    elif mode not in ("L", "RGB", "La", "RGBa"):
        notes.append(f"its colours become {wanted}")
    return image.convert(wanted)


def _sixteen(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image).astype(np.uint16))


def _tiff_bits(image: Image.Image) -> tuple[int, ...]:
    tags: Any = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    return tuple(tags.get(258, ()))


def _deep_tiff(path: Path) -> NDArray[Any]:
    """16 bits in several channels, which Pillow reads as 8 bits."""
    try:
        import tifffile

        with open_file(path) as opened_file:
            check_strips(opened_file, path, check_tiff(opened_file, path))
            opened_file.seek(0)
            with tifffile.TiffFile(opened_file) as file:
                pixels = file.pages[0].asarray()
    except FileRefused:
        raise
    except Exception as error:  # a compression that is not built in, or a damaged file
        raise ImageError(
            f"{path} cannot be read with 16 bits: {str(error).strip()}; save it without compression"
        ) from error
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype != np.uint16:
        raise ImageError(
            f"{path} cannot be read with 16 bits: its channels are stored apart; save them together"
        )
    return pixels


def _metadata(image: Image.Image) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if image.info.get("icc_profile"):
        metadata["icc_profile"] = image.info["icc_profile"]
    if image.info.get("dpi"):
        metadata["dpi"] = tuple(float(resolution) for resolution in image.info["dpi"])
    with contextlib.suppress(Exception):  # damaged metadata are no reason to lose the pixels
        metadata |= {"exif": exif} if (exif := _exif(image)) else {}
    return metadata


def _exif(image: Image.Image) -> bytes | None:
    if isinstance(image.info.get("exif"), bytes):
        return bytes(image.info["exif"])
    tags: Any = getattr(image, "tag_v2", None)
    if tags is None:
        return None
    exif = Image.Exif()
    original = image.getexif()
    for tag in _TELLING:
        if tag in original:
            exif[tag] = dict(original.get_ifd(tag)) if tag in _DIRECTORIES else original[tag]
    return exif.tobytes() if len(exif) else None


def _options(image: Image.Image, path: Path, compression: str | None) -> dict[str, Any]:
    """For the writer of the format that the picture has."""
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        sampling = JpegImagePlugin.get_sampling(image)
        options: dict[str, Any] = {"subsampling": max(0, sampling)}
        if image.info.get("progressive"):
            options["progressive"] = True
        if image.info.get("comment"):
            options["comment"] = image.info["comment"]
        return options | _xmp(image)
    if isinstance(image, PngImagePlugin.PngImageFile):
        texts = PngImagePlugin.PngInfo()
        for key, value in image.text.items():
            if isinstance(key, str) and isinstance(value, str):
                texts.add_itxt(key, value)
        return {"pnginfo": texts} if image.text else {}
    if image.format == "WEBP":
        return {"lossless": _is_lossless(path)} | _xmp(image)
    if image.format == "TIFF":
        return {"compression": compression if compression in _LOSSLESS_TIFF else "tiff_adobe_deflate"}
    return {}


def _xmp(image: Image.Image) -> dict[str, Any]:
    return {"xmp": image.info["xmp"]} if isinstance(image.info.get("xmp"), bytes) else {}


def _is_lossless(path: Path) -> bool:
    """Whether the pixels of a WebP file are in a VP8L chunk."""
    with open_file(path) as file:
        file.seek(12)
        while len(head := file.read(8)) == 8:
            if head[:4] in (b"VP8L", b"VP8 "):
                return head[:4] == b"VP8L"
            size = int.from_bytes(head[4:], "little")
            file.seek(size + size % 2 if head[:4] != b"ANMF" else 16, 1)
    return False


def _turn(pixels: NDArray[Any], turn: Image.Transpose) -> NDArray[Any]:
    """As Pillow does, for arrays of any type."""
    T = Image.Transpose
    if turn in (T.TRANSPOSE, T.TRANSVERSE, T.ROTATE_90, T.ROTATE_270):
        pixels = pixels.swapaxes(0, 1)
    if turn in (T.FLIP_TOP_BOTTOM, T.ROTATE_180, T.TRANSVERSE, T.ROTATE_90):
        pixels = pixels[::-1]
    if turn in (T.FLIP_LEFT_RIGHT, T.ROTATE_180, T.TRANSVERSE, T.ROTATE_270):
        pixels = pixels[:, ::-1]
    return pixels


def write_picture(path: Path, picture: Picture) -> list[str]:
    """Write the picture in the format of the file's suffix, atomically; what had to be changed for that."""
    format = FORMATS[path.suffix.lower()]
    notes: list[str] = []
    options = picture.options if format == picture.format else {}
    # A TIFF is written as the picture is shown, without the tag.
    turned = 1 if format == "TIFF" else picture.turned
    if (turn := _INVERSE.get(turned, TURNS.get(turned))) is not None:
        alpha = None if picture.alpha is None else _turn(picture.alpha, turn)
        picture = replace(picture, colours=_turn(picture.colours, turn), alpha=alpha)
    picture = _fitting(picture, format, notes)
    try:
        write_bytes(path, _encoded(picture, format, options, notes))
    except Exception as error:  # a format may not hold a picture of this size, and encoders raise anything
        reason = (
            (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        )
        raise ImageError(f"{os.fspath(path)} cannot be written: {reason}") from error
    return notes


def _fitting(picture: Picture, format: str, notes: list[str]) -> Picture:
    """What the format can hold."""
    colours, alpha = picture.colours, picture.alpha
    if colours.dtype == np.float32 and format != "TIFF":
        colours = (colours.clip(0, 1) * 65535 + 0.5).astype(np.uint16)
        notes.append("floats become 16 bits" if format == "PNG" else "floats become 8 bits")
    if colours.dtype == np.uint16 and format in ("JPEG", "WEBP"):
        if picture.colours.dtype == np.uint16:
            notes.append(f"16 bits become 8, since {format} has no more")
        colours = _eight(colours)
        alpha = None if alpha is None else _eight(alpha)
    picture = replace(picture, colours=colours, alpha=alpha)
    if picture.kind == "cmyk" and format not in ("JPEG", "TIFF"):
        notes.append(f"CMYK becomes RGB, since {format} has no CMYK")
        metadata = {key: value for key, value in picture.metadata.items() if key != "icc_profile"}
        rgb = np.asarray(Image.fromarray(np.ascontiguousarray(colours), "CMYK").convert("RGB"))
        picture = replace(picture, colours=rgb, kind="rgb", metadata=metadata)
    if alpha is not None and format == "JPEG":
        notes.append("transparent pixels become white, since JPEG has no transparency")
        opaque = alpha.astype(np.float32) / 255
        white = colours * opaque + 255 * (1 - opaque)
        picture = replace(picture, colours=(white + 0.5).astype(np.uint8), alpha=None)
    return picture


def _eight(values: NDArray[Any]) -> NDArray[np.uint8]:
    return ((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _encoded(picture: Picture, format: str, options: dict[str, Any], notes: list[str]) -> bytes:
    pixels = picture.colours
    if picture.alpha is not None:
        pixels = np.concatenate([pixels, picture.alpha], axis=2)
    pixels = np.ascontiguousarray(pixels)
    if pixels.dtype == np.uint16 and pixels.shape[2] > 1:
        if format == "PNG":
            return encode_deep(pixels, **picture.metadata, **options)
        return _encoded_tiff(pixels, picture.metadata, options)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels, *_mode(picture))
    settings = picture.metadata | _settings(format) | options
    if format == "TIFF":
        settings["tiffinfo"] = tags = _tags(settings.pop("exif", None))
        if any(tag in tags for tag in _DIRECTORIES) and settings.get("compression", "raw") != "raw":
            settings["compression"] = "raw"
            notes.append("written without compression, with which Pillow cannot write EXIF data")
    if settings.get("lossless"):
        settings.pop("quality", None)
    out = io.BytesIO()
    image.save(out, format, **settings)
    return out.getvalue()


def _mode(picture: Picture) -> tuple[str, ...]:
    return ("CMYK",) if picture.kind == "cmyk" else ()


def _settings(format: str) -> dict[str, Any]:
    if format == "JPEG":
        return {"quality": QUALITY, "subsampling": 0}
    return {"quality": QUALITY, "exact": True} if format == "WEBP" else {}


def _tags(exif: bytes | None) -> TiffImagePlugin.ImageFileDirectory_v2:
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    with contextlib.suppress(Exception):  # damaged metadata are no reason to lose the pixels
        loaded = Image.Exif()
        loaded.load(exif or b"")
        for tag in _TELLING:
            if tag in loaded:
                tags[tag] = loaded.get_ifd(tag) if tag in _DIRECTORIES else loaded[tag]
    return tags


def _encoded_tiff(pixels: NDArray[Any], metadata: dict[str, Any], options: dict[str, Any]) -> bytes:
    import tifffile

    out = io.BytesIO()
    plain = options.get("compression", "raw") == "raw"
    tags = _tags(metadata.get("exif"))
    texts = [(tag, "s", 0, tags[tag], True) for tag in _TELLING if isinstance(tags.get(tag), str)]
    tifffile.imwrite(
        out,
        pixels,
        photometric="rgb",
        extrasamples=["unassalpha"] if pixels.shape[2] == 4 else None,
        compression=None if plain else "zlib",
        iccprofile=metadata.get("icc_profile"),
        resolution=metadata.get("dpi"),
        resolutionunit="INCH" if "dpi" in metadata else None,
        metadata=None,
        software=False,
        extratags=texts,
    )
    return out.getvalue()
