"""A recipe prepared for measurements of its mathematics: in float64, on the CPU, without evaluation or loggers."""

from __future__ import annotations

import dataclasses

from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.training.assemble import assemble
from bltoolbox.training.experiment import Experiment


def assemble_in_float64(recipe: Recipe, registry: Registry) -> Experiment:
    """The experiment of a recipe, with the components and tasks that it names and nothing that only watches it."""
    checks = dataclasses.replace(recipe.validation, evaluation=False)
    settings = dataclasses.replace(
        recipe,
        dtype="float64",
        device="cpu",
        evaluation=None,
        validation=checks,
        baseline=None,
        loggers=(),
    )
    return assemble(settings, registry)
