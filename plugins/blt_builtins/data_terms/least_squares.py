"""Least squares.

    D(t; y) = ½ Σ_k (t_k − y_k)²,        D' = t − y,   D'' = 1

When to choose it: Gaussian noise of one level, which makes it the negative log-likelihood; and wherever nothing better
is known. Outliers call for `huber`, photon counts for `poisson`.

Reference: Engl, Hanke & Neubauer, *Regularization of inverse problems*, 1996.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta, dot


class LeastSquares(DataTerm):
    """Half the squared distance to the measurements."""

    quadratic: ClassVar[bool] = True
    rescales: ClassVar[bool] = True

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - y
        return 0.5 * dot(misfit, misfit)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return t - y

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> float:
        return 1.0

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[float, float]:
        return 1.0, 1.0

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> float:
        return 1.0

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        return (t + step * y) / (1 + step)
