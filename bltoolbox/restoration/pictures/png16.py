"""PNG files of 16 bits in several channels (RGB, RGBA, gray with alpha), which Pillow reads as 8 bits. Without torch.

Reading undoes the five filters of PNG. Two of them need the pixel to the left, above and between both, so that neither
rows nor columns can be done at once; anti-diagonals can: all that a pixel needs lies on the two before its own.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bltoolbox.config.reading import open_file
from bltoolbox.restoration.pictures.images import ImageError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Colour type and number of channels.
_CHANNELS = {2: 3, 4: 2, 6: 4}
_TYPES = {count: kind for kind, count in _CHANNELS.items()}
#: Bytes that are compressed at a time.
_PART = 2**24


def is_deep(path: Path) -> bool:
    """Whether this is a file that ``read_deep`` reads: 16 bits, several channels, not interlaced, no colour key."""
    with open_file(path) as file:
        head = file.read(33)
        if head[:8] != _SIGNATURE or head[12:16] != b"IHDR" or len(head) < 33:
            return False
        depth, kind, _, _, interlaced = head[24:29]
        if depth != 16 or kind not in _CHANNELS or interlaced:
            return False
        return all(name != b"tRNS" for name, _ in _chunks(file, data=False))


def is_16_bits(path: Path) -> bool:
    """Whether this is a PNG of several channels with 16 bits each."""
    with open_file(path) as file:
        head = file.read(33)
    return head[:8] == _SIGNATURE and len(head) == 33 and head[24] == 16 and head[25] in _CHANNELS


def read_deep(path: Path) -> NDArray[np.uint16]:
    """The pixels, H×W×C."""
    with open_file(path) as file:
        head = file.read(33)
        width, height = struct.unpack(">II", head[16:24])
        channels = _CHANNELS[head[25]]
        inflate = zlib.decompressobj()
        size = height * (1 + 2 * channels * width)
        data = bytearray()
        try:
            for name, content in _chunks(file, data=True):
                if name == b"IDAT" and len(data) < size:
                    # Never more than the header says, whatever a small file expands to.
                    data += inflate.decompress(content, size - len(data))
        except zlib.error as error:
            raise ImageError(f"{path} cannot be read: {error}") from error
    if len(data) < size:
        raise ImageError(f"{path} cannot be read: it is cut off")
    rows = np.frombuffer(data, np.uint8).reshape(height, -1)
    if rows[:, 0].max() > 4:
        raise ImageError(f"{path} cannot be read: unknown filter of a row")
    pixels = _unfilter(rows[:, 0], rows[:, 1:].reshape(height, width, 2 * channels))
    return pixels.view(">u2").astype(np.uint16)


def _chunks(file: BinaryIO, data: bool) -> Iterator[tuple[bytes, bytes]]:
    here = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(here)
    while len(head := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", head)
        # To read allocates first, so a chunk that claims more than the file has is not read.
        if name == b"IEND" or length > size - file.tell():
            return
        if data:
            yield name, file.read(length)
            file.seek(4, 1)
        else:
            yield name, b""
            file.seek(length + 4, 1)


def _unfilter(filters: NDArray[np.uint8], rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width, size = rows.shape
    # One row and one column of zeros before the picture, as the filters have it.
    out = np.zeros((height + 1, width + 1, size), np.uint8)
    if not (filters > 2).any():
        for number, kind in enumerate(filters):
            row = np.cumsum(rows[number], axis=0, dtype=np.uint8) if kind == 1 else rows[number]
            out[number + 1, 1:] = row + out[number, 1:] if kind == 2 else row
        return np.ascontiguousarray(out[1:, 1:])
    kinds = filters[:, None]
    for diagonal in range(height + width - 1):
        first, last = max(0, diagonal - width + 1), min(height - 1, diagonal)
        i = np.arange(first, last + 1)
        j = diagonal - i
        left, above, corner = (out[i + a, j + b].astype(np.int16) for a, b in ((1, 0), (0, 1), (0, 0)))
        guess = np.choose(
            kinds[i], (np.int16(0), left, above, (left + above) >> 1, _paeth(left, above, corner))
        )
        out[i + 1, j + 1] = rows[i, j] + guess.astype(np.uint8)
    return np.ascontiguousarray(out[1:, 1:])


def _paeth(left: NDArray[Any], above: NDArray[Any], corner: NDArray[Any]) -> NDArray[Any]:
    """Of the three neighbours the one nearest to left + above − corner."""
    to_left, to_above = np.abs(above - corner), np.abs(left - corner)
    to_corner = np.abs(left + above - 2 * corner)
    nearest = np.where(to_above <= to_corner, above, corner)
    return np.where((to_left <= to_above) & (to_left <= to_corner), left, nearest)


def encode_deep(pixels: NDArray[np.uint16], **options: Any) -> bytes:
    """A PNG file of H×W×C; the options are those that Pillow has for metadata."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, _TYPES[channels], 0, 0, 0)
    # The metadata are Pillow's business: it writes them for one pixel, and they are taken from there.
    small = io.BytesIO()
    Image.new("RGB", (1, 1)).save(small, "PNG", **options)
    small.seek(8)
    metadata = [chunk for chunk in _chunks(small, data=True) if chunk[0] not in (b"IHDR", b"IDAT")]
    parts = [_SIGNATURE, _chunk(b"IHDR", header), *(_chunk(*entry) for entry in metadata)]
    deflate = zlib.compressobj(6)
    step = max(1, _PART // (2 * channels * width))
    for top in range(0, height, step):
        parts.append(_chunk(b"IDAT", deflate.compress(_filtered(pixels, top, min(height, top + step)))))
    parts += [_chunk(b"IDAT", deflate.flush()), _chunk(b"IEND", b"")]
    return b"".join(parts)


def _filtered(pixels: NDArray[np.uint16], top: int, bottom: int) -> bytes:
    """Rows with the Paeth filter."""
    padded = np.zeros((bottom - top + 1, pixels.shape[1] + 1, 2 * pixels.shape[2]), np.int16)
    bytes_of_rows = pixels[max(0, top - 1) : bottom].astype(">u2").view(np.uint8)
    padded[-len(bytes_of_rows) :, 1:] = bytes_of_rows
    guess = _paeth(padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1])
    rows = np.full((bottom - top, 1 + 2 * pixels.shape[1] * pixels.shape[2]), 4, np.uint8)
    rows[:, 1:] = (padded[1:, 1:] - guess).astype(np.uint8).reshape(bottom - top, -1)
    return rows.tobytes()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
