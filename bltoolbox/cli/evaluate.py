"""``blt evaluate``: measure a trained model on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, MetricNames, Plugins, open_registry, print_json, split_overrides
from bltoolbox.cli.display.tables import print_rows
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.evaluation import Evaluation
    from bltoolbox.restoration.metrics import ImageMetric


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("evaluate", rich_help_panel="Use")(evaluate)


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [KEY=VALUE]...",
            help="A run directory, a θ file or a name from blt models; overrides.",
        ),
    ],
    metric: MetricNames = "psnr,ssim",
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model on its evaluation images.

    Images are degraded as in the recipe, with noise that depends only on the seed and the image, and restored from a
    cold start to evaluation_tol; recorded measurements are taken as they are. Metrics refer to the range of values of
    the data. Overrides choose other images or another accuracy. The training images are not needed.

    For example: blt evaluate runs/denoise/2026-01-31_12-00-00 evaluation='{name: array, path: test.npy}'
    """
    from bltoolbox.restoration.metrics import DECIDING, pick_listed

    targets, overrides = split_overrides(arguments)
    if len(targets) != 1:
        raise UsageError(f"blt evaluate takes one model, got {len(targets)}")
    registry = open_registry(plugin, warn=not as_json)
    evaluation = _measure(targets[0], overrides, pick_listed(metric, DECIDING), registry)
    if not (metrics := evaluation.metrics):
        raise UsageError(
            "the true images of the evaluation data are not known, so that nothing can be measured; use --metric loss"
        )
    if as_json:
        print_json(
            {
                "model": targets[0],
                **_facts(evaluation, None),
                "iterations": evaluation.iterations,
                "images": _images(evaluation),
            }
        )
        return
    heading = [name for measure in metrics for name in (f"{measure.label} before", measure.label, "change")]
    table = [("image", *heading)]
    for label, facts in [
        *((image["image"], image) for image in _images(evaluation)),
        ("mean", _facts(evaluation, None)),
    ]:
        pairs = [(measure, facts[f"{measure.name}_before"], facts[measure.name]) for measure in metrics]
        cells = [
            (measure.number(a), measure.number(b), measure.number(b - a, sign=True))
            for measure, a, b in pairs
        ]
        table.append((label, *(cell for triple in cells for cell in triple)))
    print_rows(table, title=", ".join(measure.title for measure in metrics))


def _facts(evaluation: Evaluation, number: int | None) -> dict[str, Any]:
    """The metrics of one image, or their means, by the names that JSON gives them."""
    facts: dict[str, Any] = {}
    for metric in evaluation.metrics:
        pair = evaluation.before[metric.name], evaluation.after[metric.name]
        before, after = (sum(each) / len(each) if number is None else each[number] for each in pair)
        facts |= {f"{metric.name}_before": before, metric.name: after}
    return facts


def _images(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [{"image": label, **_facts(evaluation, number)} for number, label in enumerate(evaluation.labels)]


def _measure(
    source: str, overrides: list[str], metrics: Sequence[ImageMetric], registry: Registry
) -> Evaluation:
    """Restore the images, a chunk of them in memory at a time."""
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.restoration.evaluation import evaluate as restore
    from bltoolbox.restoration.from_recipe import build, build_problem, evaluation_samples
    from bltoolbox.restoration.model import Model

    model = Model.load(source, registry=registry)
    recipe = recipe_from_dict(model.recipe.to_dict(), overrides, registry)
    if recipe.regularizer != model.recipe.regularizer:
        raise UsageError(
            f"the regularizer cannot be overridden: θ was trained for {model.recipe.regularizer.name!r}"
        )
    problem = replace(build_problem(recipe, registry), range=model.range)
    solver = build(recipe, "lower_solver", registry)
    samples = evaluation_samples(recipe, problem, registry)
    misfit = problem.check(samples.shape)
    sentence = misfit[1] if misfit else replace(model, problem=problem).check_size(samples.shape)
    if sentence is not None:
        raise UsageError(f"evaluation: {sentence}")
    theta = {name: value.to(samples.device, samples.dtype) for name, value in model.theta.items()}
    return restore(
        problem,
        theta,
        samples,
        solver,
        tol=recipe.evaluation_tol,
        limit=recipe.iteration_limit,
        chunk=recipe.chunk,
        metrics=[metric.name for metric in metrics],
    )
