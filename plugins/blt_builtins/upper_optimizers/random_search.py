"""Random search: independent draws around the initial θ, of which the best is kept.

    θ_k = θ_0 + r u_k,   u_k uniform in [−1, 1]ⁿ,        θ ← θ_k  if f(θ_k) < f(θ)

It uses values of f alone, to a fixed accuracy. The lower levels of the draws count as computations, so that the same
recipe with the same `budget.computations` compares another method with it at equal cost.

When to choose it: as the reference that a hyperparameter method has to beat; it is hard to beat for one or two
parameters, and hopeless for many.

Reference: Bergstra & Bengio, *Random search for hyper-parameter optimization*, JMLR 2012.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt

from bltoolbox.plugin import Accuracy, Oracle, Step, Theta, UpperOptimizer, keyed_generator


class RandomSearch(UpperOptimizer):
    """The best of random draws.

    Args:
        radius: r, the largest distance of an entry of θ from its initial value.
        tol: accuracy of the lower level as a distance to the exact minimiser.
        seed: seed of the draws.
    """

    full_batch = True

    def __init__(
        self,
        radius: Annotated[float, Gt(0)] = 2.0,
        tol: Annotated[float, Gt(0)] = 0.1,
        seed: Annotated[int, Ge(0)] = 0,
    ) -> None:
        self.radius, self.tol, self.seed = radius, tol, seed

    def init(self, theta: Theta) -> dict[str, Any]:
        start = {f"start.{name}": value.clone() for name, value in theta.items()}
        return {"k": 0, "least": None, "penalty": None, **start}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        k, least, penalty = state["k"], state["least"], state["penalty"]
        if least is None:
            value = oracle.value(theta, Accuracy(self.tol))
            oracle.accept(value)
            least, penalty = value.value, value.penalty
        trial = self._draw(theta, oracle, state)
        value = oracle.value(trial, Accuracy(self.tol))
        better = value.value < least
        if better:
            oracle.accept(value)
            least, penalty = value.value, value.penalty
        after = dict(state) | {"k": k + 1, "least": least, "penalty": penalty}
        chosen = trial if better else dict(theta)
        metrics = {"tol": self.tol, "trial": value.value}
        return Step(chosen, after, least, metrics, penalty=penalty)

    def _draw(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        generator = keyed_generator("random search", self.seed, state["k"])
        trial = {}
        for name, value in theta.items():
            u = 2 * torch.rand(value.shape, dtype=torch.float64, generator=generator) - 1
            trial[name] = state[f"start.{name}"] + (self.radius * u).to(value)
        return oracle.project(trial)
