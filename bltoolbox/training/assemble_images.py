"""Assembly of the variational problem: images with their measurements, checked against the components that treat them.

Other problems are one component, and need none of this.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.compatibility import listed, without_truth
from bltoolbox.config.recipe import Recipe
from bltoolbox.config.registry import Registry
from bltoolbox.errors import BltError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import deciding
from bltoolbox.restoration.from_recipe import build, build_problem, measured, refusal
from bltoolbox.restoration.metrics import ImageMetric, values_in
from bltoolbox.restoration.roles import Data, UpperLoss
from bltoolbox.restoration.theta import join, split, upgraded
from bltoolbox.restoration.theta_file import read_range, read_theta
from bltoolbox.restoration.usable import find_flaw, find_size_misfit
from bltoolbox.restoration.variational import Variational
from bltoolbox.runs.metric import Metric
from bltoolbox.training.splits import hold_out, shared

log = logging.getLogger(__name__)


def assemble_images(
    recipe: Recipe, registry: Registry, device: torch.device, given: Mapping[str, Data]
) -> Variational:
    """The problem with the samples of all splits."""
    problem = build_problem(recipe, registry)
    train, validation, evaluation = _samples(recipe, registry, problem, device, given)
    splits = {"training": train, "validation": validation, "evaluation": evaluation}
    problem = replace(
        problem,
        samples={name: samples for name, samples in splits.items() if samples is not None},
        range=train.range,
    )
    metric = deciding(recipe, problem)
    for samples in problem.samples.values():
        if misfit := problem.check(samples.shape):
            role, sentence = misfit
            raise refusal(recipe, role, f"{getattr(recipe, role).name}: {sentence}")
        side = metric.side if isinstance(metric, ImageMetric) else 1
        if samples.has_truth and min(samples.shape[-2:]) < side:
            size = "×".join(map(str, samples.shape[-2:]))
            message = f"{metric.label} needs images of at least {side}×{side} pixels, not {size}"
            raise refusal(recipe, "validation.metric", f"{message}; choose another metric")
    return problem


def check_images(recipe: Recipe, problem: Variational, theta: Theta) -> None:
    """Refuse what does not fit the initial θ."""
    _check_frozen(recipe, theta)
    _check_contexts(recipe, problem, theta)
    train, evaluation = problem.samples["training"], problem.samples.get("evaluation")
    if evaluation is not None and (misfit := find_size_misfit(problem, theta, train.shape, evaluation.shape)):
        raise refusal(recipe, "evaluation", f"{misfit[1]}; use evaluation images of that size")


def warn_about_images(recipe: Recipe, problem: Variational, theta: Theta, metric: Metric) -> None:
    """Log what may go wrong later, or will have no effect."""
    train, validation = problem.samples["training"], problem.samples.get("validation")
    if (doubt := _find_doubt(recipe, problem)) and not _definite(problem, theta, train):
        log.warning(
            "%s: the lower level may have several minimisers, and conjugate gradients may encounter negative curvature;"
            " set strong_convexity in the recipe",
            doubt,
        )
    if validation is not None and not _measurable(problem, metric, validation):
        log.warning(
            "%s of the held-out images cannot be measured without true images, so the last θ is kept; set"
            " validation.metric: loss to choose by the loss, or validation.count: 0 to train on all images",
            metric.label,
        )


def _measurable(problem: Variational, metric: Metric, samples: Samples) -> bool:
    return isinstance(metric, ImageMetric) and bool(problem.measurable([metric], samples))


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
            f"count {held_out} leaves none of the {len(data)} images of {recipe.data.name!r} for training;"
            " set validation.count to fewer, or to 0 to hold out none",
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


def why_not_certified(recipe: Recipe, theta: Theta) -> str | None:
    """The component besides the regularizer that has parameters, for which there is no certified error bound."""
    for role in ("operator", "data_term"):
        if split(theta, role):
            return f"the {role.replace('_', ' ')} {getattr(recipe, role).name!r} has parameters"
    return None


def read_initial(recipe: Recipe, problem: Variational, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The saved θ to start from."""
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


def build_baseline(
    recipe: Recipe, registry: Registry, problem: Variational, train: Samples, metric: Metric
) -> tuple[Variational, dict[str, Tensor]] | None:
    """The problem with the regularizer of the baseline, and its θ; None where there is no baseline."""
    if recipe.baseline is None:
        return None
    if not _measurable(problem, metric, train):
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
    for role, component in problem.components.items():
        try:
            params[role] = component.standard_params(train.shape, generator)
        except ValueError as error:
            name = getattr(recipe, role).name
            raise refusal(recipe, "baseline", f"{name}: {error}, or leave baseline out") from error
    return params
