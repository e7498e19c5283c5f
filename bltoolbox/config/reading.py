"""Limits on what is read from files. Without torch.

A file from someone else may be small and declare content that exceeds any memory, may be a pipe without a writer,
or may be nested deeper than a parser can follow. Every reader of such files opens them here and compares what they
declare with a ``Limit`` before it allocates anything. ``LIMITS`` is the table in the documentation.

``open_file`` opens regular files only. A symbolic link is followed where a user names the file; inside a run
directory it is not (``follow=False``), because someone else's run directory may link to any file of its reader.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bltoolbox.errors import BltError, UsageError


class FileRefused(BltError, ValueError):
    """A file is refused for what it is or declares. Code that skips damaged content skips this, too."""


@dataclass(frozen=True)
class Limit:
    """How much of one kind of content may be read; ``variable`` is the environment variable that changes it."""

    what: str
    default: int
    unit: str
    reason: str
    variable: str | None = None

    @property
    def most(self) -> int:
        """The limit in effect."""
        text = os.environ.get(self.variable, "") if self.variable else ""
        if not text:
            return self.default
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text)):
            raise UsageError(f"{self.variable}={text}: give a positive whole number of {self.unit}")
        return int(text)

    def check(self, path: Path | str, declared: int) -> None:
        """Refuse a file that declares more than this."""
        if declared > self.most:
            remedy = f"; if you trust it, set {self.variable}={declared}" if self.variable else ""
            raise FileRefused(
                f"{os.fspath(path)} is refused: it declares {self._quantity(declared)}, and the limit for"
                f" {self.what} is {self._quantity(self.most)}{remedy}"
            )

    def _quantity(self, count: int) -> str:
        return quantity(count) if self.unit == "bytes" else f"{count} {self.unit}"

    def __str__(self) -> str:
        return self._quantity(self.default)


def quantity(size: int) -> str:
    """A number of bytes, readable."""
    for unit, scale, least in (("GiB", 2**30, 2**30), ("MiB", 2**20, 2**20), ("kB", 1000, 10_000)):
        if size >= least:
            return f"{size / scale:.4g} {unit}"
    return f"{size} bytes"


def _half_of_memory() -> int:
    if not hasattr(os, "sysconf"):  # Windows
        return 2**33
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


RECIPE = Limit("a recipe", 1_000_000, "bytes", "it is parsed with the position of every value")
JSON = Limit("a JSON file", 2**25, "bytes", "parsed, it takes up to 25 times its size", "BLT_MAX_JSON")
JSON_DEPTH = Limit("the nesting of JSON", 64, "levels", "deeper data exhaust the stack of their reader")
LOG = Limit(
    "a log of a run", 2**28, "bytes", "`metrics.jsonl` and similar logs are kept in memory", "BLT_MAX_LOG"
)
TABLE = Limit("a CSV file of groups", 2**28, "bytes", "it is read row by row", "BLT_MAX_TABLE")
REPORT_IMAGES = Limit("the images of a report", 2**28, "bytes", "the page contains all of them")
THETA = Limit("a θ file", 2**30, "bytes", "θ is kept in memory", "BLT_MAX_THETA")
THETA_HEADER = Limit(
    "the header of a θ file", 2**24, "bytes", "it contains the names of tensors and a recipe"
)
CHECKPOINT = Limit(
    "a checkpoint file",
    _half_of_memory(),
    "bytes",
    "half of the machine's memory; a machine can read what it wrote",
    "BLT_MAX_CHECKPOINT",
)
CHECKPOINT_INDEX = Limit(
    "the index of a checkpoint file", 2**26, "bytes", "it is unpickled before the tensors"
)
NPY_HEADER = Limit("the header of an .npy file", 10_000, "bytes", "numpy evaluates it as a Python literal")
MASK = Limit("a mask", 2**27, "elements", "1 GiB in float64", "BLT_MAX_MASK")
KERNEL = Limit("a blur kernel", 2**20, "elements", "e.g. 1024 rows and columns; `--kernel` takes up to 255")
ARRAY_IMAGES = Limit(
    "the images of a data set", 2**24, "images", "a run keeps some bytes for each one", "BLT_MAX_IMAGES"
)
GENERATED = Limit(
    "generated data",
    _half_of_memory(),
    "bytes",
    "half of the machine's memory, where all of them are kept",
    "BLT_MAX_GENERATED",
)
RECORDED = Limit(
    "a sample of recorded data",
    2**28,
    "elements",
    "1 GiB in float32; also a chunk of an HDF5 dataset, which is decompressed whole",
    "BLT_MAX_RECORDED",
)
PIXELS = Limit(
    "an image", 2**28 // 3, "pixels", "256 MiB in RGB; also one image of an array", "BLT_MAX_PIXELS"
)
IMAGE_FILE = Limit("an image file", 2**30, "bytes", "some decoders read it at once", "BLT_MAX_IMAGE_FILE")
SAMPLES = Limit("a TIFF image", 8, "samples per pixel", "colours and a few extra channels")
BITS = Limit("a sample of a TIFF image", 64, "bits", "the widest numbers")
DECODED = Limit(
    "a decoded TIFF image", 2**30, "bytes", "pixels × samples × bytes of a sample", "BLT_MAX_DECODED"
)
TILE = Limit("a tile of a TIFF image", 2**24, "pixels", "or four times the image, if that is more")
TAGS = Limit("a TIFF file", 4096, "tags", "of its first image")
DOWNLOAD = Limit("a download", 2**34, "bytes", "it is stored before its checksum is known")

LIMITS = (
    *(RECIPE, JSON, JSON_DEPTH, LOG, TABLE, REPORT_IMAGES, THETA, THETA_HEADER, CHECKPOINT, CHECKPOINT_INDEX),
    *(
        NPY_HEADER,
        MASK,
        KERNEL,
        ARRAY_IMAGES,
        GENERATED,
        RECORDED,
        PIXELS,
        IMAGE_FILE,
        SAMPLES,
        BITS,
        DECODED,
        TILE,
        TAGS,
        DOWNLOAD,
    ),
)

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path | str, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading. This never blocks: pipes are refused."""
    name = os.fspath(path)
    names = ("O_NONBLOCK", "O_NOCTTY", *(() if follow else ("O_NOFOLLOW",)))
    more = sum(getattr(os, flag, 0) for flag in names)  # not available on Windows
    try:
        file = open(name, "rb", opener=lambda name, flags: os.open(name, flags | more))  # noqa: SIM115
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise FileRefused(
                f"{name} is a symbolic link, which is not followed inside a run directory; copy the file there"
            ) from error
        if error.errno in (errno.ENXIO, errno.EOPNOTSUPP):
            raise FileRefused(f"{name} is a socket or a device; give a regular file") from error
        raise
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise FileRefused(f"{name} is {_KINDS.get(stat.S_IFMT(mode), 'special')}; give a regular file")
    return file


def file_size(file: BinaryIO) -> int:
    """Bytes of an open file; a sparse file counts with its declared length."""
    return os.fstat(file.fileno()).st_size


def read_bytes(path: Path | str, limit: Limit, *, follow: bool = True) -> bytes:
    """The content of a file that is not larger than its limit."""
    with open_file(path, follow=follow) as file:
        size = file_size(file)
        limit.check(path, size)
        return file.read(size)  # no more, even if it grows in the meantime


def read_text(path: Path | str, limit: Limit, *, follow: bool = True, errors: str = "strict") -> str:
    """The content of a UTF-8 text file; ``errors`` is that of ``bytes.decode``."""
    return read_bytes(path, limit, follow=follow).decode("utf-8", errors)


def read_end(path: Path | str, size: int, *, follow: bool = True) -> bytes:
    """The last ``size`` bytes of a file of any size, or all of a shorter one."""
    with open_file(path, follow=follow) as file:
        file.seek(max(0, file_size(file) - size))
        return file.read(size)


def read_start(path: Path | str, size: int, *, follow: bool = True) -> bytes:
    """The first ``size`` bytes of a file of any size."""
    with open_file(path, follow=follow) as file:
        return file.read(size)


def read_json(path: Path | str, *, follow: bool = True) -> Any:
    """The data of a JSON file, of bounded size and depth; a ValueError if it is not JSON."""
    return parse_json(read_bytes(path, JSON, follow=follow), path)


def parse_json(text: str | bytes, path: Path | str) -> Any:
    """The data of a JSON text of bounded depth; ``path`` is its name in messages."""
    deep = f"{os.fspath(path)} is refused: it is nested more than {JSON_DEPTH.most} levels deep"
    try:
        data = json.loads(text)
    except RecursionError:
        raise FileRefused(deep) from None
    if any(depth > JSON_DEPTH.most for depth in _depths(data)):
        raise FileRefused(deep)
    return data


def _depths(data: Any) -> Iterator[int]:
    """The depth of every collection, without recursion."""
    waiting = [(data, 1)]
    while waiting:
        collection, depth = waiting.pop()
        if isinstance(collection, dict | list):
            yield depth
            values = collection.values() if isinstance(collection, dict) else collection
            waiting += [(value, depth + 1) for value in values if isinstance(value, dict | list)]
