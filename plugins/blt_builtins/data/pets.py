"""Oxford-IIIT Pet: photographs of cats and dogs, with torchvision's lists of files.

3,680 photographs in ``trainval`` and 3,669 in ``test``, mostly 300 to 500 pixels wide; breeds and outlines are not
used. The archives have 0.8 GB and are downloaded only if ``download`` is set. torchvision knows which files belong
to a split; they are opened like those of ``folder``, headers at once and pixels on request. Photographs that are too
small for ``size`` are left out, with one message.

Prefer it for training or evaluation on whole photographs of one size, as in published experiments.

Reference: O. M. Parkhi, A. Vedaldi, A. Zisserman, C. V. Jawahar, *Cats and dogs*, IEEE Conference on Computer Vision
and Pattern Recognition (2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt
from PIL import Image
from torch import Tensor

from blt_builtins.data.download import fetch
from blt_builtins.data.files import ImageFiles
from blt_builtins.data.ranges import check_range
from blt_builtins.data.vision import torchvision_datasets
from bltoolbox.plugin import Data, MissingError, cache_folder

#: What torchvision calls the folder of this data set, and what is in it.
BASE = "oxford-iiit-pet"
MEMBERS = ("images", "annotations")


class OxfordPets(Data):
    """Photographs of the Oxford-IIIT Pet data set, as squares of one size.

    Args:
        path: The folder that contains, or will contain, oxford-iiit-pet; by default torchvision in the cache folder.
        split: The list of photographs.
        count: Number of photographs to use; by default all from ``offset`` on. Those that are too small are counted and
            left out.
        offset: Position in the list of the first photograph to use.
        size: Side of the squares, in pixels.
        fit: Scale the shorter side to ``size`` and crop the middle, or crop the middle at full resolution.
        download: Download the files if they are missing (0.8 GB).
    """

    def __init__(
        self,
        path: str | None = None,
        split: Literal["trainval", "test"] = "trainval",
        count: Annotated[int, Gt(0)] | None = None,
        offset: Annotated[int, Ge(0)] = 0,
        size: Annotated[int, Gt(0)] = 256,
        fit: Literal["resize", "crop"] = "resize",
        download: bool = False,
    ) -> None:
        root = Path(path).expanduser() if path is not None else cache_folder() / "torchvision"
        names = _listed(root, split, download)
        check_range(f"{split} has {len(names)} photographs", len(names), offset, count)
        end = None if count is None else offset + count
        self.split = split
        self._files = ImageFiles(root / BASE / "images", names[offset:end], channels=3, **{fit: size})

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        base = folder / BASE
        for member in MEMBERS:
            (base / member).mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        for i in range(1, 5):
            pixels = rng.integers(256, size=(20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(base / "images" / f"Abyssinian_{i}.jpg")
        lines = "".join(f"Abyssinian_{i} 1 1 1\n" for i in range(1, 5))
        (base / "annotations" / "trainval.txt").write_text(lines)
        return {"path": str(folder), "size": 16}

    def __len__(self) -> int:
        return len(self._files)

    def clean(self, ids: Sequence[int]) -> Tensor:
        return self._files.read(ids)

    def label(self, id: int) -> str:
        return self._files.label(id).removesuffix(".jpg")

    def group(self, id: int) -> str:
        return f"oxford-pets {self.label(id)}"


def _listed(root: Path, split: str, download: bool) -> list[str]:
    """The files of a split in torchvision's order, downloaded on request."""
    reader = torchvision_datasets("oxford-pets").OxfordIIITPet
    folder = root / BASE
    if download:
        for url, md5 in reader._RESOURCES:
            member = url.rpartition("/")[2].partition(".")[0]
            if not (folder / member).is_dir():
                fetch(url, md5, folder, [member], (folder / member).is_dir, root)
    if not all((folder / member).is_dir() for member in MEMBERS):
        raise MissingError(
            f"oxford-pets: there is no {folder} with {' and '.join(MEMBERS)}; set download: true to get it (0.8 GB), or"
            f" path to the folder that holds {BASE}"
        )
    try:
        return [path.name for path in reader(str(root), split=split)._images]
    except (OSError, ValueError) as error:
        file = folder / "annotations" / f"{split}.txt"
        raise ValueError(f"{file} cannot be read as torchvision's list of photographs: {error}") from error
