"""Images of other data, turned, mirrored and at other contrasts, which is more to learn from.

Measurements are simulated once for every image, so a regularizer with many parameters that sees an image again sees the
same noise again, and learns it. Each variant has noise of its own:

    x*_{k,i} = c_{k,i} S_k x*_i,        S_0, …, S_7 the symmetries of a square,  c = 1 or c in ``contrast``

For operators that act in the same way everywhere, a contrast of c is a noise level of σ/c: to restore c·x from
c·y is to restore x from y. So one regularizer learns a range of levels, which ``--noise`` and R_s(x) = s²R(x/s) ask of
it later, from noise of one level. Values of an image may then lie outside its range.

The images themselves are the last ones, in their order. Only they are held out, without the variants of their groups.

When to choose it: for `adaptive` and other regularizers of more parameters than a few thousand, and wherever
photographs are few. Not where directions matter, as with gravity or a scanner; then ``symmetries: false``.
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


class Variants(Data):
    """Images of another data component, and variants of them for training.

    Args:
        images: data with true images.
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
        if not symmetries and contrast is None:
            raise ValueError("there are no variants without symmetries and contrast; use the images directly")
        self.images = images
        self.contrast = contrast
        self.share = share
        self.seed = seed
        self.range = images.range
        rows, columns = images.clean([0]).shape[2:]
        self._ways = [0, 1, 4, 5] if rows != columns else list(range(8))
        if not symmetries:
            self._ways = [0, 0]

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"images": {"name": "dead-leaves", "count": 3, "size": 12}, "contrast": [0.5, 2.0]}

    def __len__(self) -> int:
        return len(self._ways) * len(self.images)

    def clean(self, ids: Sequence[int]) -> Tensor:
        originals = self.images.clean(self._originals(ids))
        return torch.stack([self._varied(i, image) for i, image in zip(ids, originals, strict=True)])

    def context(self, ids: Sequence[int]) -> Rows:
        return self.images.context(self._originals(ids))

    def label(self, id: int) -> str:
        label = self.images.label(id % len(self.images))
        return f"{label}, variant {self._variant(id)}" if self.derived(id) else label

    def group(self, id: int) -> str:
        image = id % len(self.images)
        return self.images.group(image) or f"variants of {self.images.label(image)}"

    def derived(self, id: int) -> bool:
        return self._variant(id) > 0

    def _originals(self, ids: Sequence[int]) -> list[int]:
        return [i % len(self.images) for i in ids]

    def _variant(self, id: int) -> int:
        """0 for the images themselves, which come last."""
        return len(self._ways) - 1 - id // len(self.images)

    def _varied(self, id: int, image: Tensor) -> Tensor:
        variant = self._variant(id)
        way = self._ways[variant]
        turned = image.flip(2) if way % 2 else image
        return self._factor(id, variant) * turned.rot90(way // 2, (1, 2))

    def _factor(self, id: int, variant: int) -> float:
        """1 or, for a share of the variants, log-uniform between the bounds."""
        if self.contrast is None or variant == 0:
            return 1.0
        chance, place = torch.rand(2, generator=keyed_generator("contrast", self.seed, id)).tolist()
        low, high = (math.log(bound) for bound in self.contrast)
        return math.exp(low + place * (high - low)) if chance < self.share else 1.0
