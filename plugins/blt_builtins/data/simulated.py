"""Measurements simulated by another operator than the one that reconstructs.

    y_i = noise(B x*_i),        while the lower level believes in y_i ≈ A x with the operator A of the recipe

A recipe simulates its measurements with its own operator, and so knows it exactly. Here the measurements come with the
data, as recorded ones do, and the operator of the recipe is what one believes about them. Each is simulated by itself,
in float64, from seed and id. Parameters of B keep their initial values. True images may be converted to gray first, as
`color: gray` in the recipe would do later.

When to choose it: to see what a wrong operator costs (another kernel, mask or geometry than assumed), to train a
regularizer that tolerates it, or to avoid that data and reconstruction share the same discretisation, known as an
inverse crime.

Reference: Kaipio & Somersalo, *Statistical inverse problems: discretization, model reduction and inverse crimes*,
J. Comput. Appl. Math. 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bltoolbox.plugin import Data, Noise, Operator, Rows, keyed_generator, to_gray


class Simulated(Data):
    """Images of another data component, measured by an operator of their own.

    Args:
        images: data with true images.
        operator: B, which measures.
        noise: of these measurements; none by default.
        seed: seed of the noise.
        color: whether images of three channels are converted to gray before they are measured.
    """

    def __init__(
        self,
        images: Data,
        operator: Operator,
        noise: Noise | None = None,
        seed: int = 0,
        color: Literal["rgb", "gray"] = "rgb",
    ) -> None:
        if not images.offers("clean"):
            raise ValueError("images need true images, which this data does not have; use it directly")
        if images.offers("measured"):
            raise ValueError(
                "the measurements of images were recorded, and are not simulated; use it directly"
            )
        self.images, self.operator, self.noise = images, operator, noise
        self.seed = seed
        self.color = color
        self.range = images.range
        first = self.clean([0])
        if (sentence := operator.check(first.shape[1:])) is not None:
            raise ValueError(f"operator: {sentence}")
        theta = operator.init_params(first.shape[1:], keyed_generator("theta", seed))
        self._theta = operator.prepare(theta)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        images = {"name": "dead-leaves", "count": 4, "size": 12}
        noise = {"name": "gaussian", "level": 0.1}
        return {"images": images, "operator": {"name": "blur", "size": 3}, "noise": noise}

    def __len__(self) -> int:
        return len(self.images)

    def clean(self, ids: Sequence[int]) -> Tensor:
        images = self.images.clean(ids)
        return to_gray(images) if self.color == "gray" else images

    def measured(self, ids: Sequence[int]) -> Tensor:
        truth, context = self.clean(ids).double(), self.context(ids)
        rows = [self._measure(i, truth[k : k + 1], context, k) for k, i in enumerate(ids)]
        return torch.cat(rows).float()

    def context(self, ids: Sequence[int]) -> Rows:
        return self.images.context(ids)

    def label(self, id: int) -> str:
        return self.images.label(id)

    def group(self, id: int) -> str | None:
        return self.images.group(id)

    def _measure(self, id: int, x: Tensor, context: Rows, row: int) -> Tensor:
        """y of one image, with its batch dimension."""
        own = {name: rows[row : row + 1] for name, rows in context.items()}
        own = {name: value.double() if value.is_floating_point() else value for name, value in own.items()}
        t = self.operator.apply(x, self._theta, own)
        if self.noise is None:
            return t
        y = self.noise.sample(t[0], keyed_generator("simulated", self.seed, id))[None]
        mask = self.operator.measured(t, own)
        return y if mask is None else torch.where(mask.expand_as(t) != 0, y, t)
