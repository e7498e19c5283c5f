"""Least squares with a learned weight at every place.

    D(t; y) = ½ Σ_p e^{w_p} (t_p − y_p)²,        D' = e^w (t − y),   D'' = e^w
    P(w) = γ Σ |∇w|²                             differences of neighbouring entries of the map

w is a map of the rows and columns of the measurements, shared by all samples and channels. With `grid` it has that many
entries each way and is interpolated bilinearly, so that it is smooth and fits measurements of any size; without, it has
an entry for each pixel of the training images, and fits images of their size only. ‖D''‖ = max e^w, and D is min e^w
strongly convex in t.

For denoising e^{−w} is a map of regularization: where the weight is small, the regularizer decides. For other operators
the measurements do not lie on the pixels of the image; use `weighted`, which weights the regularizer at each pixel.

When to choose it: noise, or a defect of the operator, whose strength depends on the place in the same way in all
samples: vignetting, the corners of a detector, frequencies of a transform. With training images of few kinds leave the
regularizer its scale, and set `smoothness` where the map has many entries.

References: Dong, Hintermüller & Rincon-Camacho, *Automated regularization parameter selection in multi-scale total
variation models for image restoration*, JMIV 2011; Hintermüller & Rautenberg, *Optimal selection of the regularization
function in a weighted total variation model*, JMIV 2017; Kofler, Altekrüger, Ba et al., *Learning regularization
parameter-maps for variational image reconstruction*, SIAM J. Imaging Sci. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from blt_builtins.weight_maps import extremes, flat_map, roughness, weights_at
from bltoolbox.plugin import DataTerm, Theta, dot


class WeightMap(DataTerm):
    """Half the squared distance to the measurements, weighted by a learned map.

    Args:
        grid: rows and columns of the map, or null for one weight per pixel of the training images.
        smoothness: γ, the penalty on differences of neighbouring entries of the map.
    """

    quadratic: ClassVar[bool] = True
    rescales: ClassVar[bool] = True
    uniform = False
    caption = "Weight map"

    def __init__(
        self, grid: Annotated[int, Ge(2)] | None = 8, smoothness: Annotated[float, Ge(0)] = 0.0
    ) -> None:
        self.grid = grid
        self.smoothness = smoothness

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weights": flat_map(shape, self.grid)}

    def penalty(self, theta: Theta) -> Tensor | None:
        return self.smoothness * roughness(theta["log_weights"]) if self.smoothness else None

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - y
        return 0.5 * dot(misfit, self._weight(theta, y) * misfit)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self._weight(theta, y) * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self._weight(theta, y).expand(y.shape)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
        return extremes(theta["log_weights"])

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.curvature(theta, t, y)

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        weight = step * self._weight(theta, y)
        return (t + weight * y) / (1 + weight)

    def pictures(self, theta: Theta) -> Tensor:
        return theta["log_weights"].exp()[None, None]

    def _weight(self, theta: Theta, y: Tensor) -> Tensor:
        """e^w for each place, (H, W)."""
        return weights_at(theta["log_weights"], y.shape[-2:])
