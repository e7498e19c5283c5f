"""Losses of one prediction t against one target b, the same formulas for the lower and the upper level.

    squared    ℓ(t; b) = ½(t − b)²                        ℓ'' = 1
    logistic   ℓ(t; b) = log(1 + e^{−bt}),  b = ±1        0 ≤ ℓ'' ≤ ¼
    softmax    ℓ(t; b) = log Σ_c e^{t_c} − t_b            0 ≤ ∇²ℓ = diag(p) − ppᵀ ≤ ½,   p = softmax(t)

Predictions have the shape (B, n, outputs), targets (B, n): real numbers, ±1, or the numbers of classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F


class RowLoss(ABC):
    """ℓ(t; b), convex in t, with ``least`` ≤ ∇²ℓ ≤ ``most``."""

    least: ClassVar[float] = 0.0
    most: ClassVar[float]

    @abstractmethod
    def value(self, t: Tensor, targets: Tensor) -> Tensor:
        """ℓ of each row, (B, n)."""

    @abstractmethod
    def slope(self, t: Tensor, targets: Tensor) -> Tensor:
        """∇ℓ, (B, n, outputs)."""

    @abstractmethod
    def curvature(self, t: Tensor, targets: Tensor) -> Tensor:
        """What ``product`` needs to know of t, (B, n, outputs)."""

    def product(self, curvature: Tensor, s: Tensor) -> Tensor:
        """∇²ℓ s, (B, n, outputs)."""
        return curvature * s


class Squared(RowLoss):
    """Half the squared error."""

    least, most = 1.0, 1.0

    def value(self, t: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (t.squeeze(-1) - targets).square()

    def slope(self, t: Tensor, targets: Tensor) -> Tensor:
        return t - targets.unsqueeze(-1)

    def curvature(self, t: Tensor, targets: Tensor) -> Tensor:
        return torch.ones_like(t)

    def product(self, curvature: Tensor, s: Tensor) -> Tensor:
        return s


class Logistic(RowLoss):
    """The negative log-likelihood of a label ±1."""

    most = 0.25

    def value(self, t: Tensor, targets: Tensor) -> Tensor:
        return F.softplus(-targets * t.squeeze(-1))

    def slope(self, t: Tensor, targets: Tensor) -> Tensor:
        b = targets.unsqueeze(-1)
        return -b * torch.sigmoid(-b * t)

    def curvature(self, t: Tensor, targets: Tensor) -> Tensor:
        return torch.sigmoid(t) * torch.sigmoid(-t)


class Softmax(RowLoss):
    """The negative log-likelihood of a class."""

    most = 0.5

    def value(self, t: Tensor, targets: Tensor) -> Tensor:
        chosen = t.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
        return torch.logsumexp(t, -1) - chosen

    def slope(self, t: Tensor, targets: Tensor) -> Tensor:
        return torch.softmax(t, -1) - F.one_hot(targets.long(), t.shape[-1]).to(t)

    def curvature(self, t: Tensor, targets: Tensor) -> Tensor:
        return torch.softmax(t, -1)

    def product(self, curvature: Tensor, s: Tensor) -> Tensor:
        return curvature * (s - (curvature * s).sum(-1, keepdim=True))
