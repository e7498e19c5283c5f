"""STL-10: colour images 96×96 of animals and vehicles, with torchvision's files and checksums.

5,000 images in ``train``, 8,000 in ``test`` and 100,000 in ``unlabeled``; labels are not used. The archive has 2.6 GB
and is downloaded only if ``download`` is set.

A ``.bin`` file contains the images one after the other, each channel by channel and each channel column by column.
torchvision reads the entire file into memory (2.8 GB for ``unlabeled``). Here it is verified against torchvision's
checksums and memory-mapped: memory does not grow with the number of images, and the images equal torchvision's bit for
bit.

Prefer it for training on many small photographs, as in published experiments on STL-10; they were scaled down and are
sharper than camera images of that size.

Reference: A. Coates, H. Lee, A. Y. Ng, *An analysis of single-layer networks in unsupervised feature learning*,
International Conference on Artificial Intelligence and Statistics (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_builtins.data.download import fetch
from blt_builtins.data.mapped import Mapped
from blt_builtins.data.ranges import check_ids, check_range
from blt_builtins.data.vision import torchvision_datasets
from bltoolbox.plugin import Data, MissingError, cache_folder

SHAPE = (3, 96, 96)


class STL10(Data):
    """The images of STL-10, memory-mapped.

    Args:
        path: The folder that contains, or will contain, stl10_binary; by default torchvision in the cache folder.
        split: One of the three files.
        count: Number of images to use; by default all from ``offset`` on.
        offset: Index of the first image to use.
        download: Download the files if they are missing (2.6 GB).
        verify: Compare the file with its known MD5 sum before using it; this takes seconds for ``unlabeled``.
    """

    def __init__(
        self,
        path: str | None = None,
        split: Literal["train", "test", "unlabeled"] = "train",
        count: Annotated[int, Gt(0)] | None = None,
        offset: Annotated[int, Ge(0)] = 0,
        download: bool = False,
        verify: bool = True,
    ) -> None:
        datasets = torchvision_datasets("stl10")
        root = Path(path).expanduser() if path is not None else cache_folder() / "torchvision"
        stl10 = datasets.STL10
        folder = root / stl10.base_folder
        file = folder / f"{split}_X.bin"
        if not file.is_file() and download:
            fetch(stl10.url, stl10.tgz_md5, root, [stl10.base_folder], file.is_file)
        if not file.is_file():
            raise MissingError(
                f"stl10: there is no {file}; set download: true to get it (2.6 GB), or path to the folder that holds"
                f" {stl10.base_folder}"
            )
        if verify:
            sums = dict(stl10.train_list + stl10.test_list)
            if not datasets.utils.check_integrity(str(file), sums[file.name]):
                raise ValueError(
                    f"{file} is damaged (its MD5 sum is wrong); delete {folder} and set download: true to get it again"
                )
        size = file.stat().st_size
        total, rest = divmod(size, int(np.prod(SHAPE)))
        if rest or not total:
            raise ValueError(f"{file} has {size} bytes, which is not a whole number of 96×96 colour images")
        check_range(f"{split} has {total} images", total, offset, count)
        self.split = split
        self.count = total - offset if count is None else count
        self.offset = offset
        # Columns before rows: transposed to (C, H, W).
        pixels = np.memmap(file, np.uint8, "r", shape=(total, *SHAPE))
        self._images = Mapped(file, pixels.transpose(0, 1, 3, 2))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        """A file of the same format with other pixels, so its checksum is wrong."""
        (folder / "stl10_binary").mkdir(exist_ok=True)
        images = np.random.default_rng(0).integers(256, size=(5, *SHAPE), dtype=np.uint8)
        images.tofile(folder / "stl10_binary" / "train_X.bin")
        return {"path": str(folder), "verify": False}

    def __len__(self) -> int:
        return self.count

    def clean(self, ids: Sequence[int]) -> Tensor:
        index = check_ids(ids, self.count)
        images = np.ascontiguousarray(self._images.take(index + self.offset))
        return torch.from_numpy(images).float() / 255

    def label(self, id: int) -> str:
        return f"{self.split} #{self.offset + id}"

    def group(self, id: int) -> str:
        return f"stl10 {self.split} #{self.offset + id}"
