"""Linear models whose ridge is learned by cross-validation: what regression and classification share.

    h_i(x, θ) = 1/n_i Σ_{k ∉ fold i} ℓ(⟨a_k, x⟩; b_k) + ½ Σ_j e^{θ_j} ‖x_j‖²        g_i(x) = mean of ℓ over fold i

A task is a fold. Validation and test are one task each: the model fitted to all training rows, judged on the rows held
out for it. θ_j is one exponent for each feature, or one for all. x is (p,), or (p, classes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from blt_builtins.problems.examples import Examples, collect
from blt_builtins.problems.linear_model import LinearLower, LinearUpper
from blt_builtins.problems.linear_tasks import LinearTasks, Measure
from blt_builtins.problems.row_losses import RowLoss
from blt_builtins.problems.tables import Split, Table, folds_of
from bltoolbox.plugin import Counter, Problem, Theta


@dataclass(frozen=True)
class RidgeLower(LinearLower):
    """h with the ridge r = e^θ: one exponent for all features, or one for each."""

    @cached_property
    def ridge(self) -> Tensor:
        ridge = self.theta["log_weight"].exp()
        return ridge.unsqueeze(-1) if self.columns else ridge


class CrossValidated(Problem):
    """Folds of a table as tasks. A subclass says where the table comes from, and how predictions are judged."""

    loss: ClassVar[RowLoss]
    measures: ClassVar[Mapping[str, Measure]]
    #: The number of columns of x; 0 where it is a vector.
    columns: int = 0

    def __init__(
        self, table: Table, split: Split, folds: int, blocks: int, per_feature: bool, initial: float
    ) -> None:
        self.table, self.split = table, split
        self.folds, self.blocks = folds, blocks
        self.per_feature, self.initial = per_feature, initial
        self.tasks("training", table.features[:0])  # refuses folds and blocks that are too many

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = self.table.features.shape[1:] if self.per_feature else ()
        return {"log_weight": torch.full(shape, self.initial, dtype=torch.float64)}

    def tasks(self, split: str, like: Tensor) -> LinearTasks | None:
        rows, labels = self._rows(split)
        if not all(len(judged) for _, judged in rows):
            return None
        features, targets = self.table.features.to(like), self.table.targets.to(like)
        fitted, judged = (
            collect(features, targets, numbers, self.blocks) for numbers in zip(*rows, strict=True)
        )
        shape = tuple(features.shape[1:]) + ((self.columns,) if self.columns else ())
        return LinearTasks(fitted, judged, labels, self._lower, self._upper, self.measures, shape)

    def _rows(self, split: str) -> tuple[list[tuple[Tensor, Tensor]], tuple[str, ...]]:
        if split == "training":
            folds = folds_of(self.split.training, self.folds)
            return folds, tuple(f"fold {k + 1}" for k in range(len(folds)))
        held = self.split.validation if split == "validation" else self.split.test
        return [(self.split.training, held)], ("validation" if split == "validation" else "test",)

    def _lower(self, ids: Tensor, theta: Theta, counter: Counter, examples: Examples) -> RidgeLower:
        return RidgeLower(ids, theta, counter, examples, self.loss, self.columns)

    def _upper(self, theta: Theta, examples: Examples) -> LinearUpper:
        return LinearUpper(examples, self.loss)
