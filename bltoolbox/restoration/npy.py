"""Arrays in ``.npy`` files, refused before anything is allocated if they are too large or not what they declare.

The header must declare exactly the bytes that follow it. Nothing is unpickled. A sparse file may declare terabytes and
take no room on the disk, so its size proves nothing: what is read whole has a limit, and what has none is mapped.
Without torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from bltoolbox.config.reading import NPY_HEADER, FileRefused, Limit, file_size, open_file, quantity

_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class Header:
    """What an ``.npy`` file declares; ``offset`` is where its data begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_array(path: Path | str, limit: Limit) -> NDArray[Any]:
    """An array of at most ``limit`` elements, read into memory."""
    with open_file(path) as file:
        header = _header(file, path, trailing=0)
        limit.check(path, header.elements)
        flat = np.fromfile(file, header.dtype, header.elements)
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


def map_array(path: Path | str, *, trailing: int = 0) -> NDArray[Any]:
    """An array of any size, mapped: only the parts in use are read. ``trailing`` bytes after it are not part of it."""
    with open_file(path) as file:
        header = _header(file, path, trailing)
        order: Any = "F" if header.fortran else "C"
        if header.elements == 0:  # nothing that could be mapped
            return np.empty(header.shape, header.dtype)
        return np.memmap(file, header.dtype, "r", header.offset, header.shape, order)


def _header(file: BinaryIO, path: Path | str, trailing: int) -> Header:
    """Read and check the header; the file is then at its data."""
    name = os.fspath(path)
    if (start := file.read(len(_MAGIC))) != _MAGIC:
        what = "an archive of arrays (.npz)" if start.startswith(b"PK") else "another kind of file"
        raise FileRefused(
            f"{name} cannot be read as an .npy array: it is {what}; save one array with numpy.save"
        )
    file.seek(0)
    try:
        readers = {
            (1, 0): npy_format.read_array_header_1_0,
            (2, 0): npy_format.read_array_header_2_0,
        }
        read = readers[npy_format.read_magic(file)]
        shape, fortran, dtype = read(file, max_header_size=NPY_HEADER.most)
    except Exception as error:  # whatever the parser of Python literals raises
        reason = str(error).partition("\n")[0] if isinstance(error, ValueError) else "its header is damaged"
        raise FileRefused(f"{name} cannot be read as an .npy array: {reason}") from error
    if dtype.kind not in "buifc":
        raise FileRefused(f"{name} cannot be read as an array of numbers: it contains {dtype}")
    header = Header(shape, fortran, dtype, file.tell())
    declared = header.elements * dtype.itemsize
    if min(shape, default=0) < 0 or declared != file_size(file) - trailing - header.offset:
        raise FileRefused(
            f"{name} cannot be read as an .npy array: it declares {quantity(declared)} of data, but contains"
            f" {quantity(max(0, file_size(file) - trailing - header.offset))}; copy or save it again"
        )
    return header
