"""Inexact stochastic gradient descent on a small problem, with exact gradients beside it at every step.

    blt theory smoke data.size=16

A run is θ ← θ − αz from the initial θ: z from the oracle of the recipe, with its solver, its hypergradient and warm
starts, on uniformly random batches; every ∇f_i from ``exact_gradients``. ``theory`` makes both sides of the convergence
theorem out of such runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Theta
from bltoolbox.bilevel.tensors import keyed_generator, theta_norm
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.errors import BltError, UsageError
from bltoolbox.testing.bench import assemble_in_float64
from bltoolbox.testing.exact_gradients import ExactGradients, Gradients, flatten
from bltoolbox.testing.theory import Setting, Theory, Trajectory, default_settings, evaluate

#: What is still small enough for ∇f at every step.
MOST_UNKNOWNS, MOST_PARAMETERS = 5_000, 20_000
#: The first estimate of L is raised by this factor, since θ moves on from where it is measured.
_MARGIN = 2.0
_POWER_STEPS = 12


class Bench:
    """The first tasks of an oracle, a θ to start from, and the number of steps of every run."""

    def __init__(self, name: str, source: BilevelOracle, theta: Theta, tasks: int, steps: int) -> None:
        self.name, self.source, self.theta = name, source, dict(theta)
        self.total, self.steps = len(source.tasks), steps
        self.tasks = min(tasks, self.total)
        self._refuse_large()
        if source.hypergradient.handles_nonsmooth:
            raise UsageError(f"the lower level of {name} is not smooth, so the theorem does not apply")
        self.scales = self.source.on(self.batch(range(self.tasks))).scales(self.theta)

    def _refuse_large(self) -> None:
        unknowns = torch.Size(self.source.tasks.shape).numel()
        parameters = sum(value.numel() for value in self.theta.values())
        for noun, amount, most in (
            ("unknowns per task", unknowns, MOST_UNKNOWNS),
            ("parameters", parameters, MOST_PARAMETERS),
        ):
            if amount > most:
                raise UsageError(
                    f"{self.name} has {amount:,} {noun}, too many to compute ∇f at every step (at most {most:,}); use a"
                    " smaller problem, e.g. smaller images with data.size=16"
                )

    def batch(self, ids: Sequence[int]) -> Batch:
        """f_v is the mean over these tasks."""
        return Batch(list(ids), [self.total / len(ids)] * len(ids))

    def exact(self) -> ExactGradients:
        return ExactGradients(self.source, self.tasks, self.scales)

    def oracle(self) -> BilevelOracle:
        """Without warm starts."""
        source = self.source
        return BilevelOracle(
            source.problem,
            source.tasks,
            source.solver,
            source.hypergradient,
            chunk=source.chunk,
            iteration_limit=source.iteration_limit,
            estimates=source.estimates,
        )

    def moved(self, theta: Theta, direction: Theta, step: float) -> dict[str, Tensor]:
        """θ − αz, which a constraint must not change."""
        there = {name: value - step * direction[name] for name, value in theta.items()}
        projected = self.source.problem.project(there)
        change = theta_norm(projected[name] - value for name, value in there.items())
        if change > 1e-8 * max(1.0, theta_norm(there.values())):
            raise BltError("a constraint on θ changed a step; the theorem is for steps without one")
        return there

    def curvature(self) -> float:
        """‖∇²f(θ_0)‖, by power iteration on differences of exact gradients."""
        exact, theta = self.exact(), self.theta
        size = 1e-4 * max(1.0, theta_norm(theta.values()))
        direction: dict[str, Tensor] = _unflatten(exact.at(theta).mean, theta)
        norm = 0.0
        for _ in range(_POWER_STEPS):
            length = theta_norm(direction.values())
            if length == 0:
                break
            along = {name: value / length for name, value in direction.items()}
            above = exact.at(self.moved(theta, along, -size)).mean
            below = exact.at(self.moved(theta, along, size)).mean
            product = (above - below) / (2 * size)
            norm = max(norm, float(product.norm()))
            direction = _unflatten(product, theta)
        return norm

    def run(self, setting: Setting, step: float, seed: int) -> Trajectory:
        """θ_0, …, θ_T with batches drawn from the seed."""
        oracle, exact, theta = self.oracle(), self.exact(), self.theta
        generator = keyed_generator("theory", seed)
        here, seen, errors, lipschitz = exact.at(theta), list[Gradients](), list[float](), 0.0
        for t in range(self.steps):
            ids = torch.randperm(self.tasks, generator=generator)[: setting.batch].tolist()
            efforts = (Accuracy(setting.at(t) * size) for size in (self.scales.distance, self.scales.slope))
            z = oracle.on(self.batch(ids)).hypergradient(theta, *efforts).gradient
            errors.append(float((flatten(z, theta) - here.of(ids)).square().sum()))
            seen.append(here)
            theta = self.moved(theta, z, step)
            there = exact.at(theta)
            lipschitz = max(lipschitz, steepness(here, there, -step * flatten(z, theta)))
            here = there
        return Trajectory(
            tuple(float(point.mean.square().sum()) for point in seen),
            tuple(point.value for point in (*seen, here)),
            tuple(point.variance for point in seen),
            tuple(errors),
            lipschitz,
        )


def steepness(here: Gradients, there: Gradients, d: Tensor) -> float:
    """The smallest L that fits a step d: as a Lipschitz constant of ∇f, and in the descent lemma."""
    length = float(d.norm())
    if length == 0:
        return 0.0
    excess = there.value - here.value - float(here.mean @ d)
    return max(float((there.mean - here.mean).norm()) / length, 2 * excess / length**2)


def _unflatten(vector: Tensor, like: Theta) -> dict[str, Tensor]:
    pieces = vector.split([value.numel() for value in like.values()])
    return {
        name: piece.view_as(value).to(value)
        for (name, value), piece in zip(like.items(), pieces, strict=True)
    }


def bench_of(recipe: Recipe, registry: Registry, tasks: int, steps: int) -> Bench:
    """The first training tasks of a recipe and its initial θ."""
    experiment = assemble_in_float64(recipe, registry)
    return Bench(recipe.name, experiment.oracle, experiment.theta, tasks, steps)


def measure(bench: Bench, settings: Sequence[Setting] | None = None, runs: int = 3) -> Iterator[str | Theory]:
    """Sentences about the progress, and at last the result."""
    settings = default_settings(bench.tasks) if settings is None else settings
    rough = _MARGIN * bench.curvature()
    if rough == 0:
        raise BltError("f is flat at the initial θ, so there is nothing to measure")
    yield f"{bench.tasks} tasks; ‖∇²f‖ at the initial θ is {rough / _MARGIN:.3g}"
    results: list[tuple[Setting, float, list[Trajectory]]] = []
    for setting in settings:
        step = setting.step / (4 * rough)
        # With full batches nothing is random, so that one run is their mean.
        count = 1 if setting.batch >= bench.tasks else runs
        results.append((setting, step, [bench.run(setting, step, seed) for seed in range(count)]))
        yield f"{len(results)} of {len(settings)} settings"
    yield evaluate(bench.name, bench.tasks, bench.steps, results)
