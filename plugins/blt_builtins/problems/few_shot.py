"""Few-shot regression: many small tasks, and the features that they share.

    h_i(x, θ) = 1/n Σ_{k in support i} ½(⟨Wᵀa_k, x⟩ − b_k)² + ½ e^ρ ‖x‖²
    g_i(x, θ) = 1/m Σ_{k in query i} ½(⟨Wᵀa_k, x⟩ − b_k)²

θ = (W, ρ): a linear representation W of shape (p, width), and the ridge of the head x, which each task fits to its
few examples. g, too, depends on θ through W. Generated tasks have b = ⟨W*ᵀa, u_i⟩ + σ n with one W* for all tasks and
u_i ~ N(0, I): with fewer examples than features, a task can be learned only through what it shares with the others.
Solutions are unique up to a change of basis of W.

When to choose it: meta-learning; as a test of methods for a loss that depends on θ directly, and for mini-batches of
many tasks.

References: Bertinetto, Henriques, Torr & Vedaldi, *Meta-learning with differentiable closed-form solvers*, ICLR 2019;
Tripuraneni, Jin & Jordan, *Provable meta-learning of linear representations*, ICML 2021 (the generated tasks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_builtins.problems.examples import Examples, collect, spectrum
from blt_builtins.problems.linear_model import LinearLower, LinearUpper
from blt_builtins.problems.linear_tasks import MSE, R2, LinearTasks, mse, r2
from blt_builtins.problems.row_losses import Squared
from bltoolbox.plugin import Counter, Problem, Theta, gradients_of, keyed_generator


@dataclass(frozen=True)
class HeadLower(LinearLower):
    """h of a head on learned features."""

    @cached_property
    def features(self) -> Tensor:
        return self.examples.features @ self.theta["representation"]

    @cached_property
    def ridge(self) -> Tensor:
        return self.theta["log_weight"].exp()

    @cached_property
    def spectrum(self) -> Tensor:
        return spectrum(self.features, self.weights)


@dataclass(frozen=True)
class HeadUpper(LinearUpper):
    """g of a head on learned features."""

    theta: Theta

    @cached_property
    def features(self) -> Tensor:
        return self.examples.features @ self.theta["representation"]

    @cached_property
    def spectrum(self) -> Tensor:
        return spectrum(self.features, self.examples.weights)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in self.theta.items()}
        with torch.enable_grad():
            total = (weights * replace(self, theta=leaves).value(x.detach())).sum()
        return gradients_of(total, leaves)


class FewShot(Problem):
    """Small regressions with a shared representation.

    Args:
        tasks: Number of tasks to train on.
        validation_tasks: Number of tasks on which the best θ is chosen.
        test_tasks: Number of tasks for the final evaluation.
        features: Number of features p.
        width: Number of learned features; also of those that generated tasks have in common.
        support: Number of examples that a head is fitted to.
        query: Number of examples that it is judged on.
        noise: σ, the size of errors.
        blocks: Number of blocks of each sum over examples, for stochastic methods.
        seed: Seed of the tasks.
    """

    metrics: ClassVar = {"mse": MSE, "r2": R2}
    loss: ClassVar = Squared()

    def __init__(
        self,
        tasks: Annotated[int, Gt(0)] = 100,
        validation_tasks: Annotated[int, Ge(0)] = 50,
        test_tasks: Annotated[int, Ge(0)] = 200,
        features: Annotated[int, Gt(0)] = 20,
        width: Annotated[int, Gt(0)] = 3,
        support: Annotated[int, Gt(0)] = 8,
        query: Annotated[int, Gt(0)] = 16,
        noise: Annotated[float, Ge(0)] = 0.1,
        blocks: Annotated[int, Gt(0)] = 1,
        seed: Annotated[int, Ge(0)] = 0,
    ) -> None:
        if width > features:
            raise ValueError(f"width is {width}, but there are only {features} features")
        if blocks > min(support, query):
            raise ValueError(
                f"blocks is {blocks}, but support or query of a task have only {min(support, query)} examples"
            )
        self.counts = {"training": tasks, "validation": validation_tasks, "evaluation": test_tasks}
        self.features, self.width = features, width
        self.support, self.query = support, query
        self.noise, self.blocks, self.seed = noise, blocks, seed

    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        start = torch.randn(self.features, self.width, dtype=torch.float64, generator=generator)
        return {
            "representation": start / self.features**0.5,
            "log_weight": torch.tensor(-2.0, dtype=torch.float64),
        }

    def tasks(self, split: str, like: Tensor) -> LinearTasks | None:
        if not (count := self.counts[split]):
            return None
        drawn = [self._draw(split, number) for number in range(count)]
        features, targets = (torch.cat(values).to(like) for values in zip(*drawn, strict=True))
        size = self.support + self.query
        rows = torch.arange(count * size).reshape(count, size)
        fitted, judged = (
            collect(features, targets, list(values), self.blocks)
            for values in (rows[:, : self.support], rows[:, self.support :])
        )
        labels = tuple(f"task {number + 1}" for number in range(count))
        measures = {"mse": mse, "r2": r2}
        return LinearTasks(fitted, judged, labels, self._lower, self._upper, measures, (self.width,))

    def _draw(self, split: str, number: int) -> tuple[Tensor, Tensor]:
        """The examples of one task, which do not depend on the other tasks."""
        generator = keyed_generator("few-shot", self.seed, split, number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        rows, head = self.support + self.query, normal(self.width)
        features = normal(rows, self.features)
        return features, features @ self.truth @ head + self.noise * normal(rows)

    @property
    def truth(self) -> Tensor:
        """W*, with orthonormal columns."""
        generator = keyed_generator("few-shot", self.seed, "representation")
        start = torch.randn(self.features, self.width, dtype=torch.float64, generator=generator)
        return torch.linalg.qr(start).Q

    def _lower(self, ids: Tensor, theta: Theta, counter: Counter, examples: Examples) -> HeadLower:
        return HeadLower(ids, theta, counter, examples, self.loss)

    def _upper(self, theta: Theta, examples: Examples) -> HeadUpper:
        return HeadUpper(examples, self.loss, theta)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        counts = {"tasks": 4, "validation_tasks": 2, "test_tasks": 2, "support": 4, "query": 6, "blocks": 2}
        return counts | {"features": 5, "width": 2}
