"""``blt estimators``: how accurate a hypergradient is for what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import (
    Debug,
    Json,
    Plugins,
    open_registry,
    print_json,
    say,
    show,
    split_one,
)
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.block import Block
    from bltoolbox.config.registry import Registry
    from bltoolbox.testing.estimators import EstimatorComparison

FIGURE = Path("estimators.png")


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("estimators", rich_help_panel="Look")(compare)


def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...", help="A recipe file or the name of a shipped recipe; overrides."
        ),
    ],
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            "--estimator", "-e", metavar="NAME", help="A hypergradient component; repeatable. Default: all."
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(metavar="N", min=1, help="Number of training tasks.")] = 4,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FIG", help="The .png, .svg or .pdf file to write.")
    ] = FIGURE,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing figure.")] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Compare hypergradient components: error against cost.

    For example: blt estimators denoise -e cg-ift -e neumann

    Each component estimates the gradient of the mean loss over a few training tasks, at the initial θ, in float64 on
    the CPU and from a cold start: at increasing accuracies, or along the settings for which it declares that its bias
    vanishes. The table lists the derivatives per task (gradients, Hessian products, derivatives in θ) needed for a
    relative error of 10, 1 and 0.1 %; the figure shows every setting against derivatives and processor time.

    A component may have options: -e '{name: neumann, terms: 50}'
    """
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.reports.compare.estimators import draw_errors
    from bltoolbox.reports.compare.figures import check_targets, save_figure
    from bltoolbox.testing.estimators import compare_estimators

    source, overrides = split_one(arguments, "blt estimators takes one recipe")
    check_targets([out], force)
    registry = open_registry(plugin)
    recipe = load_recipe(source, overrides, registry)
    blocks = [_block(text, registry) for text in estimator] if estimator else None
    comparison: EstimatorComparison | None = None
    for comparison in compare_estimators(recipe, registry, blocks, tasks):
        curve = comparison.curves[-1]
        say(f"{curve.name}: " + (f"{len(curve.points)} settings" if curve.points else curve.note))
    assert comparison is not None
    save_figure(draw_errors([curve for curve in comparison.curves if curve.points]), out)
    if as_json:
        print_json(comparison.to_json() | {"figure": str(out)})
        return
    _print_table(comparison)
    say(f"{out} written")


def _block(text: str, registry: Registry) -> Block:
    """A component by its name, or as a mapping with options."""
    from bltoolbox.config.signatures import Type
    from bltoolbox.config.validation import Checker
    from bltoolbox.config.yaml_text import Spot, parse

    document, checker = parse(text, Spot("<estimator>")), Checker(registry)
    block: Block = checker.value(Type("component", role="hypergradient"), document.data, ("estimator",))
    messages = [problem.message for problem in document.problems]
    messages += [issue.message for issue in checker.issues]
    if messages:
        raise UsageError("; ".join(messages))
    given = document.data if isinstance(document.data, dict) else {}
    return type(block)(
        block.kind, block.name, {name: block.options[name] for name in given if name != "name"}
    )


def _print_table(comparison: EstimatorComparison) -> None:
    from bltoolbox.cli.display.tables import print_rows
    from bltoolbox.testing.estimators import LEVELS

    rows = [("estimator", *(f"to {100 * level:g} %" for level in LEVELS), "smallest error", "at")]
    for curve in comparison.curves:
        costs = [curve.cost_to(level) for level in LEVELS]
        best = curve.best
        shown = ["–" if cost is None else f"{cost:,.0f}" for cost in costs]
        end = ("–", "–") if best is None else (f"{best.error:.1e}", f"{best.cost:,.0f}")
        rows.append((curve.name, *shown, *end))
    title = f"{comparison.recipe}: derivatives per task for a given relative error ({comparison.tasks} tasks)"
    print_rows(rows, title=title)
    for curve in comparison.curves:
        if curve.note:
            show(f"{curve.name}: {curve.note}")
