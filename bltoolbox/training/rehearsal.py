"""A recipe tried out for ``blt validate --deep``: everything is built, and one sample is computed.

This finds what the text of a recipe cannot show: a device that is missing, images that do not exist or are too small,
an operator that returns another shape than its adjoint takes, batches larger than the training set. Nothing is
written, and nothing is solved to a tolerance, so it takes about as long as the imports.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Counter
from bltoolbox.bilevel.tensors import detached
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.errors import BltError, explain
from bltoolbox.training.assemble import assemble
from bltoolbox.training.experiment import Experiment


@detached()
def rehearse(recipe: Recipe, registry: Registry) -> dict[str, str]:
    """Facts about a recipe, by what they are about; raises what a run would raise in its first step."""
    experiment = assemble(replace(recipe, workers=0, loggers=()), registry)
    batch, _ = experiment.sampler.next(experiment.sampler_state)
    _compute_sample(experiment)
    noun = "images" if recipe.of_images else "tasks"
    splits = {
        "training": experiment.train,
        "held out": experiment.validation,
        "evaluation": experiment.evaluation,
    }
    facts = {"device": f"{experiment.train.device}, {recipe.dtype}"}
    for name, tasks in splits.items():
        if tasks is not None:
            facts[name] = f"{len(tasks)} {noun if len(tasks) != 1 else noun[:-1]} of {_size(tasks.shape)}"
    count, drawn = len(experiment.train), len(batch.ids)
    chunks = math.ceil(drawn / experiment.oracle.chunk) if drawn else 0
    facts["batches"] = f"{drawn} of {count} {noun} per step, computed in {chunks} chunk{'s' * (chunks != 1)}"
    facts["parameters"] = f"{experiment.model(experiment.theta).size:,}"
    return facts


def _compute_sample(experiment: Experiment) -> None:
    """One energy, gradient, loss and its gradient, at the start of the first training sample."""
    try:
        lower, upper = experiment.train.at(experiment.theta, Counter()).on([0])
        x = lower.start()
        values = {
            "the gradient of the lower level": lower.gradient(x),
            "the gradient of the loss": upper.gradient(x),
        }
        finite = torch.isfinite(lower.energy(x)).all() and torch.isfinite(upper.value(x)).all()
    except BltError:
        raise
    except Exception as error:
        raise BltError(f"the first training sample cannot be computed: {explain(error)}") from error
    for name, value in values.items():
        if value.shape != x.shape:
            raise BltError(f"{name} has shape {_size(value.shape)}, but x has {_size(x.shape)}")
    if not finite or not all(_finite(value) for value in values.values()):
        raise BltError("the first training sample has a value or gradient that is not finite")


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"
