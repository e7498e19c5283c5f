"""Logistic regression for two classes with a ridge learned by cross-validation.

    h_i(x, θ) = 1/n_i Σ_{k ∉ fold i} log(1 + e^{−b_k⟨a_k, x⟩}) + ½ Σ_j e^{θ_j} x_j²,        b_k = ±1

g_i is the mean of the same loss over fold i. ∇h_i is Lipschitz with λ_max(Σ a_k a_kᵀ/n_i)/4 + max_j e^{θ_j}, and h_i is
strongly convex with min_j e^{θ_j}.

When to choose it: two classes and many features, of which few matter. It is the problem on which most hyperparameter
methods are compared.

Reference: Bengio, *Gradient-based optimization of hyperparameters*, Neural Computation 2000.
Pedregosa, *Hyperparameter optimization with approximate gradient*, ICML 2016 (HOAG).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from blt_builtins.problems.cross_validation import CrossValidated
from blt_builtins.problems.linear_tasks import ACCURACY, sign_accuracy
from blt_builtins.problems.row_losses import Logistic
from blt_builtins.problems.tables import Files, Generated, Table, class_count, divide, draw, read

_DATA = Generated()


class LogisticRegression(CrossValidated):
    """Two classes, with learned ridges.

    Args:
        data: Generated examples, or files of your own with classes 0 and 1.
        folds: Number of parts of the training rows, each left out once.
        per_feature: Learn one ridge for each feature instead of one for all.
        initial: θ at the beginning, the logarithm of the ridge.
        validation: Share of the examples on which the best θ is chosen.
        test: Share of the examples for the final evaluation.
        blocks: Number of blocks of each sum over examples, for stochastic methods.
    """

    metrics: ClassVar = {"accuracy": ACCURACY}
    measures: ClassVar = {"accuracy": sign_accuracy}
    loss: ClassVar = Logistic()

    def __init__(
        self,
        data: Generated | Files = _DATA,
        folds: Annotated[int, Ge(2)] = 5,
        per_feature: bool = True,
        initial: float = -2.0,
        validation: Annotated[float, Ge(0), Lt(1)] = 0.15,
        test: Annotated[float, Ge(0), Lt(1)] = 0.6,
        blocks: Annotated[int, Gt(0)] = 1,
    ) -> None:
        table = draw(data, 1, _signs) if isinstance(data, Generated) else _two_classes(read(data))
        split = divide(table, validation, test, data.seed)
        super().__init__(table, split, folds, blocks, per_feature, initial)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        data = {"examples": 40, "features": 4, "relevant": 2, "noise": 0.5, "seed": 0}
        return {"data": data, "folds": 3, "blocks": 3}


def _signs(t: Tensor) -> Tensor:
    return torch.where(t.squeeze(1) > 0, 1.0, -1.0).double()


def _two_classes(table: Table) -> Table:
    """Classes 0 and 1 as −1 and 1."""
    if (count := class_count(table)) != 2:
        raise ValueError(f"the targets have {count} classes, not two; use softmax-regression")
    return Table(table.features, 2 * table.targets - 1)
