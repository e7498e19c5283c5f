"""Datasets of HDF5 files, read slice by slice.

An HDF5 file may lead elsewhere: by links and virtual datasets to other files, by external storage to raw bytes of any
file, by a filter to a plugin that HDF5 would load and execute. All of these are refused. A chunk is decompressed
whole, so its size has a limit, and what it expands to is checked first (``hdf5_chunks``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blt_builtins.data.hdf5_chunks import Chunks
from bltoolbox.plugin import RECORDED, MissingError, open_file

if TYPE_CHECKING:
    from h5py import Dataset, File

_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_SHOWN = 5


def hdf5_path(path: str) -> tuple[Path, str] | None:
    """File and dataset of ``file.h5:/dataset``; None where the path is of another kind."""
    if Path(path).suffix.lower() in _SUFFIXES:
        return Path(path).expanduser(), ""
    file, colon, name = path.rpartition(":/")
    is_hdf5 = colon and Path(file).suffix.lower() in _SUFFIXES
    return (Path(file).expanduser(), name) if is_hdf5 else None


class Hdf5Rows:
    """One dataset of a file, N×…; only the rows that are asked for are read."""

    def __init__(self, file: Path, name: str) -> None:
        try:
            import h5py
        except ImportError as error:
            raise MissingError(
                f"{file} needs the package h5py, which is not installed; pip install 'bltoolbox[hdf5]', or save the"
                " dataset as .npy"
            ) from error
        self.file = file
        with _damage(file):
            open_file(file).close()  # refuses pipes, for which HDF5 would wait
            self._file: File = h5py.File(file, "r", locking=False)
            self._dataset = _find(self._file, file, name)
            self._chunks = _checked(self._dataset, f"{file}:{self._dataset.name}")
            self.shape: tuple[int, ...] = self._dataset.shape
            self.dtype: np.dtype[Any] = self._dataset.dtype

    def take(self, i: int) -> NDArray[Any]:
        with _damage(self.file):
            self._chunks.check(i)
            return np.asarray(self._dataset[i])


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    """What HDF5 finds in a damaged file, as a sentence: h5py raises errors of many types for it."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, TypeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or (error.args[0] if error.args else error)
        raise ValueError(f"{file} cannot be read as HDF5: {reason}") from error


def _find(root: File, file: Path, name: str) -> Dataset:
    import h5py

    if not name:
        keys = [key for key in root if isinstance(root.get(key, getlink=True), h5py.HardLink)]
        example = f"{file}:/{keys[0] if keys else 'name'}"
        listed = f"; it has {', '.join(keys[:_SHOWN])}" if keys else ""
        raise ValueError(f"{file} is a file of datasets{listed}; name one, e.g. {example}")
    place: Any = root
    for step in filter(None, name.split("/")):
        link = place.get(step, getlink=True) if isinstance(place, h5py.Group) and step in place else None
        if link is None:
            raise ValueError(f"{file} has no dataset /{name}")
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"/{name} of {file} is a link, which is not followed; name the dataset itself")
        place = place[step]
    if not isinstance(place, h5py.Dataset):
        raise ValueError(f"/{name} of {file} is a group of datasets; name one of them")
    return place


def _checked(dataset: Dataset, name: str) -> Chunks:
    """The chunks of a dataset that consists of numbers in this file; anything else is refused."""
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{name} is refused: its values are in other files; copy them into one dataset")
    if dataset.dtype.kind not in "buifc":
        raise ValueError(f"{name} contains {dataset.dtype}; numbers are needed")
    RECORDED.check(name, math.prod(dataset.chunks or ()))
    return Chunks(dataset, name)
