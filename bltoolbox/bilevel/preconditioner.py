"""Preconditioners: an easily inverted P ≈ ∇²h for each task, for linear systems and for search directions.

A lower level offers one through ``Linearization.preconditioner`` (at the Hessian of an x) and through
``Composite.preconditioner`` (at majorising parabolas). Any symmetric positive definite P is right: methods stop by the
true residual, so P decides how fast they are, not what they return. Whether P is worth its cost is decided for each
task by itself, since nothing may depend on which tasks share a batch; for the others P = I.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

#: When a method uses a preconditioner: where it is likely to be faster (`auto`), never, or wherever it exists.
Preconditioning = Literal["auto", "none", "spectral"]


@dataclass(frozen=True)
class Preconditioner(ABC):
    """P of each task. The tensors of the record have one row per task, so that it can be part of a state."""

    @abstractmethod
    def apply(self, r: Tensor) -> Tensor:
        """P⁻¹ r, symmetric positive definite for each task."""

    @abstractmethod
    def renewed(self, newer: Any) -> Any:
        """``newer``, a preconditioner for the same tasks, where P is used; P = I stays as it is."""


def unavailable(caller: str) -> str:
    """The message for a preconditioner that was asked for where there is none."""
    return (
        f"{caller} is set to preconditioner: spectral, but this lower level has none, since its operator or its"
        " regularizer has no symbol, or x is constrained; set preconditioner: auto"
    )
