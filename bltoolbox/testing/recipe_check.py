"""Test the hypergradient of a recipe, and locate the source of an error.

    ⟨z, d⟩  against  (f(θ + td) − f(θ − td)) / 2t,        f(θ) = 1/n Σ g_i(x̂_i(θ), θ) + P(θ)  over n samples

Everything is as in the recipe (operator, noise, regularizer, constraint, solver, estimator, initial θ), only in
float64 and with tight tolerances. x̂(θ ± td) comes from a reference solver that uses only energies, so f is right even
if a component's own derivatives are not. The directions d are one in each block of parameters and random ones over all
blocks, projected onto the linear constraints.

Each link of z = −∂_θ⟨∇h(x̃, θ), q⟩ + ∂_θg + ∇P, ∇²h q = ∇g, is then tested separately:

* lower level: ∇h against differences of h; the residual of x̃; its distance from the reference solution;
* linear system: ∇²h v against differences of ∇h; the residual ‖∇g − ∇²h q‖ recomputed;
* mixed derivative: ∂_θ⟨∇h, q⟩ against differences in θ at fixed x and q;
* loss: ∂_θg against differences in θ at fixed x, where the loss depends on θ;
* penalty: ∇P against differences of P, where there is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.penalty import penalty_at, penalty_gradient
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.testing.bias import Bias, follow_bias
from bltoolbox.testing.checks.base import normal
from bltoolbox.testing.links import (
    Link,
    hypergradient_links,
    inner,
    loss_link,
    penalty_link,
    solvable,
    theta_size,
)
from bltoolbox.testing.reference import reference_solve
from bltoolbox.training.assemble import assemble

#: Tolerance of the lower level (a gradient norm) and of the adjoint system.
TIGHT = 1e-9
#: Tolerance of the reference, whose errors a difference quotient divides by its step.
REFERENCE = 1e-12
#: The residual that it must reach for differences to be meaningful.
SOLVED = 1e-8
#: Steps in θ; the one with the smaller error counts.
STEPS = (1e-3, 1e-4)
#: Accepted relative error of ⟨z, d⟩.
ACCEPTED = 1e-3
SAMPLES = 2
RANDOM = 2


@dataclass(frozen=True)
class Row:
    """One direction: the derivative by z and by differences."""

    direction: str
    hypergradient: float
    differences: float
    #: Their difference, relative to the larger one (or to 1 % of ‖z‖ if both are small).
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= ACCEPTED


@dataclass(frozen=True)
class RecipeCheck:
    """The comparison, the links, and a sentence about them."""

    recipe: str
    samples: int
    rows: tuple[Row, ...]
    links: tuple[Link, ...]
    verdict: str
    passed: bool
    #: Whether z was compared with the truth, if only in the limit that a biased hypergradient declares.
    verified: bool = True
    #: Where the error comes from: ``lower level``, ``linear system``, ``mixed derivative``, ``loss``, ``penalty``,
    #: ``estimator`` or None.
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Bench:
    """Some samples of a recipe."""

    oracle: BilevelOracle
    theta: dict[str, Tensor]
    ids: Sequence[int]
    weights: Tensor

    def at(self, theta: Theta | None = None) -> tuple[Lower, Upper]:
        """The lower level and the loss of the samples."""
        return self.oracle.tasks.at(self.theta if theta is None else theta, Counter()).on(self.ids)

    def value(self, theta: Theta, start: Tensor) -> float:
        """f by the reference solver."""
        lower, upper = self.at(theta)
        mean = float(self.weights @ upper.value(reference_solve(lower, start, REFERENCE)))
        return mean + (penalty_at(self.oracle.problem, theta) or 0.0)


def check_recipe(recipe: Recipe, registry: Registry, samples: int = SAMPLES) -> RecipeCheck:
    """Compare z with central differences of f on the first samples of a recipe, and find the cause of an error."""
    bench = _assemble(recipe, registry, samples)
    lower, upper = bench.at()
    reference = reference_solve(lower, lower.start(), REFERENCE)
    if not (unsolved := solvable(lower, reference, SOLVED)).ok:
        return _conclude(recipe, len(bench.ids), (), (unsolved,), biased=False)
    links, z, ask = hypergradient_links(bench.oracle, lower, upper, reference, bench.weights, TIGHT)
    others = (
        loss_link(lambda theta: bench.at(theta)[1], bench.theta, reference, bench.weights),
        penalty_link(bench.oracle.problem, bench.theta),
    )
    links += tuple(link for link in others if link is not None)
    _, direct = penalty_gradient(bench.oracle.problem, bench.theta)
    z = {name: entry + direct[name] if direct else entry for name, entry in z.items()}
    z = bench.oracle.problem.project_gradient(z)
    rows = tuple(_compare(bench, z, name, d, reference) for name, d in _directions(bench, z))
    biased = not bench.oracle.hypergradient.exact
    check = _conclude(recipe, len(bench.ids), rows, links, biased)
    if check.source is not None or all(row.ok for row in rows):
        return check
    return _with_bias(check, recipe.hypergradient.name, follow_bias(recipe.hypergradient, registry, ask))


def _assemble(recipe: Recipe, registry: Registry, samples: int) -> _Bench:
    """The components of the recipe, in float64 on the CPU, without evaluation and baseline."""
    settings = dataclasses.replace(recipe, dtype="float64", device="cpu", evaluation=None, baseline=None)
    experiment = assemble(settings, registry)
    oracle = experiment.oracle
    ids = range(min(samples, len(oracle.tasks)))
    weights = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
    return _Bench(oracle, dict(experiment.theta), ids, weights)


def _directions(bench: _Bench, z: Theta) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Unit vectors: in each block separately, then over all of them."""
    blocks = [(name, {name}) for name in bench.theta] if len(bench.theta) > 1 else []
    everything = [(f"random {k + 1}", set(bench.theta)) for k in range(RANDOM)]
    for seed, (label, names) in enumerate([*blocks, *everything]):
        raw = {
            name: normal(*value.shape, seed=seed) / max(value.numel(), 1) ** 0.5
            if name in names
            else torch.zeros_like(value)
            for name, value in bench.theta.items()
        }
        free = bench.oracle.problem.project_gradient(raw)
        length = theta_size(free)
        if length > 1e-9:
            yield label, {name: entry / length for name, entry in free.items()}


def _compare(bench: _Bench, z: Theta, name: str, direction: Theta, start: Tensor) -> Row:
    claimed, floor = inner(z, direction), 0.01 * theta_size(z)
    best = Row(name, claimed, float("nan"), float("inf"))
    for step in STEPS:
        ends = [
            bench.value({key: value + t * direction[key] for key, value in bench.theta.items()}, start)
            for t in (step, -step)
        ]
        quotient = (ends[0] - ends[1]) / (2 * step)
        error = abs(quotient - claimed) / max(abs(quotient), abs(claimed), floor, 1e-300)
        if error < best.error or best.differences != best.differences:
            best = Row(name, claimed, quotient, error)
        if best.ok:
            break
    return best


def _conclude(
    recipe: Recipe, samples: int, rows: tuple[Row, ...], links: tuple[Link, ...], biased: bool
) -> RecipeCheck:
    wrong, broken = [row for row in rows if not row.ok], [link for link in links if not link.ok]
    worst = max((row.error for row in rows), default=0.0)
    passed, source = not wrong, None
    if not wrong and not broken:
        verdict = f"the hypergradient agrees with central differences (largest relative error {worst:.1e})"
    elif broken and not (biased and all(link.place == "linear system" for link in broken)):
        passed, source = False, broken[0].place
        agrees = "" if wrong or not rows else " (too small to affect z here)"
        verdict = f"the error comes from the {source}{agrees}: {broken[0].sentence}"
    elif biased:
        passed = True
        verdict = f"{recipe.hypergradient.name} is biased by design, here by up to {100 * worst:.2g} %"
    else:
        passed, source = False, "estimator"
        verdict = (
            f"z is wrong by up to {100 * worst:.2g} %, although the lower level, the linear system and the mixed"
            f" derivative are right: hypergradient {recipe.hypergradient.name!r} combines them wrongly"
        )
    return RecipeCheck(recipe.name, samples, rows, links, verdict, passed, source=source)


def _with_bias(check: RecipeCheck, name: str, bias: Bias) -> RecipeCheck:
    """The conclusion about a biased hypergradient whose ingredients are right."""
    if bias.vanishes is False:
        verdict = (
            f"{check.verdict}, and {bias.sentence}: hypergradient {name!r} combines right ingredients wrongly"
        )
        return dataclasses.replace(check, verdict=verdict, passed=False, source="estimator")
    if bias.vanishes is None:
        return dataclasses.replace(
            check, verdict=f"not verified: {check.verdict}, and {bias.sentence}", verified=False
        )
    return dataclasses.replace(
        check, verdict=f"{check.verdict}; in the limit that it declares {bias.sentence}"
    )
