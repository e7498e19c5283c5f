"""Real photographs that come with scikit-image, for evaluation without a download.

Colour photographs in the public domain or under CC0: ``astronaut`` (NASA), ``coffee`` (Rachel Michetti),
``chelsea``, a cat (Stéfan van der Walt), ``rocket`` (SpaceX). Each is cropped around its centre to one size, so the
four form one batch. Prefer them to see what a regularizer does on photographs it has never seen; four images are too
few to train on or to compare with published tables.

Reference: S. van der Walt et al., *scikit-image: image processing in Python*, PeerJ 2:e453 (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Gt
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bltoolbox.plugin import Data, MissingError

Photo = Literal["astronaut", "coffee", "chelsea", "rocket"]


class Photos(Data):
    """Photographs of scikit-image, cropped around their centre.

    Args:
        names: The photographs, each named once.
        size: Side of the square crops, in pixels; at most 300, the height of the smallest photograph (chelsea).
    """

    def __init__(
        self,
        names: Sequence[Photo] = ("astronaut", "coffee", "chelsea", "rocket"),
        size: Annotated[int, Gt(0)] = 256,
    ) -> None:
        if not names:
            raise ValueError("names is empty; name at least one photograph, e.g. [astronaut, coffee]")
        if len(set(names)) < len(names):
            raise ValueError(f"a photograph is named twice in {list(names)}; name each one once")
        for name in names:
            with _open(name) as image:  # reads the header only
                width, height = image.size
            if size > min(height, width):
                raise ValueError(
                    f"size {size} is larger than {name} ({height}×{width});"
                    f" choose a size of at most {min(height, width)}"
                )
        self.names = tuple(names)
        self.size = size
        self._crops: dict[str, NDArray[np.uint8]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def clean(self, ids: Sequence[int]) -> Tensor:
        picked = torch.from_numpy(np.stack([self._crop(self.names[i]) for i in ids]))
        return picked.permute(0, 3, 1, 2).contiguous().float() / 255

    def label(self, id: int) -> str:
        return self.names[id]

    def group(self, id: int) -> str:
        return f"scikit-image {self.names[id]}"

    def _crop(self, name: str) -> NDArray[np.uint8]:
        if name not in self._crops:
            with _open(name) as file:
                image = np.asarray(file.convert("RGB"))
            top, left = ((side - self.size) // 2 for side in image.shape[:2])
            self._crops[name] = image[top : top + self.size, left : left + self.size].copy()
        return self._crops[name]


def _open(name: str) -> Image.Image:
    """The installed file; scikit-image's own loaders may access the network."""
    try:
        import skimage
    except ImportError as error:
        raise MissingError(
            "photos: scikit-image is not installed; install it with: pip install scikit-image"
        ) from error
    folder = Path(skimage.__file__).parent / "data"
    paths = sorted(path for path in folder.glob(f"{name}.*") if path.suffix in {".png", ".jpg"})
    if not paths:
        raise MissingError(
            f"photos: the installed scikit-image does not ship '{name}' in {folder};"
            " leave it out of names, or install another version of scikit-image"
        )
    return Image.open(paths[0])
