"""``blt evaluate``: how good is a model on images?"""

from __future__ import annotations

from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, split_overrides
from bltoolbox.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("evaluate")(evaluate)


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [KEY=VALUE]...",
            help="A run directory, a θ file or a shipped model's name; overrides of its recipe.",
        ),
    ],
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model on the evaluation images of its recipe, or on others.

    Images are degraded as the recipe says, with noise that depends on the seed and the image alone, and restored from
    a cold start to evaluation_tol. Overrides choose other images or another accuracy; the training images need not be
    there.

    For example: blt evaluate runs/denoise/2026-01-31_12-00-00 evaluation='{name: array, path: test.npy}'
    """
    targets, overrides = split_overrides(arguments)
    if len(targets) != 1:
        raise UsageError(f"name one model, not {len(targets)}")
    registry = open_registry(plugin, warn=not as_json)
    from bltoolbox.assemble import build, evaluation_samples
    from bltoolbox.evaluation import evaluate as measure
    from bltoolbox.model import Model
    from bltoolbox.problem import Problem
    from bltoolbox.recipe import recipe_from_dict

    model = Model.load(targets[0], registry=registry)
    recipe = recipe_from_dict(model.recipe.to_dict(), overrides, registry)
    if recipe.regularizer != model.recipe.regularizer:
        raise UsageError("θ belongs to the regularizer it was trained with; override other keys")
    operator, solver = build(recipe, "operator", registry), build(recipe, "lower_solver", registry)
    problem = Problem(operator, model.problem.regularizer, recipe.constraint, recipe.strong_convexity)
    samples = evaluation_samples(recipe, operator, registry)
    theta = {name: value.to(samples.device, samples.dtype) for name, value in model.theta.items()}
    options = {"tol": recipe.evaluation_tol, "chunk": recipe.chunk, "limit": recipe.iteration_limit}
    found = measure(problem, theta, samples, solver, **options)  # type: ignore[arg-type]
    rows = list(zip(found.labels, found.before, found.after, strict=True))
    if as_json:
        images = [{"image": label, "psnr_before": before, "psnr": after} for label, before, after in rows]
        mean = {"psnr_before": found.psnr_before, "psnr": found.psnr, "iterations": found.iterations}
        print_json({"model": targets[0], **mean, "images": images})
        return
    from bltoolbox.cli.tables import print_rows

    table = [("image", "measured", "restored", "gain")]
    rows.append(("mean", found.psnr_before, found.psnr))
    for label, before, after in rows:
        table.append((label, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}"))
    print_rows(table, title="PSNR in dB")
