"""The parts of a reconstruction that a recipe names: components, and images with their measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bltoolbox.bilevel.device import DTYPES, pick_device
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.config.block import Block
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.errors import RecipeError, UsageError
from bltoolbox.restoration.data_loading import Samples, reading_threads
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.variational import Variational


def build(recipe: Recipe, key: str, registry: Registry) -> Any:
    """The component of one section of a recipe; what its constructor refuses is a problem of that section."""
    block = getattr(recipe, key)
    try:
        return registry.build(block)
    except ValueError as error:
        raise refusal(recipe, key, f"{block.name}: {error}") from error


def build_problem(recipe: Recipe, registry: Registry) -> Variational:
    """The components of a reconstruction, without samples."""
    return Variational(
        build(recipe, "operator", registry),
        build(recipe, "regularizer", registry),
        build(recipe, "data_term", registry),
        build(recipe, "upper_loss", registry),
        recipe.constraint,
        recipe.strong_convexity,
        None if recipe.noise is None else build(recipe, "noise", registry),
        frozen=frozenset(recipe.freeze),
    )


def build_evaluation_solver(
    recipe: Recipe, registry: Registry, training: LowerSolver | None = None
) -> LowerSolver:
    """The solver of everything that is not a step of training: the recipe's own, that of ``training`` if it converges,
    or one that does for any smooth lower level."""
    if recipe.evaluation_solver is not None:
        own: LowerSolver = build(recipe, "evaluation_solver", registry)
        return own
    solver: LowerSolver = training or build(recipe, "lower_solver", registry)
    if solver.converges:
        return solver
    name = "lbfgs" if recipe.constraint == "none" else "agd"
    converging: LowerSolver = registry.build(Block("lower_solver", name))
    return converging


def measured(
    recipe: Recipe,
    source: Data,
    key: str,
    stream: str,
    problem: Variational,
    device: torch.device,
    ids: Sequence[int] | None = None,
    training: bool = False,
) -> Samples:
    """Images of a section with their measurements; those of training are split where the loss does so."""
    if problem.noise is None and not source.offers("measured"):
        name = getattr(recipe, key).name
        raise refusal(
            recipe,
            key,
            f"{name!r} has no recorded measurements, and the recipe has no noise to simulate them with; use data of"
            " recorded measurements here, too",
        )
    level, (low, high) = problem.noise_level, source.range
    if level is not None and level > high - low and not source.offers("measured"):
        raise refusal(
            recipe,
            "noise",
            f"a level of {level:g} drowns images with values from {low:g} to {high:g}; lower it",
        )
    simulated = None if source.offers("measured") else level
    if training and (sentence := problem.upper_loss.check_noise(simulated)) is not None:
        raise refusal(recipe, "upper_loss", f"{recipe.upper_loss.name}: {sentence}")
    try:
        return Samples(
            source,
            problem.operator,
            problem.noise,
            loss=problem.upper_loss,
            training=training,
            check=problem.data_term.check_measurements,
            seed=recipe.seed,
            color=recipe.color,
            stream=stream,
            dtype=DTYPES[recipe.dtype],
            device=device,
            ids=ids,
            workers=reading_threads(recipe.workers, device),
        )
    except ValueError as error:
        raise refusal(recipe, key, f"{getattr(recipe, key).name}: {error}") from error


def evaluation_samples(recipe: Recipe, problem: Variational, registry: Registry | None = None) -> Samples:
    """The evaluation images of a recipe alone; its training images need not be there."""
    if recipe.evaluation is None:
        raise UsageError("the recipe has no evaluation images; name some, e.g. evaluation=photos")
    source = build(recipe, "evaluation", registry or load_registry())
    return measured(recipe, source, "evaluation", "evaluation", problem, pick_device(recipe.device))


def refusal(recipe: Recipe, key: str, message: str) -> RecipeError:
    """A sentence about a section of a recipe, with its place."""
    return RecipeError([recipe.problem_at(key, message)])
