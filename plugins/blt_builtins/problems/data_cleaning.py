"""Data cleaning: a weight for each training example, learned from a few examples whose labels are right.

    h(x, θ) = 1/n Σ_k σ(θ_k) ℓ(⟨a_k, x⟩; b_k) + (r/2)‖x‖²,        g(x) = mean of ℓ over clean examples

ℓ is the loss of softmax regression, σ the logistic function, x has the shape (p, classes). There is one task. An
example with a wrong label pulls x away from where the clean examples would have it, so its weight falls.

When to choose it: many examples with doubtful labels and a few with reliable ones. To see the effect, ``corrupted``
replaces labels of the training rows.

References: Franceschi, Donini, Frasconi & Pontil, *Forward and reverse gradient-based hyperparameter optimization*,
ICML 2017; Shaban, Cheng, Hatch & Boots, *Truncated back-propagation for bilevel optimization*, AISTATS 2019.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from blt_builtins.problems.examples import Examples, collect
from blt_builtins.problems.linear_model import LinearLower, LinearUpper
from blt_builtins.problems.linear_tasks import ACCURACY, LinearTasks, class_accuracy
from blt_builtins.problems.row_losses import Softmax
from blt_builtins.problems.tables import Files, GeneratedClasses, Table, class_count, divide, draw, read
from bltoolbox.plugin import Counter, Problem, Theta, keyed_generator

_DATA = GeneratedClasses(examples=600, features=10, noise=0.3)


@dataclass(frozen=True)
class WeightedLower(LinearLower):
    """h where θ weighs the training rows, with a fixed ridge."""

    strength: float = 0.0

    @cached_property
    def ridge(self) -> Tensor:
        return self.examples.weights.new_tensor(self.strength)

    @cached_property
    def trust(self) -> Tensor:
        """σ(θ_k) of every row, (B, n)."""
        return torch.sigmoid(self.theta["logits"])[self.examples.rows]

    @cached_property
    def weights(self) -> Tensor:
        return self.examples.weights * self.trust

    @property
    def spectrum(self) -> Tensor:
        # A factor for each row, between the smallest and the largest of them.
        trust = self.trust.detach()
        return self.examples.spectrum * torch.stack([trust.amin(1), trust.amax(1)], 1)


class DataCleaning(Problem):
    """Weights of training examples.

    Args:
        data: Generated examples, or files of your own with classes 0, 1, ….
        corrupted: Share of the training labels that are replaced by others; 0 leaves them as they are.
        clean: Share of the examples whose labels are known to be right.
        validation: Share of the examples on which the best θ is chosen.
        test: Share of the examples for the final evaluation.
        ridge: r, the strength of the ridge.
        blocks: Number of blocks of each sum over examples, for stochastic methods.
    """

    metrics: ClassVar = {"accuracy": ACCURACY}
    loss: ClassVar = Softmax()

    def __init__(
        self,
        data: GeneratedClasses | Files = _DATA,
        corrupted: Annotated[float, Ge(0), Le(1)] = 0.4,
        clean: Annotated[float, Gt(0), Lt(1)] = 0.1,
        validation: Annotated[float, Ge(0), Lt(1)] = 0.1,
        test: Annotated[float, Ge(0), Lt(1)] = 0.4,
        ridge: Annotated[float, Gt(0)] = 0.01,
        blocks: Annotated[int, Gt(0)] = 1,
    ) -> None:
        if isinstance(data, GeneratedClasses):
            table = draw(data, data.classes, lambda t: t.argmax(1).double())
            self.classes = data.classes
        else:
            table = read(data)
            self.classes = class_count(table)
        parts = divide(table, clean + validation, test, data.seed)
        count = max(1, round(len(parts.validation) * clean / (clean + validation)))
        self.rows = {
            "training": parts.validation[:count],
            "validation": parts.validation[count:],
            "evaluation": parts.test,
        }
        self.fitted = parts.training
        self.table = table
        self.noisy = _with_wrong_labels(table, self.fitted, corrupted, self.classes, data.seed)
        self.ridge, self.blocks = ridge, blocks
        self.tasks("training", table.features[:0])  # refuses blocks that are too many

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"logits": torch.zeros(len(self.fitted), dtype=torch.float64)}

    def tasks(self, split: str, like: Tensor) -> LinearTasks | None:
        if not len(self.rows[split]):
            return None
        features, noisy, targets = (
            values.to(like) for values in (self.table.features, self.noisy.targets, self.table.targets)
        )
        # θ belongs to the training rows, so that these are numbered anew.
        numbers = [torch.arange(len(self.fitted))]
        fitted = collect(features[self.fitted], noisy[self.fitted], numbers, self.blocks)
        judged = collect(features, targets, [self.rows[split]], self.blocks)
        shape = (features.shape[1], self.classes)
        label = {"training": "clean", "evaluation": "test"}.get(split, split)
        return LinearTasks(
            fitted, judged, (label,), self._lower, self._upper, {"accuracy": class_accuracy}, shape
        )

    def _lower(self, ids: Tensor, theta: Theta, counter: Counter, examples: Examples) -> WeightedLower:
        return WeightedLower(ids, theta, counter, examples, self.loss, self.classes, self.ridge)

    def _upper(self, theta: Theta, examples: Examples) -> LinearUpper:
        return LinearUpper(examples, self.loss)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        data = {"examples": 40, "features": 3, "relevant": 2, "classes": 3, "noise": 0.5, "seed": 0}
        return {"data": data, "blocks": 2}


def _with_wrong_labels(table: Table, rows: Tensor, share: float, classes: int, seed: int) -> Table:
    """The table with a share of the labels of ``rows`` moved to another class."""
    generator = keyed_generator("wrong labels", seed)
    wrong = rows[torch.rand(len(rows), generator=generator) < share]
    shift = torch.randint(1, classes, (len(wrong),), generator=generator)
    targets = table.targets.clone()
    targets[wrong] = (targets[wrong] + shift) % classes
    return replace(table, targets=targets)
