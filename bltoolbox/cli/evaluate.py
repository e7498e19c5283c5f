"""``blt evaluate``: measure a trained model on images, or θ on the evaluation tasks of another problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import (
    Debug,
    Json,
    Plugins,
    ProblemMetrics,
    open_registry,
    print_json,
    split_one,
)
from bltoolbox.cli.display.tables import print_rows
from bltoolbox.cli.photographs import evaluate_on_photographs
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.evaluation import Evaluation
    from bltoolbox.restoration.model import Model
    from bltoolbox.restoration.trained import Trained


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
    metric: ProblemMetrics = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Whole photographs of any size instead of the recipe's images."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(metavar="S", help="With --images: the noise, e.g. 25/255; default the model's."),
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="NAMES", help="With --images: also measure noisy, tv and/or bm3d.")
    ] = "noisy",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="With --images: the seed of the noise.")] = 0,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model on its evaluation images or tasks.

    Images are degraded as in the recipe, with noise that depends only on the seed and the image, and restored from a
    cold start to evaluation_tol; recorded measurements are taken as they are. Metrics refer to the range of values of
    the data. Overrides choose other images or another accuracy. The training images are not needed.

    With --images, whole photographs get Gaussian noise that depends on the seed and the file name and is not clipped
    (gray models see their luma, ITU-R 601), so that figures can be compared with the literature:
    blt evaluate denoise-color --images CBSD68 --noise 25/255 --against noisy,tv,bm3d

    For example: blt evaluate runs/denoise/2026-01-31_12-00-00 evaluation='{name: array, path: test.npy}'
    """
    target, overrides = split_one(arguments, "blt evaluate takes one model")
    registry = open_registry(plugin, warn=not as_json)
    if images is not None:
        if overrides:
            raise UsageError("--images measures the model as it is; remove the overrides")
        evaluate_on_photographs(
            target, images, noise, metric or "psnr,ssim", against, seed, registry, as_json
        )
        return
    if noise is not None or against != "noisy" or seed:
        raise UsageError(
            "--noise, --against and --seed need --images; elsewhere use overrides, e.g. noise=25/255"
        )
    evaluation = _measure(target, overrides, metric, registry)
    if not (metrics := evaluation.metrics):
        raise UsageError(
            "the true images of the evaluation data are not known, so that nothing can be measured; use --metric loss"
        )
    if as_json:
        print_json(
            {
                "model": target,
                **_facts(evaluation, None),
                "iterations": evaluation.iterations,
                f"{_noun(evaluation)}s": _tasks(evaluation),
            }
        )
        return
    heading = [name for measure in metrics for name in (f"{measure.label} before", measure.label, "change")]
    table = [(_noun(evaluation), *heading)]
    for label, facts in [
        *((task[_noun(evaluation)], task) for task in _tasks(evaluation)),
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


def _noun(evaluation: Evaluation) -> str:
    return "image" if evaluation.of_images else "task"


def _tasks(evaluation: Evaluation) -> list[dict[str, Any]]:
    noun = _noun(evaluation)
    return [{noun: label, **_facts(evaluation, number)} for number, label in enumerate(evaluation.labels)]


def _measure(source: str, overrides: list[str], metrics: str | None, registry: Registry) -> Evaluation:
    """Solve the tasks, a chunk of them in memory at a time."""
    from bltoolbox.restoration.model import Model, load_trained

    trained = load_trained(source, registry=registry)
    if isinstance(trained, Model):
        return _restore(trained, overrides, metrics or "psnr,ssim", registry)
    return _solve(trained, overrides, metrics, registry)


def _solve(trained: Trained, overrides: list[str], metrics: str | None, registry: Registry) -> Evaluation:
    """The evaluation tasks of a problem that is not about images."""
    import torch

    from bltoolbox.bilevel.chunk_size import chunk_size
    from bltoolbox.bilevel.device import DTYPES, pick_device
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.restoration.evaluation import evaluate_tasks, metrics_of
    from bltoolbox.restoration.from_recipe import build, build_evaluation_solver
    from bltoolbox.restoration.metrics import pick_listed
    from bltoolbox.restoration.usable import find_misfit

    recipe = recipe_from_dict(trained.recipe.to_dict(), overrides, registry, trained=True)
    name = trained.recipe.problem.name
    if recipe.problem.name != name:
        raise UsageError(f"the problem cannot be overridden: θ was trained for {name!r}")
    problem = build(recipe, "problem", registry)
    like = torch.zeros((), dtype=DTYPES[recipe.dtype], device=pick_device(recipe.device))
    tasks = problem.tasks("evaluation", like)
    if tasks is None or not len(tasks):
        raise UsageError(
            f"problem {name!r} has no evaluation tasks with these options; change them by overrides"
        )
    theta = {key: value.to(like) for key, value in trained.theta.items()}
    if (misfit := find_misfit(theta, [problem.init_params(torch.Generator())])) is not None:
        raise UsageError(f"problem: θ does not fit these options: {misfit}")
    among = metrics_of(problem)
    wanted = (
        [metric.name for metric in pick_listed(metrics, among)]
        if metrics
        else list(problem.metrics) or [*among]
    )
    return evaluate_tasks(
        problem,
        theta,
        tasks,
        build_evaluation_solver(recipe, registry),
        tol=recipe.evaluation_tol,
        limit=recipe.iteration_limit,
        chunk=chunk_size(recipe.chunk, tasks),
        metrics=wanted,
    )


def _restore(model: Model, overrides: list[str], names: str, registry: Registry) -> Evaluation:
    """The evaluation images of a recipe."""
    from bltoolbox.bilevel.chunk_size import chunk_size
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.restoration.evaluation import evaluate as restore
    from bltoolbox.restoration.evaluation import metrics_of
    from bltoolbox.restoration.from_recipe import build, build_problem, evaluation_samples
    from bltoolbox.restoration.metrics import pick_listed

    metrics = pick_listed(names, metrics_of(model.problem))
    recipe = recipe_from_dict(model.recipe.to_dict(), overrides, registry, trained=True)
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
        chunk=chunk_size(recipe.chunk, samples),
        metrics=[metric.name for metric in metrics],
    )
