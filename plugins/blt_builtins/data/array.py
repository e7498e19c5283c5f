"""Images from one NumPy file.

An ``.npy`` array of shape N×H×W×3 (colour), N×H×W×1 or N×H×W (gray), either of unsigned integers (from 0 to the
maximum of the type) or of floats in [0, 1]. The file is memory-mapped: only the requested images are read, so it may be
larger than the memory. Prefer it for prepared crops of one size; for image files, use ``folder``.

Crops of one photograph look alike, so they should not be on both sides of a split. A CSV file beside the array, one
row per image, says in its column ``photograph`` (or ``photo``, ``group``, ``source``, ``image``) which images belong
together; with a column ``index``, its rows may be in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from numpy.typing import NDArray
from torch import Tensor

from blt_builtins.data.files import real_path
from blt_builtins.data.groups import read_groups
from blt_builtins.data.mapped import Mapped
from blt_builtins.data.ranges import check_ids, check_range
from bltoolbox.plugin import ARRAY_IMAGES, PIXELS, Data, map_array, read_array


class Array(Data):
    """Images of an ``.npy`` file, memory-mapped.

    Args:
        path: The file: N×H×W×3, N×H×W×1 or N×H×W, unsigned integers or floats in [0, 1].
        count: Number of images to use; by default all from ``offset`` on.
        offset: Index of the first image to use, e.g. to hold out the images before it.
        crop: Side of a square crop around the centre; by default the full image.
        groups: A CSV file that says which images are from the same photograph; ``auto`` uses the file with the name of
            the array, if it exists, and ``none`` treats each image as a photograph of its own.
        classes: An .npy file with the class of each image of the array, a whole number counted from 0; for components
            that learn something for each class.
    """

    def __init__(
        self,
        path: str,
        count: Annotated[int, Gt(0)] | None = None,
        offset: Annotated[int, Ge(0)] = 0,
        crop: Annotated[int, Gt(0)] | None = None,
        groups: str = "auto",
        classes: str | None = None,
    ) -> None:
        images = _open(path)
        total, height, width = images.shape[:3]
        check_range(f"{path} holds {total} images", total, offset, count)
        if crop is not None and crop > min(height, width):
            raise ValueError(
                f"crop {crop} is larger than the {height}×{width} images of {path}; "
                f"choose at most {min(height, width)}"
            )
        self.path = path
        self.count = total - offset if count is None else count
        self.offset = offset
        self.crop = crop
        file = Path(path).expanduser()
        self._images = Mapped(file, images)
        self._file = real_path(file)
        self._groups = read_groups(file, total, groups)
        self._classes = None if classes is None else _read_classes(classes, total)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        images = np.random.default_rng(0).integers(256, size=(5, 12, 14, 3), dtype=np.uint8)
        np.save(folder / "images.npy", images)
        return {"path": str(folder / "images.npy"), "crop": 10}

    def __len__(self) -> int:
        return self.count

    def clean(self, ids: Sequence[int]) -> Tensor:
        index = check_ids(ids, self.count)
        images = self._images.take(index + self.offset)
        if self.crop is not None:
            top, left = ((side - self.crop) // 2 for side in images.shape[1:3])
            images = images[:, top : top + self.crop, left : left + self.crop]
        if images.ndim == 3:
            images = images[..., None]
        return self._scaled(images).permute(0, 3, 1, 2).contiguous()

    def context(self, ids: Sequence[int]) -> dict[str, Tensor]:
        if self._classes is None:
            return {}
        return {"class": self._classes[torch.as_tensor(ids, dtype=torch.long) + self.offset]}

    def label(self, id: int) -> str:
        return f"#{self.offset + id}"

    def group(self, id: int) -> str:
        i = self.offset + id
        return f"file {self._file} #{i}" if self._groups is None else f"photograph {self._groups[i]}"

    def _scaled(self, images: NDArray[Any]) -> Tensor:
        if images.dtype.kind == "u":
            scale = np.float64(np.iinfo(images.dtype).max)
            return torch.from_numpy((images / scale).astype(np.float32))
        values = images.astype(np.float32)
        # `not (… <= …)` also catches NaN, for which every comparison is false.
        if not (values.min() >= 0 and values.max() <= 1):
            raise ValueError(
                f"{self.path} holds floats outside [0, 1] or NaN; divide by the peak value, or save uint8"
            )
        return torch.from_numpy(values)


def _read_classes(path: str, total: int) -> Tensor:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"there is no file {path} (looked in {Path.cwd()}); give the path of an .npy of classes"
        )
    classes = read_array(file, ARRAY_IMAGES)
    if classes.dtype.kind not in "ui" or classes.shape != (total,) or classes.min() < 0:
        raise ValueError(
            f"{path} holds {classes.dtype} of shape {'×'.join(map(str, classes.shape))};"
            f" classes are {total} whole numbers, one per image, counted from 0"
        )
    return torch.from_numpy(classes.astype(np.int64))


def _open(path: str) -> NDArray[Any]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {path} (looked in {Path.cwd()}); give the path of an .npy file")
    try:
        images = map_array(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise ValueError(
            f"{path} has shape {'×'.join(map(str, images.shape))}; N×H×W×3, N×H×W×1 or N×H×W is needed"
        )
    if 0 in images.shape:
        raise ValueError(f"{path} is empty (shape {'×'.join(map(str, images.shape))})")
    if images.dtype.kind not in "uf":
        raise ValueError(f"{path} holds {images.dtype}; unsigned integers or floats in [0, 1] are needed")
    ARRAY_IMAGES.check(path, images.shape[0])
    PIXELS.check(path, images.shape[1] * images.shape[2])
    return images
