"""Image files as a set of images of one size: headers are read at once, pixels on request."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bltoolbox.plugin import Header, ImageError, read_header, read_image

#: Number of files whose problems are reported one by one.
_TOLD = 3

log = logging.getLogger("bltoolbox")


class ImageFiles:
    """Usable files, in order. Unusable ones are left out, with one message for all of them.

    ``names`` are relative to ``folder``. ``resize`` scales the shorter side and cuts the middle square, ``crop`` cuts
    a square around the centre; without either, all images must have the same size. Unless given, ``channels`` is 1 if
    all files are gray.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        resize: int | None = None,
        crop: int | None = None,
        channels: int | None = None,
    ) -> None:
        self.folder = folder
        self.resize = resize
        self.crop = crop
        self.names, headers = self._sort_out(names)
        side = resize if crop is None else crop
        self.size = (side, side) if side else self._common_size(headers)
        self.channels = channels or max(header.channels for header in headers)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, i: int) -> Path:
        return self.folder / self.names[i]

    def read(self, ids: Sequence[int]) -> Tensor:
        """The images ``ids``, decoded anew: (B, C, H, W)."""
        images = [self._image(i) for i in ids]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()

    def label(self, i: int) -> str:
        # A name that cannot be decoded must not break a report.
        return self.names[i].encode("utf-8", "replace").decode()

    def _image(self, i: int) -> np.ndarray:
        if not 0 <= i < len(self.names):
            raise IndexError(f"ids must be in 0 … {len(self.names) - 1}")
        image = read_image(self.path(i), resize=self.resize, crop=self.crop, channels=self.channels)
        if image.shape[:2] != self.size:
            raise ImageError(
                f"{self.path(i)} is {_by(image.shape)}, but was {_by(self.size)} when it was opened"
            )
        return image

    def _sort_out(self, names: Sequence[str]) -> tuple[list[str], list[Header]]:
        good: list[str] = []
        headers: list[Header] = []
        troubles: list[str] = []
        for name in names:
            try:
                header = self._header(name)
            except ImageError as error:
                troubles.append(str(error))
            else:
                good.append(name)
                headers.append(header)
        if not good:
            raise ValueError(f"none of the {len(names)} image files can be used: {_listed(troubles)}")
        if troubles:
            log.warning(
                "%d of %d image files in %s are left out: %s",
                len(troubles),
                len(names),
                self.folder,
                _listed(troubles),
            )
        return good, headers

    def _header(self, name: str) -> Header:
        header = read_header(self.folder / name)
        for key, side in (("resize", self.resize), ("crop", self.crop if self.resize is None else None)):
            if side is not None and side > min(header.height, header.width):
                sides = _by((header.height, header.width))
                raise ImageError(f"{self.folder / name} is {sides}, too small for {key} {side}")
        return header

    def _common_size(self, headers: Sequence[Header]) -> tuple[int, int]:
        sizes = [(header.height, header.width) for header in headers]
        for i, size in enumerate(sizes):
            if size != sizes[0]:
                smallest = min(min(pair) for pair in sizes)
                raise ValueError(
                    f"the images have different sizes: {self.names[0]} is {_by(sizes[0])} and {self.names[i]} is"
                    f" {_by(size)}; set crop or resize, e.g. to {smallest}, the shortest side there is"
                )
        return sizes[0]


def real_path(path: Path) -> str:
    """One name for a file, by whatever path it is reached."""
    return os.path.realpath(path)


def _by(shape: Sequence[int]) -> str:
    return f"{shape[0]}×{shape[1]}"


def _listed(troubles: Sequence[str]) -> str:
    more = len(troubles) - _TOLD
    return "; ".join(troubles[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
