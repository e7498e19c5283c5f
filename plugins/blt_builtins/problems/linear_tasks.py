"""Tasks whose lower level is a linear model fitted to some examples and judged on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blt_builtins.problems.examples import Examples
from blt_builtins.problems.linear_model import LinearLower, LinearUpper, predict
from bltoolbox.plugin import BoundTasks, Counter, Metric, Tasks, Theta, digest_of

#: The lower level of the tasks ``ids`` from θ, a counter and their examples, and the loss from θ and theirs.
MakeLower = Callable[[Tensor, Theta, Counter, Examples], LinearLower]
MakeUpper = Callable[[Theta, Examples], LinearUpper]
#: A metric of each task from predictions (B, n, outputs) and the examples that they are for.
Measure = Callable[[Tensor, Examples], Tensor]


@dataclass(frozen=True)
class LinearTasks(Tasks):
    """Tasks from the examples that they are fitted to and those that they are judged on."""

    fitted: Examples
    judged: Examples
    labels: tuple[str, ...]
    make_lower: MakeLower
    make_upper: MakeUpper
    measures: Mapping[str, Measure]
    #: Of the x of one task.
    x_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.fitted.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.fitted.weights.device

    def __len__(self) -> int:
        return len(self.fitted)

    def at(self, theta: Theta, counter: Counter) -> BoundLinearTasks:
        return BoundLinearTasks(self, theta, counter)

    def label(self, number: int) -> str:
        return self.labels[number]

    def digest(self) -> str:
        levels = (self.fitted, self.judged)
        return digest_of(
            values for level in levels for values in (level.features, level.targets, level.weights)
        )


@dataclass(frozen=True)
class BoundLinearTasks(BoundTasks):
    """The tasks at one θ."""

    tasks: LinearTasks
    theta: Theta
    counter: Counter

    def on(self, ids: Sequence[int]) -> tuple[LinearLower, LinearUpper]:
        index = torch.as_tensor(list(ids), device=self.tasks.device)
        fitted, judged = self.tasks.fitted.take(index), self.tasks.judged.take(index)
        lower = self.tasks.make_lower(index, self.theta, self.counter, fitted)
        return lower, self.tasks.make_upper(self.theta, judged)

    def measure(self, names: Sequence[str], ids: Sequence[int], x: Tensor) -> dict[str, list[float]]:
        _, upper = self.on(ids)
        t = predict(upper.features, x)
        return {name: self.tasks.measures[name](t, upper.examples).tolist() for name in names}


MSE = Metric("mse", "MSE", higher=False)
R2 = Metric("r2", "R²")
ACCURACY = Metric("accuracy", "Accuracy", "%", 2)


def mse(t: Tensor, examples: Examples) -> Tensor:
    """The mean squared error."""
    return _mean((t.squeeze(-1) - examples.targets).square(), examples)


def r2(t: Tensor, examples: Examples) -> Tensor:
    """The explained share of the variance."""
    centre = _mean(examples.targets, examples).unsqueeze(1)
    return 1 - mse(t, examples) / _mean((examples.targets - centre).square(), examples)


def sign_accuracy(t: Tensor, examples: Examples) -> Tensor:
    """Right signs in percent; a prediction of zero is a guess, right in half of the cases."""
    product = t.squeeze(-1) * examples.targets
    return 100 * _mean((product > 0).double() + 0.5 * (product == 0), examples)


def class_accuracy(t: Tensor, examples: Examples) -> Tensor:
    """Right classes in percent; among equal predictions each is a guess."""
    best = (t == t.amax(-1, keepdim=True)).double()
    chosen = best.gather(-1, examples.targets.long().unsqueeze(-1)).squeeze(-1)
    return 100 * _mean(chosen / best.sum(-1), examples)


def _mean(values: Tensor, examples: Examples) -> Tensor:
    return (examples.weights.double() * values.double()).sum(1)
