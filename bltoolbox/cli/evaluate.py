"""``blt evaluate``: measure a trained model on images."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, split_overrides
from bltoolbox.cli.display.tables import print_rows
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from bltoolbox.config.registry import Registry

#: Image, PSNR before and after, SSIM.
Row = tuple[str, float, float, float]


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
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model on its evaluation images.

    Images are degraded as in the recipe, with noise that depends only on the seed and the image, and restored from a
    cold start to evaluation_tol. Overrides choose other images or another accuracy. The training images are not needed.

    For example: blt evaluate runs/denoise/2026-01-31_12-00-00 evaluation='{name: array, path: test.npy}'
    """
    targets, overrides = split_overrides(arguments)
    if len(targets) != 1:
        raise UsageError(f"blt evaluate takes one model, got {len(targets)}")
    registry = open_registry(plugin, warn=not as_json)
    rows, iterations = _measure(targets[0], overrides, registry)
    mean = [sum(column) / len(rows) for column in zip(*(row[1:] for row in rows), strict=True)]
    if as_json:
        names = ("image", "psnr_before", "psnr", "ssim")
        images = [dict(zip(names, row, strict=True)) for row in rows]
        figures = dict(zip(names[1:], mean, strict=True)) | {"iterations": iterations}
        print_json({"model": targets[0], **figures, "images": images})
        return
    table = [("image", "measured", "restored", "gain", "SSIM")]
    for label, before, after, alike in [*rows, ("mean", mean[0], mean[1], mean[2])]:
        table.append((label, f"{before:.2f}", f"{after:.2f}", f"{after - before:+.2f}", f"{alike:.4f}"))
    print_rows(table, title="PSNR in dB, and structural similarity of the restored image")


def _measure(source: str, overrides: list[str], registry: Registry) -> tuple[list[Row], int]:
    """One row per image, with one chunk of images in memory at a time, and the number of iterations."""
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.restoration.evaluation import evaluate as restore
    from bltoolbox.restoration.from_recipe import build, evaluation_samples
    from bltoolbox.restoration.metrics import ssim
    from bltoolbox.restoration.model import Model

    model = Model.load(source, registry=registry)
    recipe = recipe_from_dict(model.recipe.to_dict(), overrides, registry)
    if recipe.regularizer != model.recipe.regularizer:
        raise UsageError(
            "the regularizer cannot be overridden: θ was trained for {model.recipe.regularizer.name!r}"
        )
    operator, solver = build(recipe, "operator", registry), build(recipe, "lower_solver", registry)
    problem = replace(
        model.problem,
        operator=operator,
        data_term=build(recipe, "data_term", registry),
        constraint=recipe.constraint,
        strong_convexity=recipe.strong_convexity,
    )
    samples = evaluation_samples(recipe, operator, registry)
    theta = {name: value.to(samples.device, samples.dtype) for name, value in model.theta.items()}
    rows: list[Row] = []
    iterations = 0
    for first in range(0, len(samples), recipe.chunk):
        part = range(first, min(first + recipe.chunk, len(samples)))
        found = restore(
            problem,
            theta,
            samples,
            solver,
            tol=recipe.evaluation_tol,
            limit=recipe.iteration_limit,
            positions=part,
            keep=len(part),
        )
        alike = [ssim(_picture(image.x), _picture(image.x_true)) for image in found.images]
        rows += zip(found.labels, found.before, found.after, alike, strict=True)
        iterations += found.iterations
    return rows, iterations


def _picture(image: Tensor) -> Any:
    """H×W×C in [0, 1]."""
    return image.clamp(0, 1).permute(1, 2, 0).numpy()
