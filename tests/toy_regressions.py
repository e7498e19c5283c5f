"""Two small problems twice: as explicit loops over examples, and as a lower level and a loss of the toolbox.

    logistic regression     h = mean log(1 + e^{−b⟨a,x⟩}) + ½ Σ_p e^{θ_p} x_p²           one θ for each feature
    data cleaning           h = mean σ(θ_r) ℓ(xᵀa_r; b_r) + ½·0.2‖x‖², ℓ softmax         one θ for each example

g is the mean loss of held-out examples. Blocks are every n-th example. Of h there is nothing but an energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.roles import Problem

Array = np.ndarray[Any, Any]

#: Blocks of the lower level and of the loss.
N, M = 4, 2
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(16, 3))
LABELS = np.sign(TABLE @ np.array([1.0, -1.0, 0.5]) + 0.5 * RNG.normal(size=16))
CLASSES = RNG.integers(0, 3, size=16)
TRAIN, HELD = list(range(12)), list(range(12, 16))
STRENGTH = 0.2


class Reference:
    """One task; ``j`` and ``k`` are blocks, None for all examples."""

    x0: Array
    theta0: Array
    name: str

    def lower(self, j: int | None) -> list[int]:
        return TRAIN if j is None else TRAIN[j::N]

    def upper(self, k: int | None) -> list[int]:
        return HELD if k is None else HELD[k::M]

    def gradient(self, j: int | None, x: Array, theta: Array) -> Array: ...
    def product(self, j: int | None, x: Array, theta: Array, q: Array) -> Array: ...
    def mixed(self, j: int | None, x: Array, theta: Array, q: Array) -> Array: ...
    def theta_gradient(self, x: Array, theta: Array) -> Array: ...
    def slope(self, k: int | None, x: Array) -> Array: ...


class LogisticReference(Reference):
    x0, theta0, name = np.zeros(3), np.array([-1.0, 0.0, -0.5]), "log_weight"

    def _mean(self, rows: list[int], x: Array) -> Array:
        total = np.zeros(3)
        for r in rows:
            total += -LABELS[r] / (1 + np.exp(LABELS[r] * (TABLE[r] @ x))) * TABLE[r] / len(rows)
        return total

    def gradient(self, j: int | None, x: Array, theta: Array) -> Array:
        return self._mean(self.lower(j), x) + np.exp(theta) * x

    def product(self, j: int | None, x: Array, theta: Array, q: Array) -> Array:
        rows, total = self.lower(j), np.zeros(3)
        for r in rows:
            s = 1 / (1 + np.exp(-TABLE[r] @ x))
            total += s * (1 - s) * (TABLE[r] @ q) * TABLE[r] / len(rows)
        return total + np.exp(theta) * q

    def mixed(self, j: int | None, x: Array, theta: Array, q: Array) -> Array:
        return np.exp(theta) * x * q

    def theta_gradient(self, x: Array, theta: Array) -> Array:
        return 0.5 * np.exp(theta) * x**2

    def slope(self, k: int | None, x: Array) -> Array:
        return self._mean(self.upper(k), x)


class CleaningReference(Reference):
    x0, theta0, name = np.zeros((3, 3)), np.linspace(-1, 1, 16), "logits"

    def _error(self, r: int, x: Array) -> Array:
        p = np.exp(TABLE[r] @ x)
        p /= p.sum()
        p[CLASSES[r]] -= 1
        return p

    def gradient(self, j: int | None, x: Array, theta: Array) -> Array:
        rows, total = self.lower(j), STRENGTH * x
        for r in rows:
            total = total + np.outer(TABLE[r], self._error(r, x)) / (1 + np.exp(-theta[r])) / len(rows)
        return total

    def product(self, j: int | None, x: Array, theta: Array, q: Array) -> Array:
        rows, total = self.lower(j), STRENGTH * q
        for r in rows:
            p = np.exp(TABLE[r] @ x)
            p /= p.sum()
            t = TABLE[r] @ q
            total = total + np.outer(TABLE[r], p * t - p * (p @ t)) / (1 + np.exp(-theta[r])) / len(rows)
        return total

    def mixed(self, j: int | None, x: Array, theta: Array, q: Array) -> Array:
        rows, out = self.lower(j), np.zeros(16)
        for r in rows:
            s = 1 / (1 + np.exp(-theta[r]))
            out[r] = s * (1 - s) * (self._error(r, x) @ (TABLE[r] @ q)) / len(rows)
        return out

    def theta_gradient(self, x: Array, theta: Array) -> Array:
        out = np.zeros(16)
        for r in TRAIN:
            s, t = 1 / (1 + np.exp(-theta[r])), TABLE[r] @ x
            out[r] = s * (1 - s) * (np.log(np.exp(t).sum()) - t[CLASSES[r]]) / len(TRAIN)
        return out

    def slope(self, k: int | None, x: Array) -> Array:
        rows, total = self.upper(k), np.zeros((3, 3))
        for r in rows:
            total += np.outer(TABLE[r], self._error(r, x)) / len(rows)
        return total


REFERENCES: dict[str, type[Reference]] = {
    "logistic regression": LogisticReference,
    "data cleaning": CleaningReference,
}


def losses(x: Tensor, rows: Tensor, cleaning: bool) -> Tensor:
    """ℓ of the examples ``rows`` (B, n) at x."""
    features = torch.tensor(TABLE)[rows]
    if not cleaning:
        return F.softplus(-torch.tensor(LABELS)[rows] * (features @ x.unsqueeze(-1)).squeeze(-1))
    scores = features @ x
    return scores.logsumexp(-1) - scores.gather(-1, torch.tensor(CLASSES)[rows].unsqueeze(-1)).squeeze(-1)


def of_block(rows: Tensor, j: Tensor, blocks: int) -> Tensor:
    """Every ``blocks``-th of the examples, from the j-th on."""
    return torch.stack([row[int(start) :: blocks] for row, start in zip(rows, j, strict=True)])


@dataclass(frozen=True)
class ToyLower(Lower):
    ids: Tensor
    theta: Theta
    cleaning: bool
    rows: Tensor
    counter: Counter = field(default_factory=Counter)
    blocks: int = N

    bounded = True

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        least = STRENGTH if self.cleaning else float(self.theta["log_weight"].detach().exp().min())
        return torch.full((len(self.ids),), least, dtype=torch.float64)

    @property
    def lipschitz(self) -> Tensor:
        """By the norms of the examples; ℓ'' is at most 1/4, and 1/2 for the softmax."""
        norms = torch.tensor(TABLE).square().sum(1)[self.rows].mean(1)
        most = STRENGTH if self.cleaning else float(self.theta["log_weight"].detach().exp().max())
        return (0.5 if self.cleaning else 0.25) * norms + most

    def start(self) -> Tensor:
        shape = (3, 3) if self.cleaning else (3,)
        return torch.zeros(len(self.ids), *shape, dtype=torch.float64)

    def energy(self, x: Tensor) -> Tensor:
        loss = losses(x, self.rows, self.cleaning)
        if self.cleaning:
            loss = self.theta["logits"].sigmoid()[self.rows] * loss
            return loss.mean(1) + 0.5 * STRENGTH * x.square().flatten(1).sum(1)
        return loss.mean(1) + 0.5 * (self.theta["log_weight"].exp() * x.square()).sum(1)

    def take(self, index: Tensor) -> ToyLower:
        return replace(self, ids=self.ids[index], rows=self.rows[index])

    def block(self, j: Tensor) -> ToyLower:
        return replace(self, rows=of_block(self.rows, j, N), blocks=1)


@dataclass(frozen=True)
class ToyUpper(Upper):
    cleaning: bool
    rows: Tensor
    blocks: int = M

    lipschitz = 2.0

    def value(self, x: Tensor) -> Tensor:
        return losses(x, self.rows, self.cleaning).mean(1)

    def take(self, index: Tensor) -> ToyUpper:
        return replace(self, rows=self.rows[index])

    def block(self, j: Tensor) -> ToyUpper:
        return replace(self, rows=of_block(self.rows, j, M), blocks=1)


@dataclass(frozen=True)
class ToyTasks:
    """One task."""

    def prefetch(self, ids: Sequence[int]) -> None: ...

    cleaning: bool
    theta: Theta = field(default_factory=dict)
    counter: Counter = field(default_factory=Counter)
    dtype = torch.float64
    device = torch.device("cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        return (3, 3) if self.cleaning else (3,)

    def __len__(self) -> int:
        return 1

    def at(self, theta: Theta, counter: Counter) -> ToyTasks:
        return ToyTasks(self.cleaning, theta, counter)

    def on(self, ids: Sequence[int]) -> tuple[ToyLower, ToyUpper]:
        rows, held = (torch.tensor([part] * len(ids)) for part in (TRAIN, HELD))
        lower = ToyLower(torch.tensor(list(ids)), self.theta, self.cleaning, rows, self.counter)
        return lower, ToyUpper(self.cleaning, held)


class Bare(Problem):
    """A problem without penalty and constraints on θ."""

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {}

    def tasks(self, split: str) -> None:
        return None
