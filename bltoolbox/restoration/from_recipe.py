"""The parts of a reconstruction that a recipe names: components, and images with their measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bltoolbox.bilevel.device import DTYPES, pick_device
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.errors import RecipeError, UsageError
from bltoolbox.restoration.roles import Data, Operator
from bltoolbox.restoration.samples import Samples
from bltoolbox.restoration.variational import Variational

#: The sections of a recipe that make up the variational problem.
ROLES = ("operator", "regularizer", "data_term", "upper_loss")


def build(recipe: Recipe, key: str, registry: Registry) -> Any:
    """The component of one section of a recipe; what its constructor refuses is a problem of that section."""
    block = getattr(recipe, key)
    try:
        return registry.build(block)
    except ValueError as error:
        raise refusal(recipe, key, f"{block.name}: {error}") from error


def problem_of(
    recipe: Recipe, parts: Mapping[str, Any], samples: Mapping[str, Samples] | None = None
) -> Variational:
    """The variational problem of a recipe from its components by section, with the samples of each split if any."""
    return Variational(
        **{role: parts[role] for role in ROLES},
        constraint=recipe.constraint,
        strong_convexity=recipe.strong_convexity,
        samples=samples or {},
    )


def measured(
    recipe: Recipe,
    source: Data,
    key: str,
    stream: str,
    operator: Operator,
    device: torch.device,
    ids: Sequence[int] | None,
) -> Samples:
    """Images of a section with their measurements."""
    try:
        return Samples(
            source,
            operator,
            noise=recipe.noise,
            seed=recipe.seed,
            color=recipe.color,
            stream=stream,
            dtype=DTYPES[recipe.dtype],
            device=device,
            ids=ids,
            workers=recipe.workers,
        )
    except ValueError as error:
        raise refusal(recipe, key, f"{getattr(recipe, key).name}: {error}") from error


def evaluation_samples(recipe: Recipe, operator: Operator, registry: Registry | None = None) -> Samples:
    """The evaluation images of a recipe alone; its training images need not be there."""
    if recipe.evaluation is None:
        raise UsageError("the recipe has no evaluation images; name some, e.g. evaluation=photos")
    source = build(recipe, "evaluation", registry or load_registry())
    return measured(recipe, source, "evaluation", "evaluation", operator, pick_device(recipe.device), None)


def refusal(recipe: Recipe, key: str, message: str) -> RecipeError:
    """A sentence about a section of a recipe, with its place."""
    return RecipeError([recipe.problem(key, message)])
