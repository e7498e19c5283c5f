"""From a valid recipe to an experiment: components built, checked against each other and against the data.

Nothing is written to disk here, so an impossible combination costs nothing but a message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.device import pick_device, set_precision
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.kept import MOST
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, Sampler
from bltoolbox.bilevel.tensors import detached, keyed_generator
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import find_misfits, listed, without_truth
from bltoolbox.config.reading import quantity
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.from_recipe import (
    build,
    build_evaluation_solver,
    build_problem,
    measured,
    refusal,
)
from bltoolbox.restoration.metrics import ImageMetric, deciding, values_in
from bltoolbox.restoration.model import read_range, read_theta
from bltoolbox.restoration.roles import Data, UpperLoss
from bltoolbox.restoration.samples import Samples
from bltoolbox.restoration.theta import join, split, upgraded
from bltoolbox.restoration.usable import find_flaw, find_size_misfit
from bltoolbox.restoration.variational import Variational, VariationalTasks
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.listeners import Guarded
from bltoolbox.training.splits import hold_out, shared

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
    set_precision(recipe.tf32)
    check_partners(recipe, registry)
    metric = deciding(recipe)
    problem = build_problem(recipe, registry)
    parts = {kind: build(recipe, kind, registry) for kind in _METHODS}
    train, validation, evaluation = _samples(recipe, registry, problem, device, given or {})
    splits = {"training": train, "validation": validation, "evaluation": evaluation}
    problem = replace(
        problem,
        samples={name: samples for name, samples in splits.items() if samples is not None},
        range=train.range,
    )
    for samples in problem.samples.values():
        if misfit := problem.check(samples.shape):
            role, sentence = misfit
            raise refusal(recipe, role, f"{getattr(recipe, role).name}: {sentence}")
        if samples.has_truth and min(samples.shape[-2:]) < metric.side:
            size = "×".join(map(str, samples.shape[-2:]))
            message = (
                f"{metric.label} needs images of at least {metric.side}×{metric.side} pixels, not {size}"
            )
            raise refusal(recipe, "validation.metric", f"{message}; choose another metric")
    if recipe.on_divergence == "shrink-step" and not parts["upper_optimizer"].offers("shorten"):
        name = recipe.upper_optimizer.name
        raise refusal(recipe, "on_divergence", f"{name!r} cannot shorten its steps; use stop or skip-batch")
    sampler_state = _start_sampler(recipe, parts["sampler"], len(train))
    theta = _initial_theta(recipe, problem, train.dtype, device)
    _check_frozen(recipe, theta)
    _check_contexts(recipe, problem, theta)
    if recipe.validation.patience is not None and problem.penalty(theta) is not None:
        message = (
            "no θ is called the best where there is a penalty, so a run cannot stop by patience; leave it out"
        )
        raise refusal(recipe, "validation.patience", message)
    if evaluation is not None and (misfit := find_size_misfit(problem, theta, train.shape, evaluation.shape)):
        raise refusal(recipe, "evaluation", f"{misfit[1]}; use evaluation images of that size")
    if ranks.first and (doubt := _find_doubt(recipe, problem)) and not _definite(problem, theta, train):
        log.warning(
            "%s: the lower level may have several minimisers, and conjugate gradients may encounter negative curvature;"
            " set strong_convexity in the recipe",
            doubt,
        )
    if ranks.first and validation is not None and not problem.measurable([metric], validation):
        log.warning(
            "%s of the held-out images cannot be measured without true images, so the last θ is kept; set"
            " validation.metric: loss to choose by the loss, or validation.count: 0 to train on all images",
            metric.label,
        )
    oracle = BilevelOracle(
        problem,
        VariationalTasks(problem, train),
        parts["lower_solver"],
        parts["hypergradient"],
        chunk=recipe.chunk,
        iteration_limit=recipe.iteration_limit,
        strict=not parts["upper_optimizer"].handles_floor,
        bound=recipe.certificates.bound,
        bound_every=recipe.certificates.every,
        wants=_wanted(recipe, parts["sampler"], parts["hypergradient"]),
        seed=recipe.seed,
        ranks=ranks,
    )
    _refuse_certified(recipe, oracle, theta)
    _account_for_memory(recipe, oracle, theta)
    baseline = _baseline(recipe, registry, problem, train, metric)
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
        baseline=baseline,
        loggers=loggers,
    )


def _find_doubt(recipe: Recipe, problem: Variational) -> str | None:
    """What is not convex in the lower level."""
    term, operator = recipe.data_term.name, recipe.operator.name
    if not problem.data_term.convex:
        return f"data term {term!r} is not convex"
    if not problem.regularizer.convex:
        return (
            f"regularizer {recipe.regularizer.name!r} is not convex, and data term {term!r} with operator {operator!r}"
            " is not known to compensate"
        )
    return None


def _definite(problem: Variational, theta: Theta, train: Samples) -> bool:
    """Whether data term and ``strong_convexity`` together are known to make the lower level of the first sample
    convex."""
    sample, at = train.batch([0]), problem.at(theta, train.shape)
    convexity = at.data_convexity(sample.y, sample.context)
    return (
        convexity is not None
        and bool(torch.as_tensor(convexity > 0).all())
        and at.prior_convexity is not None
    )


_METHODS = ("lower_solver", "hypergradient", "sampler", "upper_optimizer")


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
        raise RecipeError([recipe.problem(one.section, one.message) for one in misfits])


def _samples(
    recipe: Recipe, registry: Registry, problem: Variational, device: torch.device, given: Mapping[str, Data]
) -> tuple[Samples, Samples | None, Samples | None]:
    data = given["data"] if "data" in given else build(recipe, "data", registry)
    _refuse_without_truth(recipe, registry, problem.upper_loss, data)
    held_out = recipe.validation.count
    if held_out >= len(data):
        raise refusal(
            recipe,
            "validation",
            f"count {held_out} leaves none of the {len(data)} images of {recipe.data.name!r} for training",
        )

    training, held = hold_out(data, held_out)
    if not training:
        raise refusal(
            recipe,
            "validation",
            f"count {held_out} leaves none of the {len(data)} images of {recipe.data.name!r} for training, since"
            " images of one photograph stay together; reduce it",
        )
    train = measured(recipe, data, "data", "train", problem, device, training, training=True)
    validation = measured(recipe, data, "data", "train", problem, device, held) if held_out else None
    evaluation = None
    if recipe.evaluation is not None:
        other = given["evaluation"] if "evaluation" in given else build(recipe, "evaluation", registry)
        _refuse_overlap(recipe, data, other)
        evaluation = measured(recipe, other, "evaluation", "evaluation", problem, device)
        if evaluation.shape[0] != train.shape[0]:
            raise refusal(
                recipe,
                "evaluation",
                f"the evaluation images have {evaluation.shape[0]} channels and the training images {train.shape[0]};"
                " set color: gray to make both gray",
            )
        if evaluation.range != train.range:
            raise refusal(
                recipe,
                "evaluation",
                f"the evaluation images have {values_in(evaluation.range)} and the training images"
                f" {values_in(train.range)}; set the same range for both",
            )
    return train, validation, evaluation


def _refuse_without_truth(recipe: Recipe, registry: Registry, loss: UpperLoss, data: Data) -> None:
    """Refuse a loss that compares with true images where there are none."""
    if loss.needs_truth and not data.offers("clean"):
        raise refusal(recipe, "upper_loss", without_truth(recipe.upper_loss.name, recipe.data.name, registry))


def _refuse_overlap(recipe: Recipe, data: Data, evaluation: Data) -> None:
    """Refuse evaluation images that were trained on."""
    both = range(len(data)) if recipe.data == recipe.evaluation else shared(data, evaluation)
    if both:
        example = evaluation.label(both[0])
        raise refusal(
            recipe,
            "evaluation",
            f"{len(both)} of the {len(evaluation)} images are of photographs in the training data (the first is"
            f" {example}); choose others, e.g. by count and offset, or leave evaluation out",
        )


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
    for role in ("operator", "data_term"):
        if split(theta, role):
            name = getattr(recipe, role).name
            reason = f"the {role.replace('_', ' ')} {name!r} has parameters"
            break
    else:
        _, upper = oracle.tasks.at(theta, Counter()).on([0])
        if not upper.depends_on_theta:
            return
        reason = f"the loss {recipe.upper_loss.name!r} depends on θ"
    message = f"there is no certified error bound where {reason}; use bound: estimated"
    raise refusal(recipe, "certificates.bound", message)


def _account_for_memory(recipe: Recipe, oracle: BilevelOracle, theta: Theta) -> None:
    """Log what components keep of every sample, and refuse what would fill a disk."""
    count = len(oracle.tasks)
    for section, kept in zip(("hypergradient", "lower_solver"), oracle.kept(theta), strict=True):
        if not kept.row_bytes:
            continue
        name, total = getattr(recipe, section).name, count * kept.row_bytes
        sentence = (
            f"{name!r} keeps {quantity(kept.row_bytes)} ({listed(list(kept.examples), 'and')}) of each of {count:,}"
            f" samples, {quantity(total)} in all"
        )
        if total > MOST:
            message = f"{sentence}, above the limit of {quantity(MOST)}; use fewer or smaller images"
            raise refusal(recipe, section, f"{message}, or another {section}")
        if oracle.ranks.first:
            log.info("%s %s", section, sentence)


def _initial_theta(
    recipe: Recipe, problem: Variational, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    theta = problem.init_params(keyed_generator("theta", recipe.seed))
    if recipe.init is not None:
        theta = _read_initial(recipe, problem, theta)
    return {name: value.detach().to(device, dtype) for name, value in theta.items()}


def _check_contexts(recipe: Recipe, problem: Variational, theta: Theta) -> None:
    """Refuse data that do not say what the data term needs to know about each sample."""
    term = problem.data_term
    prepared = term.prepare(split(theta, "data_term"))
    for samples in problem.samples.values():
        try:
            term.select(prepared, samples.data.context(samples.ids[:1]))
        except ValueError as error:
            raise refusal(recipe, "data_term", f"{recipe.data_term.name}: {error}") from error


def _check_frozen(recipe: Recipe, theta: Theta) -> None:
    """Refuse to freeze what has no parameters, and everything that has some."""
    learned = {name.partition(".")[0] for name in theta}
    for role in recipe.freeze:
        if role not in learned:
            name = getattr(recipe, role).name
            raise refusal(
                recipe, "freeze", f"{role.replace('_', ' ')} {name!r} has no parameters; leave it out"
            )
    if not learned - set(recipe.freeze):
        names = listed(sorted(learned), "and").replace("_", " ")
        raise refusal(recipe, "freeze", f"nothing is left to learn, only {names} have parameters")


def _read_initial(recipe: Recipe, problem: Variational, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        theta, metadata = read_theta(str(recipe.init))
        saved, span = upgraded(theta, problem), read_range(metadata, str(recipe.init))
    except BltError as error:
        raise refusal(recipe, "init", str(error)) from error
    if span != problem.range:
        raise refusal(
            recipe,
            "init",
            f"the θ of {recipe.init} is for images with {values_in(span)}, but the data have"
            f" {values_in(problem.range)}",
        )

    if (flaw := find_flaw(problem, saved, [expected])) is not None:
        raise refusal(recipe, "init", f"the θ of {recipe.init} cannot be used: {flaw}")
    return problem.project(saved)


def _baseline(
    recipe: Recipe, registry: Registry, problem: Variational, train: Samples, metric: ImageMetric
) -> tuple[Variational, dict[str, Tensor]] | None:
    if recipe.baseline is None:
        return None
    if not problem.measurable([metric], train):
        raise refusal(
            recipe,
            "baseline",
            f"a baseline is tuned by {metric.label}, which cannot be measured without true images; set"
            " validation.metric: loss, or leave the baseline out",
        )
    regularizer = build(recipe, "baseline", registry)
    tuned = regularizer.init_params(train.shape, keyed_generator("theta", recipe.seed))
    if (size := sum(value.numel() for value in tuned.values())) > 2:
        raise refusal(
            recipe,
            "baseline",
            f"{recipe.baseline.name!r} has {size} parameters; a baseline has at most two, such as tv",
        )
    theta = join(**(_standard_params(recipe, problem, train) | {"regularizer": tuned}))
    theta = {name: value.to(train.device, train.dtype) for name, value in theta.items()}
    return replace(problem, regularizer=regularizer), theta


def _standard_params(recipe: Recipe, problem: Variational, train: Samples) -> dict[str, dict[str, Tensor]]:
    """What one would choose without learning, by role; the initial θ unless a component has another choice."""
    generator = keyed_generator("theta", recipe.seed)
    params = {}
    for role, part in problem.parts.items():
        try:
            params[role] = part.standard_params(train.shape, generator)
        except ValueError as error:
            name = getattr(recipe, role).name
            raise refusal(recipe, "baseline", f"{name}: {error}, or leave baseline out") from error
    return params
