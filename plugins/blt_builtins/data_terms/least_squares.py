"""Least squares, plain or weighted.

    D(t; y) = ½ Σ_k w_k (t_k − y_k)²,        D' = w(t − y),   D'' = w

w is 1, or an array from an ``.npy`` file that broadcasts with the measurements of one sample: 0 for entries to ignore,
1/σ² for noise of varying strength. ‖D''‖ = max w, and D is (min w)-strongly convex in t.

When to choose it: Gaussian noise, for which it is the negative log-likelihood, and whenever nothing better is known.
Use `huber` for outliers and `poisson` for photon counts.

Reference: Engl, Hanke & Neubauer, *Regularization of inverse problems*, 1996.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from blt_builtins.operators.arrays import read_weights
from bltoolbox.plugin import Constant, DataTerm, Theta, dot


class LeastSquares(DataTerm):
    """Half the squared distance to the measurements.

    Args:
        weights: path of an .npy file of weights w ≥ 0, in the shape of the measurements of one sample or one that
            broadcasts with it; all 1 by default.
    """

    quadratic: ClassVar[bool] = True
    rescales: ClassVar[bool] = True

    def __init__(self, weights: str | None = None) -> None:
        self.weights = None if weights is None else Constant(read_weights(weights))

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - y
        return 0.5 * dot(misfit, misfit if self.weights is None else self.weights.like(y) * misfit)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return t - y if self.weights is None else self.weights.like(y) * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        return 1.0 if self.weights is None else self.weights.like(y).expand(y.shape)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, float]:
        if self.weights is None:
            return 1.0, 1.0
        return float(self.weights.value.min()), float(self.weights.value.max())

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor | float:
        return self.curvature(theta, t, y)

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        step = step if self.weights is None else step * self.weights.like(y)
        return (t + step * y) / (1 + step)
