"""Recorded measurements, with the true images if there are any.

`measured` and `clean` are each a folder, a glob (`low-dose/*.png`), one ``.npy`` array N×… or a dataset of an HDF5
file (`scans.h5:/low`, which needs `pip install 'bltoolbox[hdf5]'`). A folder or a glob has one file per sample, a
picture or an ``.npy`` array. Only what is asked for is read. Nothing is simulated: the recipe has no `noise`.

Files belong together if they have the same name: in a folder its path without the suffix, in a glob what the
wildcards stand for. So `gt/*.png` and `low-dose/*.npy` match by stems, `scans/*/full.png` and `scans/*/low.png` by
folders. A file without a partner is an error. An array has no names: its rows are matched by their position, with
those of another array or with files in the order of their names.

Unsigned integers are scaled to [0, 1]. With another `range`, e.g. [0, 4095] for counts or [-1000, 2000] for Hounsfield
units, all numbers are taken as they are stored; images, metrics, pictures and the constraint `box` then refer to that
range. Complex numbers become pairs of channels, real parts first. An array of three dimensions per sample is taken as
C×H×W, or as H×W×C if it has 1 or 3 channels there.

When to choose it: for measurements of a real instrument. For measurements simulated from images use `folder` or
`array`.

Where true images do not exist, leave `clean` out and choose an upper loss that needs none. Or let `clean` be a second
noisy image of each scene: where its noise is independent and has mean zero, the expected squared error has the same
minimiser (Noise2Noise). Metrics then compare with noisy targets, so evaluate on true images if you can.

Reference: Lehtinen et al., *Noise2Noise: learning image restoration without clean data*, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_builtins.data.file_names import refuse_mismatch
from blt_builtins.data.groups import read_groups
from blt_builtins.data.ranges import check_ids, check_range
from blt_builtins.data.recorded import Layout, Source, as_channels, as_tensor, open_source
from bltoolbox.plugin import Data


@dataclass(frozen=True)
class ContextFile:
    """Something that operator or data term need to know about each sample.

    Args:
        key: What they call it, e.g. mask, kernel or class.
        path: Where it is, as for `measured`; arrays are passed on as they are stored, also complex ones. One number
            per sample, e.g. its class, is an array of N.
    """

    key: str
    path: str


class Pairs(Data):
    """Measurements and images from files.

    Args:
        measured: The measurements: a folder, a glob, an .npy file N×… or file.h5:/dataset.
        clean: The true images, or noisy targets; none when left out.
        context: What differs from sample to sample in operator and data term: a list of {key: mask, path: masks.npy}.
        range: The values between which images lie.
        layout: Where the channels of .npy and HDF5 samples are.
        count: Number of samples to use; all from ``offset`` on when left out.
        offset: Position of the first sample to use, e.g. to hold the samples before it out.
        groups: A CSV file that tells which samples are of one photograph, as for `array`; auto takes the one with the
            name of the measurements, if there is one, and none lets each sample stand for itself.
    """

    def __init__(
        self,
        measured: str,
        clean: str | None = None,
        context: Sequence[ContextFile] = (),
        range: tuple[float, float] = (0.0, 1.0),
        layout: Layout = "auto",
        count: Annotated[int, Gt(0)] | None = None,
        offset: Annotated[int, Ge(0)] = 0,
        groups: str = "auto",
    ) -> None:
        if not range[0] < range[1]:
            raise ValueError(f"range [{range[0]:g}, {range[1]:g}] is empty; give [lowest, highest]")
        if len({entry.key for entry in context}) < len(context):
            raise ValueError("context names an entry twice; name each one once")
        self.range = range
        self.layout = layout
        self.offset = offset
        self._measured = open_source(measured)
        self._clean = None if clean is None else open_source(clean)
        self._context = {entry.key: open_source(entry.path, numbers=True) for entry in context}
        total = self._matched()
        check_range(f"{measured} holds {total} samples", total, offset, count)
        self.count = total - offset if count is None else count
        self._groups = read_groups(self._measured.root, total, groups)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        images = rng.integers(4096, size=(5, 12, 14)).astype(np.float32)
        for i, image in enumerate(images):
            np.save(folder / f"gt-{i}.npy", image)
        np.save(folder / "measured.npy", images + rng.normal(0, 50, images.shape))
        np.save(folder / "masks.npy", rng.integers(2, size=images.shape, dtype=np.uint8))
        return {
            "measured": str(folder / "measured.npy"),
            "clean": str(folder / "gt-*.npy"),
            "context": [{"key": "mask", "path": str(folder / "masks.npy")}],
            "range": [0, 4095],
        }

    def offers(self, method: str) -> bool:
        return super().offers(method) and (method != "clean" or self._clean is not None)

    def __len__(self) -> int:
        return self.count

    def clean(self, ids: Sequence[int]) -> Tensor:
        if self._clean is None:
            raise ValueError("there are no true images; set clean")
        return self._images(self._clean, ids)

    def measured(self, ids: Sequence[int]) -> Tensor:
        return self._images(self._measured, ids)

    def context(self, ids: Sequence[int]) -> dict[str, Tensor]:
        places = self._places(ids)
        return {
            name: torch.stack([_entry(source, i) for i in places]) for name, source in self._context.items()
        }

    def label(self, id: int) -> str:
        named = self._named()
        if named is None:
            return f"#{self.offset + id}"
        # A name that cannot be decoded must not break a report.
        return named[self.offset + id].encode("utf-8", "replace").decode()

    def group(self, id: int) -> str:
        i = self.offset + id
        if self._groups is not None:
            return f"photograph {self._groups[i]}"
        return (self._clean or self._measured).place(i)

    def _sources(self) -> list[Source]:
        images = [self._measured, self._clean, *self._context.values()]
        return [source for source in images if source is not None]

    def _named(self) -> tuple[str, ...] | None:
        return next((source.names for source in self._sources() if source.names is not None), None)

    def _matched(self) -> int:
        """The number of samples; refuses sources that do not belong together."""
        sources = self._sources()
        refuse_mismatch(
            [(entry.path, entry.names) for entry in sources if entry.names is not None] or [("", ())]
        )
        for source in sources[1:]:
            if source.count != sources[0].count:
                raise ValueError(
                    f"{sources[0].path} has {sources[0].count} samples and {source.path} has {source.count}; there must"
                    " be one for each measurement"
                )
        return sources[0].count

    def _places(self, ids: Sequence[int]) -> list[int]:
        return [int(i) for i in check_ids(ids, self.count) + self.offset]

    def _images(self, source: Source, ids: Sequence[int]) -> Tensor:
        return torch.stack([self._image(source, i) for i in self._places(ids)])

    def _image(self, source: Source, i: int) -> Tensor:
        what = f"{source.path} #{i}" if source.names is None else f"{source.names[i]} of {source.path}"
        layout = "channels-last" if source.pictures else self.layout
        return as_tensor(as_channels(source.take(i), layout, what), self.range == (0.0, 1.0), what)


def _entry(source: Source, i: int) -> Tensor:
    """A context entry of one sample as it is stored; the channels of pictures come first."""
    values = source.take(i)
    values = np.moveaxis(values, 2, 0) if source.pictures else values
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("=")))
