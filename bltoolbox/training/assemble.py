"""From a valid recipe to an experiment: components built, checked against each other and against the data.

Nothing is written to disk here, so an impossible combination costs nothing but a message.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.chunk_size import chunk_size
from bltoolbox.bilevel.device import DTYPES, pick_device
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.kept import MOST
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, Problem, Sampler
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import detached, keyed_generator
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import find_misfits, listed
from bltoolbox.config.reading import quantity
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.evaluation import deciding
from bltoolbox.restoration.forms import FORMS
from bltoolbox.restoration.from_recipe import build, build_evaluation_solver, refusal
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.theta_file import read_theta
from bltoolbox.restoration.usable import find_misfit
from bltoolbox.restoration.variational import Variational
from bltoolbox.runs.metric import Metric
from bltoolbox.training.assemble_images import (
    assemble_images,
    build_baseline,
    check_images,
    read_initial,
    warn_about_images,
    why_not_certified,
)
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.listeners import Guarded

log = logging.getLogger(__name__)


@detached()
def assemble(
    recipe: Recipe,
    registry: Registry | None = None,
    ranks: Ranks = ALONE,
    given: Mapping[str, Data] | None = None,
) -> Experiment:
    """Build everything a recipe names; raises before anything runs if they do not fit together.

    Data that were ``given`` from Python are used in place of the sections ``data`` and ``evaluation``.
    """
    registry = registry or load_registry()
    device = pick_device(recipe.device, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what names no device must not end up on the first one
    check_partners(recipe, registry)
    like = torch.zeros((), dtype=DTYPES[recipe.dtype], device=device)
    problem = _problem(recipe, registry, device, given or {})
    metric = deciding(recipe, problem)
    parts = {kind: build(recipe, kind, registry) for kind in _METHODS}
    train, validation, evaluation = _tasks(recipe, problem, like)
    if recipe.on_divergence == "shrink-step" and not parts["upper_optimizer"].offers("shorten"):
        name = recipe.upper_optimizer.name
        raise refusal(recipe, "on_divergence", f"{name!r} cannot shorten its steps; use stop or skip-batch")
    sampler_state = _start_sampler(recipe, parts["sampler"], len(train))
    theta = _initial_theta(recipe, problem, like)
    if ranks.size > 1:
        _agree_on_forms(train, theta, ranks)
    if isinstance(problem, Variational):
        check_images(recipe, problem, theta)
    if recipe.validation.patience is not None and problem.penalty(theta) is not None:
        message = (
            "no θ is called the best where there is a penalty, so a run cannot stop by patience; leave it out"
        )
        raise refusal(recipe, "validation.patience", message)
    if ranks.first and isinstance(problem, Variational):
        warn_about_images(recipe, problem, theta, metric)
    oracle = BilevelOracle(
        problem,
        train,
        parts["lower_solver"],
        parts["hypergradient"],
        chunk=chunk_size(recipe.chunk, train),
        adaptive=recipe.chunk == "auto",
        iteration_limit=recipe.iteration_limit,
        strict=not parts["upper_optimizer"].handles_floor,
        estimates=True,
        bound=recipe.certificates.bound,
        bound_every=recipe.certificates.every,
        wants=_wanted(recipe, parts["sampler"], parts["hypergradient"]),
        seed=recipe.seed,
        ranks=ranks,
        keeping=recipe.checkpoint.warm_starts,
    )
    _refuse_certified(recipe, oracle, theta)
    _account_for_memory(recipe, oracle, theta)
    loggers = [Guarded(block.name, _logger(recipe, block, registry)) for block in recipe.loggers]
    return Experiment(
        recipe=recipe,
        problem=problem,
        oracle=oracle,
        sampler=parts["sampler"],
        sampler_state=sampler_state,
        optimizer=parts["upper_optimizer"],
        theta=theta,
        evaluation_solver=build_evaluation_solver(recipe, registry, parts["lower_solver"]),
        metric=metric,
        validation=validation,
        evaluation=evaluation,
        baseline=_baseline(recipe, registry, problem, metric),
        loggers=loggers,
    )


_METHODS = ("lower_solver", "hypergradient", "sampler", "upper_optimizer")


def _problem(recipe: Recipe, registry: Registry, device: torch.device, given: Mapping[str, Data]) -> Problem:
    """The variational problem from the sections for images, or the component that the recipe names."""
    if recipe.of_images:
        return assemble_images(recipe, registry, device, given)
    problem: Problem = build(recipe, "problem", registry)
    return problem


def _tasks(recipe: Recipe, problem: Problem, like: Tensor) -> tuple[Tasks, Tasks | None, Tasks | None]:
    """The tasks of all splits."""
    name = recipe.problem.name
    try:
        splits = [problem.tasks(split, like) for split in ("training", "validation", "evaluation")]
    except ValueError as error:
        raise refusal(recipe, "problem", f"{name}: {error}") from error
    training, validation, evaluation = (
        tasks if tasks is not None and len(tasks) else None for tasks in splits
    )
    if training is None:
        raise refusal(recipe, "problem", f"{name} has no tasks to train on; change its options")
    if recipe.validation.evaluation and evaluation is None:
        message = (
            f"{name} has no evaluation tasks; set evaluation: false, or change the options of the problem"
        )
        raise refusal(recipe, "validation.evaluation", message)
    return training, validation, evaluation


def _baseline(
    recipe: Recipe, registry: Registry, problem: Problem, metric: Metric
) -> tuple[Variational, dict[str, Tensor]] | None:
    if not isinstance(problem, Variational):
        return None
    return build_baseline(recipe, registry, problem, problem.samples["training"], metric)


def _logger(recipe: Recipe, block: Block, registry: Registry) -> Listener:
    try:
        logger: Listener = registry.build(block)
    except ValueError as error:
        raise refusal(recipe, "loggers", f"{block.name}: {error}") from error
    return logger


def check_partners(recipe: Recipe, registry: Registry) -> None:
    """Checked when a recipe is loaded; recipes built in Python are checked here."""
    misfits = find_misfits(vars(recipe), registry)
    if misfits:
        raise RecipeError([recipe.problem_at(misfit.section, misfit.message) for misfit in misfits])


def _start_sampler(recipe: Recipe, sampler: Sampler, m: int) -> dict[str, Any]:
    try:
        return sampler.init(m, recipe.seed)
    except ValueError as error:
        raise refusal(recipe, "sampler", f"{recipe.sampler.name}: {error}") from error


def _wanted(recipe: Recipe, sampler: Sampler, hypergradient: HypergradientEstimator) -> str | None:
    """What the sampler wants to know about each sample; None where it does not observe steps."""
    if not sampler.offers("observe"):
        return None
    name = recipe.sampler.name
    if sampler.wants not in ("loss", "slope", "gradient"):
        raise refusal(
            recipe, "sampler", f"{name}: wants is {sampler.wants!r}, but must be loss, slope or gradient"
        )
    if sampler.wants == "gradient" and not hypergradient.gives_adjoint:
        other = recipe.hypergradient.name
        raise refusal(
            recipe,
            "sampler",
            f"{name} needs the gradient norm of each sample, but hypergradient {other!r} computes no adjoint to form"
            " it from; use cg-ift, or a sampler that needs only the loss",
        )
    return sampler.wants


def _refuse_certified(recipe: Recipe, oracle: BilevelOracle, theta: Theta) -> None:
    """Certified error bounds exist only where nothing but the regularizer has parameters."""
    if recipe.certificates.bound != "certified":
        return
    reason = why_not_certified(recipe, theta)
    if reason is None:
        _, upper = oracle.tasks.at(theta, Counter()).on([0])
        if not upper.depends_on_theta:
            return
        loss = repr(recipe.upper_loss.name) if recipe.of_images else f"of problem {recipe.problem.name!r}"
        reason = f"the loss {loss} depends on θ"
    message = f"there is no certified error bound where {reason}; use bound: estimated"
    raise refusal(recipe, "certificates.bound", message)


def _agree_on_forms(tasks: Tasks, theta: Theta, ranks: Ranks) -> None:
    """All ranks use the forms of the first one, which chooses them while the others wait."""

    def choose() -> dict[str, str]:
        if ranks.first:
            lower, _ = tasks.at(theta, Counter()).on([0])
            lower.gradient(lower.start())
        return FORMS.answers

    FORMS.adopt(ranks.each("forms", choose)[0], closed=True)


def _account_for_memory(recipe: Recipe, oracle: BilevelOracle, theta: Theta) -> None:
    """Log what components keep of every sample, and refuse what would fill a disk."""
    share = {"full": 1.0, "float16": 0.5, "none": 0.0}[oracle.stores.keeping]
    count = math.ceil(len(oracle.tasks) / oracle.ranks.size)
    for section, kept in zip(("hypergradient", "lower_solver"), oracle.kept(theta), strict=True):
        if not (row := math.ceil(share * kept.row_bytes)):
            continue
        name, total = getattr(recipe, section).name, count * row
        sentence = (
            f"{name!r} keeps {quantity(row)} ({listed(list(kept.examples), 'and')}) of each of"
            f" {len(oracle.tasks):,} samples, {quantity(total)} in all"
            + (f" on each of {oracle.ranks.size} ranks" if oracle.ranks.size > 1 else "")
        )
        if total > MOST:
            message = f"{sentence}, above the limit of {quantity(MOST)}; use fewer or smaller images"
            raise refusal(recipe, section, f"{message}, or another {section}")
        if oracle.ranks.first:
            log.info("%s %s", section, sentence)


def _initial_theta(recipe: Recipe, problem: Problem, like: Tensor) -> dict[str, Tensor]:
    theta = problem.init_params(keyed_generator("theta", recipe.seed))
    if recipe.init is not None:
        if isinstance(problem, Variational):
            theta = read_initial(recipe, problem, theta)
        else:
            theta = _read_initial(recipe, problem, theta)
    return {name: value.detach().to(like) for name, value in theta.items()}


def _read_initial(recipe: Recipe, problem: Problem, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The saved θ to start from."""
    try:
        saved, _ = read_theta(str(recipe.init))
    except BltError as error:
        raise refusal(recipe, "init", str(error)) from error
    if (flaw := find_misfit(saved, [expected])) is not None:
        raise refusal(recipe, "init", f"the θ of {recipe.init} cannot be used: {flaw}")
    return problem.project(saved)
