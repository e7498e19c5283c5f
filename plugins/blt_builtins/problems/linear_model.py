"""Linear models fitted to examples: the lower and the upper level that the problems of this folder share.

    h(x, θ) = Σ_k w_k(θ) ℓ(⟨a_k(θ), x⟩; b_k) + ½ Σ_j r_j(θ) x_j²
    g(x, θ) = Σ_k w_k ℓ(⟨a_k(θ), x⟩; b_k)                 over other examples

A problem says which of ridge r, weights w and features a depend on θ. x has the shape (p,), or (p, outputs) for several
classes. h is at least min_j r_j strongly convex, and its gradient is Lipschitz with

    L = ℓ''_max · λ_max(Σ_k w_k a_k a_kᵀ) + max_j r_j

Both levels are finite sums over blocks of examples.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from blt_builtins.problems.examples import Examples
from blt_builtins.problems.row_losses import RowLoss
from bltoolbox.plugin import Counter, Linearization, Lower, Theta, Upper, dot


def predict(features: Tensor, x: Tensor) -> Tensor:
    """⟨a_k, x⟩, (B, n, outputs)."""
    return features @ (x if x.ndim == 3 else x.unsqueeze(-1))


def collect_rows(features: Tensor, s: Tensor, like: Tensor) -> Tensor:
    """Σ_k a_k s_k, the adjoint of ``predict``, in the shape of ``like``."""
    return (features.mT @ s).reshape(like.shape)


@dataclass(frozen=True)
class LinearLower(Lower):
    """h of some tasks, with fixed features and weights; a subclass says what the ridge is."""

    ids: Tensor
    theta: Theta
    counter: Counter
    examples: Examples
    loss: RowLoss
    #: Number of classes that x has a column for; 0 where it is a vector.
    columns: int = 0

    bounded = True

    @property
    @abstractmethod
    def ridge(self) -> Tensor:
        """r, broadcastable to x, differentiable in θ."""

    @property
    def features(self) -> Tensor:
        """a_k, (B, n, p), differentiable in θ."""
        return self.examples.features

    @property
    def weights(self) -> Tensor:
        """w_k, (B, n), differentiable in θ and not negative."""
        return self.examples.weights

    @property
    def spectrum(self) -> Tensor:
        """Valid bounds (B, 2) of the eigenvalues of Σ_k w_k a_k a_kᵀ."""
        return self.examples.spectrum

    @cached_property
    def mu(self) -> Tensor:  # type: ignore[override]
        return self.loss.least * self.spectrum[:, 0] + self.ridge.detach().min()

    @cached_property
    def lipschitz(self) -> Tensor:
        return self.loss.most * self.spectrum[:, 1] + self.ridge.detach().max()

    @property
    def shape(self) -> tuple[int, ...]:
        p = self.features.shape[-1]
        return (p, self.columns) if self.columns else (p,)

    def start(self) -> Tensor:
        return self.examples.weights.new_zeros(len(self.examples), *self.shape)

    def energy(self, x: Tensor) -> Tensor:
        value = self.loss.value(predict(self.features, x), self.examples.targets)
        return (self.weights * value).sum(1) + 0.5 * dot(self.ridge * x, x)

    def gradient(self, x: Tensor) -> Tensor:
        self.counter.gradients += len(x)
        slope = self.weights.unsqueeze(-1) * self._slope(x)
        return collect_rows(self.features, slope, x) + self.ridge * x

    def _slope(self, x: Tensor) -> Tensor:
        return self.loss.slope(predict(self.features, x), self.examples.targets)

    def linearize(self, x: Tensor) -> Linearization:
        self.counter.linearisations += len(x)
        curvature = self.loss.curvature(predict(self.features, x), self.examples.targets)
        product = _Hessian(self.loss, self.features, self.weights.unsqueeze(-1), curvature, self.ridge)
        return Linearization(self, x, product)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        with torch.enable_grad():
            at = self.at_theta(theta)
            slope = at._slope(x)
            rows = at.weights * (slope * predict(at.features, q)).sum(-1)
            return rows.sum(1) + dot(at.ridge * x, q)

    def take(self, index: Tensor) -> Self:
        return replace(self, ids=self.ids[index], examples=self.examples.take(index))

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.examples.blocks

    def block(self, j: Tensor) -> Self:
        return replace(self, examples=self.examples.block(j))


@dataclass(frozen=True)
class _Hessian:
    """v ↦ Σ_k w_k a_k ℓ''_k ⟨a_k, v⟩ + r ⊙ v."""

    loss: RowLoss
    features: Tensor
    weights: Tensor
    curvature: Tensor
    ridge: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        rows = self.loss.product(self.curvature, predict(self.features, v))
        return collect_rows(self.features, self.weights * rows, v) + self.ridge * v

    def take(self, index: Tensor) -> _Hessian:
        features, weights, curvature = self.features[index], self.weights[index], self.curvature[index]
        return _Hessian(self.loss, features, weights, curvature, self.ridge)


@dataclass(frozen=True)
class LinearUpper(Upper):
    """g of some tasks: the mean loss on their own examples, summed in float64."""

    examples: Examples
    loss: RowLoss

    convex = True
    infimum = 0.0

    @property
    def features(self) -> Tensor:
        """a_k, (B, n, p)."""
        return self.examples.features

    @property
    def spectrum(self) -> Tensor:
        """Valid bounds (B, 2) of the eigenvalues of Σ_k w_k a_k a_kᵀ."""
        return self.examples.spectrum

    @cached_property
    def lipschitz(self) -> Tensor:  # type: ignore[override]
        return self.loss.most * self.spectrum[:, 1]

    def value(self, x: Tensor) -> Tensor:
        value = self.loss.value(predict(self.features, x), self.examples.targets)
        return (self.examples.weights * value).double().sum(1)

    def gradient(self, x: Tensor) -> Tensor:
        slope = self.loss.slope(predict(self.features, x), self.examples.targets)
        return collect_rows(self.features, self.examples.weights.unsqueeze(-1) * slope, x)

    def take(self, index: Tensor) -> Self:
        return replace(self, examples=self.examples.take(index))

    @property
    def blocks(self) -> int:  # type: ignore[override]
        return self.examples.blocks

    def block(self, j: Tensor) -> Self:
        return replace(self, examples=self.examples.block(j))
