"""Images of other data, cut into tiles, turned, mirrored and at other contrasts, which is more to learn from.

Measurements are simulated once for every image, so a regularizer with many parameters that sees an image again sees the
same noise again, and learns it. Each variant has noise of its own:

    x*_{k,i} = c_{k,i} S_k T_i x*,      T_i a tile,  S_0, …, S_7 the symmetries of a square,  c = 1 or c in ``contrast``

For operators that act in the same way everywhere, a contrast of c is a noise level of σ/c: to restore c·x from
c·y is to restore x from y. So one regularizer learns a range of levels, which ``--noise`` and R_s(x) = s²R(x/s) ask of
it later, from noise of one level. Values of an image may then lie outside its range.

The images or tiles themselves are the last ones, in their order. Only they are held out, without the variants of their
groups.

When to choose it: for `adaptive` and other regularizers of more parameters than a few thousand, and wherever
photographs are few. Not where directions matter, as with gravity or a scanner; then ``symmetries: false``.

References: Timofte, Rothe & Van Gool, *Seven ways to improve example-based single image super resolution*, CVPR 2016;
Mohan, Kadkhodaie, Simoncelli & Fernandez-Granda, *Robust and interpretable blind image denoising via bias-free
convolutional neural networks*, ICLR 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from bltoolbox.plugin import Data, Rows, keyed_generator

#: Symmetries by number: twice the quarter turns, and 1 if it is mirrored first.
_TURNED_AND_MIRRORED, _MIRRORED, _AS_IT_IS = list(range(8)), [0, 1, 4, 5], [0]


class Variants(Data):
    """Images of another data component, and variants of them for training.

    Args:
        images: data with true images.
        tiles: side of the squares that images are cut into, without overlap; null is the whole image.
        symmetries: whether each image is also turned by quarters and mirrored: eight variants, or four if it is not
            square.
        contrast: the smallest and the largest factor that variants are multiplied by; [0.5, 5] turns a noise level of
            25/255 into those from 50/255 to 5/255. null is no other contrast.
        share: of the variants at another contrast.
        seed: seed of the contrasts.
    """

    def __init__(
        self,
        images: Data,
        tiles: Annotated[int, Gt(0)] | None = None,
        symmetries: bool = True,
        contrast: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]] | None = None,
        share: Annotated[float, Ge(0), Le(1)] = 0.5,
        seed: int = 0,
    ) -> None:
        maps = [name for name, rows in images.context([0]).items() if rows.ndim > 1]
        if maps or images.offers("measured"):
            what = maps[0] if maps else "recorded measurements"
            raise ValueError(
                f"images come with {what}, which would have to be turned along; use them directly"
            )
        if contrast is not None and not contrast[0] <= contrast[1] < math.inf:
            raise ValueError(f"contrast {list(contrast)} is not an interval")
        self.images = images
        self.contrast = contrast
        self.share = share
        self.seed = seed
        self.range = images.range
        height, width = images.clean([0]).shape[2:]
        if tiles is not None and tiles > min(height, width):
            raise ValueError(f"tiles of {tiles}×{tiles} do not fit into images of {height}×{width}")
        self._places = _places(height, width, tiles)
        square = tiles is not None or height == width
        self._ways = _TURNED_AND_MIRRORED if square else _MIRRORED
        if not symmetries:
            self._ways = _AS_IT_IS if contrast is None else 2 * _AS_IT_IS
        self._count = len(images) * len(self._places)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        images = {"name": "dead-leaves", "count": 3, "size": 16}
        return {"images": images, "tiles": 12, "contrast": [0.5, 2.0]}

    def __len__(self) -> int:
        return len(self._ways) * self._count

    def clean(self, ids: Sequence[int]) -> Tensor:
        images = self.images.clean(self._images(ids))
        return torch.stack([self._varied(i, image) for i, image in zip(ids, images, strict=True)])

    def context(self, ids: Sequence[int]) -> Rows:
        return self.images.context(self._images(ids))

    def label(self, id: int) -> str:
        label = self.images.label(self._image(id))
        if len(self._places) > 1:
            label = f"{label}, tile {id % len(self._places)}"
        return f"{label}, variant {self._variant(id)}" if self.derived(id) else label

    def group(self, id: int) -> str:
        image = self._image(id)
        return self.images.group(image) or f"variants of {self.images.label(image)}"

    def derived(self, id: int) -> bool:
        return self._variant(id) > 0

    def _variant(self, id: int) -> int:
        """0 for the images themselves, which come last."""
        return len(self._ways) - 1 - id // self._count

    def _image(self, id: int) -> int:
        return id % self._count // len(self._places)

    def _images(self, ids: Sequence[int]) -> list[int]:
        return [self._image(i) for i in ids]

    def _varied(self, id: int, image: Tensor) -> Tensor:
        rows, columns = self._places[id % len(self._places)]
        tile, variant = image[:, rows, columns], self._variant(id)
        way = self._ways[variant]
        turned = tile.flip(2) if way % 2 else tile
        return self._factor(id, variant) * turned.rot90(way // 2, (1, 2))

    def _factor(self, id: int, variant: int) -> float:
        """1 or, for a share of the variants, log-uniform between the bounds."""
        if self.contrast is None or variant == 0:
            return 1.0
        chance, place = torch.rand(2, generator=keyed_generator("contrast", self.seed, id)).tolist()
        low, high = (math.log(bound) for bound in self.contrast)
        return math.exp(low + place * (high - low)) if chance < self.share else 1.0


def _places(height: int, width: int, side: int | None) -> list[tuple[slice, slice]]:
    """Rows and columns of each tile, in the middle of the image."""
    if side is None:
        return [(slice(0, height), slice(0, width))]
    top, left = height % side // 2, width % side // 2
    return [
        (slice(row, row + side), slice(column, column + side))
        for row in range(top, height - side + 1, side)
        for column in range(left, width - side + 1, side)
    ]
