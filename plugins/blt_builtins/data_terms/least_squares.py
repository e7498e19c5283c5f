"""Least squares, plain or weighted.

    D(t; y) = ½ e^{θ_c} Σ_k w_k (t_k + b − y_k)²,        D' = e^{θ_c} w(t + b − y),   D'' = e^{θ_c} w

w is 1, or an array from an ``.npy`` file that broadcasts with the measurements of one sample: 0 for entries to ignore,
1/σ² for noise of varying strength. ‖D''‖ = e^θ max w, and D is (e^θ min w)-strongly convex in t. b is the
background of the measurements; unless it is 0, D does not scale with the image, and such a model cannot be carried to
another noise level.

θ = 0 unless `learned` is set. Then the balance of data term and regularizer is learned: one weight for all samples,
or one for each of several `classes` of images, e.g. from two scanners or doses, which share the regularizer. The data
give the class of each sample, 0 to classes − 1, as `class` in their context. If the regularizer has a scale of its own,
as `foe` does (with a weight for each filter, too), a single weight adds nothing; several do.

When to choose it: Gaussian noise, for which it is the negative log-likelihood, and whenever nothing better is known.
Use `huber` for outliers, `poisson` for photon counts and `weight-map` for noise whose level depends on the place.

Reference: Engl, Hanke & Neubauer, *Regularization of inverse problems*, 1996.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.operators.arrays import read_weights
from bltoolbox.plugin import Constant, DataTerm, Rows, Theta, dot


class LeastSquares(DataTerm):
    """Half the squared distance to the measurements.

    Args:
        weights: path of an .npy file of weights w ≥ 0, in the shape of the measurements of one sample or one that
            broadcasts with it; all 1 by default.
        learned: whether the weight e^θ of the whole term is learned, starting at 1.
        classes: number of learned weights, one for each class of images.
        background: b, what the measurement adds to A x everywhere, as `poisson` noise does; that of the noise.
    """

    quadratic: ClassVar[bool] = True
    rescales: ClassVar[bool] = True

    def __init__(
        self,
        weights: str | None = None,
        learned: bool = False,
        classes: Annotated[int, Gt(0)] = 1,
        background: float = 0.0,
    ) -> None:
        if classes > 1 and not learned:
            raise ValueError(f"weights of {classes} classes are learned; set learned: true")
        self.weights = None if weights is None else Constant(read_weights(weights))
        self.uniform = weights is None
        self.learned = learned
        self.classes = classes
        self.background = background
        self.rescales = background == 0  # type: ignore[misc]

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weights": torch.zeros(self.classes, dtype=torch.float64)} if self.learned else {}

    def select(self, theta: Theta, context: Rows) -> Theta:
        if self.classes == 1:
            return theta
        if "class" not in context:
            raise ValueError(
                f"there are weights for {self.classes} classes, but the data do not give the class of each sample;"
                " use data with classes, or set classes: 1"
            )
        number = context["class"]
        if bool((number < 0).any()) or bool((number >= self.classes).any()):
            raise ValueError(
                f"the data have classes from {int(number.min())} to {int(number.max())}, but there are weights for"
                f" {self.classes}, counted from 0"
            )
        return {**theta, "log_weight": theta["log_weights"][number]}

    def centre(self, theta: Theta, y: Tensor) -> Tensor:
        return y - self.background if self.background else y

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - self.centre(theta, y)
        weight = self._weight(theta, y)
        return 0.5 * dot(misfit, misfit if weight is None else weight * misfit)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        weight = self._weight(theta, y)
        misfit = t - self.centre(theta, y)
        return misfit if weight is None else weight * misfit

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        weight = self._weight(theta, y)
        return 1.0 if weight is None else weight.expand(y.shape)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Tensor | float, Tensor | float]:
        least, most = 1.0, 1.0
        if self.weights is not None:
            least, most = float(self.weights.value.min()), float(self.weights.value.max())
        if not self.learned:
            return least, most
        factor = self._factor(theta).detach()
        return least * factor, most * factor

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        return self.curvature(theta, t, y)

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        weight = self._weight(theta, y)
        step = step if weight is None else step * weight
        return (t + step * self.centre(theta, y)) / (1 + step)

    def _factor(self, theta: Theta) -> Tensor:
        """e^θ: one number, or one per sample."""
        return theta["log_weight"].exp() if "log_weight" in theta else theta["log_weights"].squeeze().exp()

    def _weight(self, theta: Theta, y: Tensor) -> Tensor | None:
        """The weight of each entry, to broadcast with y; None for 1."""
        fixed = None if self.weights is None else self.weights.like(y)
        if not self.learned:
            return fixed
        factor = self._factor(theta)
        factor = factor.view(-1, *(1,) * (y.ndim - 1)) if factor.ndim else factor
        return factor if fixed is None else factor * fixed
