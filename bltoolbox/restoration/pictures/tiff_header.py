"""What the first image of a TIFF file declares, checked before a decoder allocates anything. Without torch.

Decoders believe the tags: one more number multiplies the memory (a depth, 65535 samples per pixel, a tile of 2³¹ pixels
in an image of 100), and tags of any size may point to the same bytes. Deflated strips are no different: tifffile
inflates whatever there is.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bltoolbox.config.reading import BITS, DECODED, PIXELS, SAMPLES, TAGS, TILE, FileRefused, file_size

_ORDERS = {b"II": "<", b"MM": ">"}
#: Formats of the types of tags that hold whole numbers, and bytes of all types.
_NUMBERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
_SIZES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _SAMPLES, _ROWS = 256, 257, 258, 259, 277, 278
_TILE_WIDTH, _TILE_HEIGHT, _DEPTH, _TILE_DEPTH = 322, 323, 32997, 32998
_OFFSETS, _LENGTHS = (273, 324), (279, 325)
_DEFLATE = (8, 32946)
#: No compression, CCITT, LZW, JPEG, deflate, PackBits, LZMA, Zstandard and WebP: those that Pillow decodes.
_COMPRESSIONS = {1, 2, 3, 4, 5, 6, 7, *_DEFLATE, 32771, 32773, 32809, 34676, 34677, 34925, 50000, 50001}
_INFLATED = 2**20
_WANTED = {
    *(_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _SAMPLES, _ROWS, _TILE_WIDTH, _TILE_HEIGHT, _DEPTH, _TILE_DEPTH),
    *(*_OFFSETS, *_LENGTHS),
}


@dataclass(frozen=True)
class TiffHeader:
    """The numbers of the first directory by tag, and whether another image follows."""

    numbers: dict[int, tuple[int, ...]]
    several: bool

    def number(self, tag: int, default: int) -> int:
        """The first value of a tag."""
        return next(iter(self.numbers.get(tag, ())), default)

    @property
    def pixels(self) -> int:
        return self.number(_WIDTH, 0) * self.number(_HEIGHT, 0) * max(1, self.number(_DEPTH, 1))

    @property
    def tile(self) -> int:
        """Pixels of a tile; 0 for an image in strips."""
        sides = self.number(_TILE_WIDTH, 0), self.number(_TILE_HEIGHT, 0), max(1, self.number(_TILE_DEPTH, 1))
        return math.prod(sides)

    @property
    def pixel_bits(self) -> int:
        samples, bits = self.number(_SAMPLES, 1), self.numbers.get(_BITS, (1,))
        return max(sum(bits), samples * max(bits, default=1))


def is_tiff(start: bytes) -> bool:
    """Whether a file that begins like this is read as a TIFF file."""
    return start[:2] in _ORDERS and start[2:4] in (b"*\0", b"\0*", b"+\0", b"\0+")


def check_tiff(file: BinaryIO, path: Path | str) -> TiffHeader:
    """The header of an open TIFF file, or FileRefused."""
    try:
        header = _read(file, path)
    except (struct.error, KeyError, OverflowError, OSError, ValueError) as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"{os.fspath(path)} cannot be read: its TIFF directory is damaged") from error
    PIXELS.check(path, header.pixels)
    SAMPLES.check(path, max(header.number(_SAMPLES, 1), len(header.numbers.get(_BITS, ()))))
    BITS.check(path, max(header.numbers.get(_BITS, (1,)), default=1))
    DECODED.check(path, header.pixels * header.pixel_bits // 8)
    if header.tile > 4 * header.pixels:
        TILE.check(path, header.tile)
    if (code := header.number(_COMPRESSION, 1)) not in _COMPRESSIONS:
        raise FileRefused(
            f"{os.fspath(path)} cannot be read: unknown compression {code}; save it with another"
        )
    return header


def _read(file: BinaryIO, path: Path | str) -> TiffHeader:
    file.seek(0)
    start = file.read(16)
    order, big = _ORDERS[start[:2]], b"+" in start[2:4]
    inline = 8 if big else 4
    place = order + ("Q" if big else "I")
    file.seek(*struct.unpack_from(place, start, inline))
    counter, fields = (order + "Q", f"{order}HHQ8s") if big else (order + "H", f"{order}HHI4s")
    (count,) = struct.unpack(counter, file.read(struct.calcsize(counter)))
    TAGS.check(path, count)
    entries = [struct.unpack(fields, file.read(struct.calcsize(fields))) for _ in range(count)]
    several = any(file.read(inline))
    _check_sizes(entries, inline, file_size(file), path)
    numbers: dict[int, tuple[int, ...]] = {}
    for tag, kind, length, value in entries:
        if tag not in _WANTED:
            continue
        if tag in numbers:
            raise ValueError(f"tag {tag} is there twice")
        content = value
        if length * _SIZES.get(kind, 1) > inline:
            file.seek(*struct.unpack(place, value))
            content = file.read(length * _SIZES.get(kind, 1))
        numbers[tag] = struct.unpack_from(f"{order}{length}{_NUMBERS[kind]}", content)
    if any(value < 0 for values in numbers.values() for value in values):
        raise ValueError("a negative number")
    return TiffHeader(numbers, several)


def _check_sizes(
    entries: Sequence[tuple[int, int, int, bytes]], inline: int, size: int, path: Path | str
) -> None:
    """All tags together fit into the file, so that none of its bytes are read a thousand times."""
    sizes = [length * _SIZES.get(kind, 1) for _, kind, length, _ in entries]
    declared = sum(entry_size for entry_size in sizes if entry_size > inline)
    if declared > size:
        raise FileRefused(
            f"{os.fspath(path)} is refused: its tags declare {declared} bytes, but the file has {size};"
            " it is damaged or cut off"
        )


def check_strips(file: BinaryIO, path: Path | str, header: TiffHeader) -> None:
    """Refuse deflated strips or tiles that contain more than their share of the image."""
    if header.number(_COMPRESSION, 1) not in _DEFLATE:
        return
    width, height = header.number(_WIDTH, 0), header.number(_HEIGHT, 0)
    pixels = header.tile or width * min(height, header.number(_ROWS, height))
    for start, length in _places(header):
        share = pixels * header.pixel_bits // 8
        if _inflated(file, start, length, share) > share:
            raise FileRefused(
                f"{os.fspath(path)} is refused: a strip inflates to more pixels than the image has room for"
            )


def _places(header: TiffHeader) -> Iterator[tuple[int, int]]:
    starts, lengths = (
        next((header.numbers[tag] for tag in tags if tag in header.numbers), ())
        for tags in (_OFFSETS, _LENGTHS)
    )
    return zip(starts, lengths, strict=False)


def _inflated(file: BinaryIO, start: int, length: int, share: int) -> int:
    """Bytes that a strip inflates to, a piece at a time; counted until they exceed ``share``."""
    file.seek(start)
    data = file.read(min(length, max(0, file_size(file) - start)))
    inflate, total = zlib.decompressobj(), 0
    try:
        while data and not inflate.eof and total <= share:
            total += len(inflate.decompress(data, _INFLATED))
            data = inflate.unconsumed_tail
    except zlib.error:
        return total  # the decoder has a sentence for damaged data
    return total
