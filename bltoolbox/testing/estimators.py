"""Hypergradient components side by side: the error of z against what it cost, at one θ of a recipe.

    error = ‖z − ∇f‖/‖∇f‖,        cost = gradients + Hessian products + derivatives in θ, per task

f is the mean over the first tasks of the recipe at its initial θ, in float64; ∇f comes from tight solves by the
recipe's own lower-level solver and conjugate gradients or, where h has no Hessian, from the recipe's own component at a
higher accuracy than any that is compared. Every point of a curve is computed from a cold start:

* at increasing accuracies of the lower level and of the linear system, relative to the distance that the lower level
  moves and to the size of the right-hand side, unless no tolerance makes the component exact;
* along the settings of its declared ``limit``, at the highest of these accuracies. A method that iterates from call
  to call is asked several times at the same θ, and its cost adds up.

For components that draw at random, error and cost are means over several repetitions, each from a cold start.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Cost, Counter, Scales, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.bilevel.tensors import detached, theta_norm
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import find_misfits
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.errors import BltError, NumericalError
from bltoolbox.testing.bench import assemble_in_float64

#: Accuracies relative to the scales of the problem.
LADDER = tuple(10 ** (-k / 2) for k in range(1, 11))
#: Relative errors whose cost is tabulated.
LEVELS = (0.1, 0.01, 0.001)
#: Relative accuracies of the reference; of first-order methods for lower levels that are not smooth, less can be asked.
_REFERENCE, _NONSMOOTH_REFERENCE = 1e-9, 1e-6
#: Repetitions over which the error of a random component is averaged.
_DRAWS = 8
#: Calls at the same θ, for methods that iterate on x themselves and whose limit does not say how many.
_CALLS = (5, 20, 80)


@dataclass(frozen=True)
class Point:
    """One setting of a component: the relative error of its z, the cost per task, and processor seconds in all."""

    setting: str
    error: float
    cost: float
    seconds: float


@dataclass(frozen=True)
class ErrorCurve:
    """The points of one component, or a sentence that says why there are none."""

    name: str
    points: tuple[Point, ...]
    note: str = ""

    def cost_to(self, level: float) -> float | None:
        """The lowest cost of a point with at most this error."""
        return min((point.cost for point in self.points if point.error <= level), default=None)

    @property
    def best(self) -> Point | None:
        """The point with the smallest error."""
        return min(self.points, key=lambda point: point.error, default=None)


@dataclass(frozen=True)
class EstimatorComparison:
    """All components on one recipe."""

    recipe: str
    tasks: int
    curves: tuple[ErrorCurve, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Rung:
    """One setting: further options, accuracies relative to the scales, calls at the same θ, draws to average over."""

    label: str
    options: Mapping[str, Any]
    accuracy: float
    calls: int = 1
    draws: int = 1


class _Bench:
    """Some tasks of a recipe at its initial θ, and the exact z there."""

    def __init__(self, recipe: Recipe, registry: Registry, tasks: int) -> None:
        experiment = assemble_in_float64(recipe, registry)
        self.recipe, self.registry, self.source = recipe, registry, experiment.oracle
        self.theta: Theta = dict(experiment.theta)
        total = len(self.source.tasks)
        count = min(tasks, total)
        self.batch = Batch(range(count), [total / count] * count)
        self.scales: Scales = self.source.on(self.batch).scales(self.theta)
        smooth = not self.source.hypergradient.handles_nonsmooth
        self.exact = self._exact() if smooth else self._own_limit()

    def oracle(self, estimator: HypergradientEstimator, seed: int) -> BilevelOracle:
        """With no warm starts; the seed is that of an estimator that draws."""
        source = self.source
        return BilevelOracle(
            source.problem,
            source.tasks,
            source.solver,
            estimator,
            chunk=source.chunk,
            iteration_limit=source.iteration_limit,
            seed=seed,
        )

    @detached()
    def _exact(self) -> dict[str, Tensor]:
        lower, upper = self.source.tasks.at(self.theta, Counter()).on(self.batch.ids)
        tol = _REFERENCE * self.scales.distance
        solution = self.source.minimise(lower, lower.start(), Accuracy(tol))
        rhs = upper.gradient(solution.x)
        tolerance = torch.full_like(lower.mu, _REFERENCE * self.scales.slope * upper.scale)
        method, system = ConjugateGradients("the reference"), lower.linearize(solution.x)
        q, _, _ = solve_linear(method, system, rhs, torch.zeros_like(rhs), tolerance, 10_000)
        weights = torch.full_like(lower.mu, 1 / len(self.batch.ids))
        z = {name: -entry for name, entry in lower.mixed(solution.x, q, weights).items()}
        for name, entry in upper.theta_gradient(solution.x, weights).items():
            z[name] = z[name] + entry
        return self.source.problem.project_gradient(z)

    def _own_limit(self) -> dict[str, Tensor]:
        scales = (self.scales.distance, self.scales.slope)
        efforts = (Accuracy(_NONSMOOTH_REFERENCE * scale) for scale in scales)
        asked = self.oracle(self.source.hypergradient, 0).on(self.batch)
        return dict(asked.hypergradient(self.theta, *efforts).gradient)

    def measure(self, block: Block, rung: _Rung) -> Point:
        estimator = self.registry.build(Block(block.kind, block.name, {**block.options, **rung.options}))
        effort, adjoint = (
            Accuracy(rung.accuracy * scale) for scale in (self.scales.distance, self.scales.slope)
        )
        began, error, cost = time.process_time(), 0.0, 0.0
        for seed in range(rung.draws):
            oracle = self.oracle(estimator, seed)
            asked = oracle.on(self.batch)
            for _ in range(rung.calls):
                z = asked.hypergradient(self.theta, effort, adjoint).gradient
            error += self.error(z) / rung.draws
            cost += _cost(oracle.cost) / len(self.batch.ids) / rung.draws
        return Point(rung.label, error, cost, (time.process_time() - began) / rung.draws)

    def error(self, z: Theta) -> float:
        size = max(theta_norm(self.exact.values()), 1e-300)
        return theta_norm(z[name] - entry for name, entry in self.exact.items()) / size


def _cost(cost: Cost) -> float:
    """What the ledger counts as derivatives."""
    entries = ("gradients", "hessian_products", "mixed_products", "theta_gradients")
    return sum(getattr(cost, name, 0) for name in entries)


def compare_estimators(
    recipe: Recipe, registry: Registry, blocks: Sequence[Block] | None = None, tasks: int = 4
) -> Iterator[EstimatorComparison]:
    """The comparison after each component; all that are registered if no ``blocks`` are given."""
    if blocks is None:
        blocks = [
            Block("hypergradient", component.name) for component in registry.components("hypergradient")
        ]
    bench, curves = _Bench(recipe, registry, tasks), []
    for block in blocks:
        curves.append(_curve(bench, block))
        yield EstimatorComparison(recipe.name, len(bench.batch.ids), tuple(curves))


def _curve(bench: _Bench, block: Block) -> ErrorCurve:
    """All settings of one component, as far as they can be computed."""
    points: list[Point] = []
    misfits = find_misfits({**vars(bench.recipe), "hypergradient": block}, bench.registry)
    if misfits:
        return ErrorCurve(_label(block), (), misfits[0].message)
    try:
        cls = bench.registry.get("hypergradient", block.name).load()
        for rung in _rungs(cls, block):
            points.append(bench.measure(block, rung))
    except (NumericalError, BltError, NotImplementedError) as error:
        return ErrorCurve(_label(block), tuple(points), str(error))
    return ErrorCurve(_label(block), tuple(points))


def _label(block: Block) -> str:
    options = ", ".join(f"{name} {value}" for name, value in block.options.items())
    return f"{block.name} ({options})" if options else block.name


def _rungs(cls: type[HypergradientEstimator], block: Block) -> Iterator[_Rung]:
    draws, limit = _DRAWS if cls.stochastic else 1, cls.limit
    if limit is not None and (not (limit.options or limit.calls) or set(limit.options) & set(block.options)):
        limit = None  # it concerns the problem, or is fixed by the user
    if cls.exact or limit is None:
        for accuracy in LADDER:
            yield _Rung(f"accuracy {accuracy:.1g}", {}, accuracy, draws=draws)
    if limit is None:
        return
    for k in range(len(limit)):
        options = limit.options_at(k)
        calls = limit.calls[k] if limit.calls else _CALLS[min(k, len(_CALLS) - 1)] if cls.moves_x else 1
        phrases = [f"{name} {value}" for name, value in options.items()]
        phrases += [f"{calls} calls"] if calls > 1 else []
        yield _Rung(", ".join(phrases), options, LADDER[-1], calls, draws)
