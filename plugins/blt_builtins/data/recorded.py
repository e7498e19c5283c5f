"""Recorded samples from files: one file per sample, or the rows of one array."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blt_builtins.data.file_names import is_glob, named_files
from blt_builtins.data.hdf5 import Hdf5Rows, hdf5_path
from blt_builtins.data.mapped import Mapped
from bltoolbox.plugin import ARRAY_IMAGES, RECORDED, SUFFIXES, map_array, read_header, read_pixels

Layout = Literal["auto", "channels-first", "channels-last"]
_CHANNELS = (1, 3)


class Source(ABC):
    """Samples of one shape, as they are stored."""

    #: The path as it was given.
    path: str
    #: The file or the folder behind it.
    root: Path
    #: What the files are called, in their order; None for the rows of an array.
    names: tuple[str, ...] | None = None
    count: int
    #: Of one sample.
    shape: tuple[int, ...]
    #: Whether samples are pictures, whose channels come last.
    pictures: bool = False

    @abstractmethod
    def take(self, i: int) -> NDArray[Any]:
        """Sample ``i``, read afresh."""

    @abstractmethod
    def place(self, i: int) -> str:
        """One name for sample ``i``, however it is reached."""


class Rows(Source):
    """The rows of an ``.npy`` file or of an HDF5 dataset."""

    def __init__(self, path: str, numbers: bool = False) -> None:
        self.path = path
        inside = hdf5_path(path)
        self.root = Path(path).expanduser() if inside is None else inside[0]
        if not self.root.is_file():
            raise ValueError(f"there is no file {self.root} (looked in {Path.cwd()})")
        self._rows = _NpyRows(self.root) if inside is None else Hdf5Rows(*inside)
        if len(self._rows.shape) < (1 if numbers else 2) or 0 in self._rows.shape:
            raise ValueError(f"{path} has shape {_by(self._rows.shape)}; a row for each sample is needed")
        self.count, *shape = self._rows.shape
        self.shape = tuple(shape)
        ARRAY_IMAGES.check(path, self.count)
        RECORDED.check(path, math.prod(shape))

    def take(self, i: int) -> NDArray[Any]:
        return self._rows.take(i)

    def place(self, i: int) -> str:
        return f"file {os.path.realpath(self.root)} #{i}"


class _NpyRows:
    def __init__(self, file: Path) -> None:
        try:
            array = map_array(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
        self.shape = array.shape
        self._mapped = Mapped(file, array)

    def take(self, i: int) -> NDArray[Any]:
        return self._mapped.take(np.array([i]))[0]


class Files(Source):
    """Pictures and ``.npy`` arrays of a folder or a glob, one file per sample."""

    def __init__(self, path: str) -> None:
        files = named_files(path, SUFFIXES | {".npy"})
        if not files:
            raise ValueError(f"there are no pictures or .npy files in {path} (looked in {Path.cwd()})")
        ARRAY_IMAGES.check(path, len(files))
        self.path = path
        self.root = _root(path)
        self.names = tuple(files)
        self.count = len(files)
        self._files = tuple(files.values())
        self.pictures = self._files[0].suffix.lower() != ".npy"
        self.shape = _shape(self._files[0])
        for file in self._files:
            if (file.suffix.lower() != ".npy") != self.pictures:
                raise ValueError(f"{path} has pictures and .npy files; give a glob for one of the two")
            if (shape := _shape(file)) != self.shape:
                raise ValueError(
                    f"the files of {path} have different shapes: {self._files[0].name} is {_by(self.shape)} and"
                    f" {file.name} is {_by(shape)}; all samples of one set must have the same shape"
                )

    def take(self, i: int) -> NDArray[Any]:
        file = self._files[i]
        values = read_pixels(file) if self.pictures else np.array(map_array(file))
        if values.shape != self.shape:
            raise ValueError(f"{file} is {_by(values.shape)}, but was {_by(self.shape)} when it was opened")
        return values

    def place(self, i: int) -> str:
        return f"file {os.path.realpath(self._files[i])}"


def open_source(path: str, numbers: bool = False) -> Source:
    """A folder, a glob, an ``.npy`` file or a dataset of an HDF5 file, whose rows may be single ``numbers``."""
    place = Path(path).expanduser()
    if hdf5_path(path) is not None or (place.suffix.lower() == ".npy" and not is_glob(path)):
        return Rows(path, numbers)
    if not is_glob(path) and not place.exists():
        raise ValueError(
            f"{path} does not exist (looked in {Path.cwd()}); give a folder, a glob such as gt/*.png, an .npy file or"
            " file.h5:/dataset"
        )
    return Files(path)


def as_channels(values: NDArray[Any], layout: Layout, what: str) -> NDArray[Any]:
    """One sample with its channels first: H×W gets one, H×W×C is turned, anything else stays as it is."""
    if values.ndim == 2:
        return values[None]
    if values.ndim != 3 or layout == "channels-first":
        return values
    first, last = (values.shape[axis] in _CHANNELS for axis in (0, 2))
    if layout == "auto" and first and last:
        raise ValueError(
            f"{what} is {_by(values.shape)}: the channels may come first or last; set layout to channels-first or"
            " channels-last"
        )
    return np.moveaxis(values, 2, 0) if last or layout == "channels-last" else values


def as_tensor(values: NDArray[Any], unit: bool, what: str) -> Tensor:
    """One sample in float32, complex numbers as pairs of channels; ``unit`` scales unsigned integers to [0, 1]."""
    if unit and values.dtype.kind in "ib":
        raise ValueError(
            f"{what} contains {values.dtype}, whose largest value is unknown; set range, e.g. [-1000, 2000]"
        )
    if values.dtype.kind == "c":
        values = np.concatenate([values.real, values.imag])
    if unit and values.dtype.kind == "u":
        values = values / np.float64(np.iinfo(values.dtype).max)
    tensor = torch.from_numpy(values.astype(np.float32))
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{what} contains NaN or infinity")
    return tensor


def _shape(file: Path) -> tuple[int, ...]:
    if file.suffix.lower() != ".npy":
        header = read_header(file)
        return header.height, header.width, header.channels
    try:
        shape = map_array(file).shape
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    RECORDED.check(file, math.prod(shape))
    return shape


def _root(path: str) -> Path:
    """A file or folder that exists: the part of a glob before its wildcards."""
    place = Path(path).expanduser()
    while is_glob(str(place)) and place != place.parent:
        place = place.parent
    return place


def _by(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "a single number"
