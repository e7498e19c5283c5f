"""``blt theory``: the convergence theorem of inexact stochastic gradient descent, measured."""

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
from bltoolbox.errors import BltError

if TYPE_CHECKING:
    from bltoolbox.testing.theory import Curve, Theory

FIGURE = Path("theory.png")


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("theory", rich_help_panel="Look")(theory)


def theory(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...", help="A recipe file or the name of a shipped recipe; overrides."
        ),
    ],
    tasks: Annotated[int, typer.Option(metavar="N", min=2, max=64, help="Number of training tasks.")] = 8,
    steps: Annotated[int, typer.Option(metavar="T", min=4, max=2000, help="Steps of every run.")] = 40,
    runs: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Runs with other batches.")] = 3,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FIG", help="The .png, .svg or .pdf file to write.")
    ] = FIGURE,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing figure.")] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure both sides of the convergence theorem of ISGD.

    For example: blt theory smoke data.size=16

    ISGD with the recipe's solver and hypergradient, for several steps, batch sizes and accuracies (fixed, and with a
    finite sum of squares), from the initial θ, in float64 on the CPU. Beside it, every gradient is computed to high
    accuracy, so that the constants of the theorem (L, A, B, C and the error of z) and both of its sides are known along
    the runs. The table has the measured side, the bound term by term, and how far apart they are; the exit code is 1
    if a bound does not hold.

    For problems of at most 5,000 unknowns per task.
    """
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.reports.compare.figures import check_targets, save_figure
    from bltoolbox.reports.compare.theory import draw_theory
    from bltoolbox.testing.theory_runs import bench_of, measure

    source, overrides = split_one(arguments, "blt theory takes one recipe")
    check_targets([out], force)
    registry = open_registry(plugin)
    recipe = load_recipe(source, overrides, registry)
    result: Theory | None = None
    for message in measure(bench_of(recipe, registry, tasks, steps), runs=runs):
        if isinstance(message, str):
            say(message)
        else:
            result = message
    assert result is not None
    save_figure(draw_theory(_panels(result)), out)
    if as_json:
        print_json(result.to_json() | {"figure": str(out)})
    else:
        _print_table(result)
        say(f"{out} written")
    if not result.holds:
        raise BltError("the bound does not hold for every setting; see the table")


def _panels(result: Theory) -> list[tuple[str, list[tuple[str, Curve]]]]:
    full = [curve for curve in result.curves if curve.setting.batch == result.tasks]
    drawn = [curve for curve in result.curves if curve.setting.batch < result.tasks]
    some = drawn[0].setting if drawn else full[-1].setting
    steps = [(f"α = {c.step:.2g}", c) for c in drawn if c.setting.batch == some.batch]
    alike = [c for c in (*drawn, *full) if c.setting.step == some.step and not c.setting.decay]
    batches = [(f"S = {c.setting.batch}", c) for c in alike if c.setting.accuracy == some.accuracy]
    accuracies = [(_accuracy(c), c) for c in full]
    panels = [("steps", steps), ("batch sizes", batches), ("accuracies", accuracies)]
    return [(title, curves) for title, curves in panels if curves]


def _accuracy(curve: Curve) -> str:
    setting = curve.setting
    power = "t" if setting.decay == 1 else f"t^{setting.decay:g}"
    return f"ε = {setting.accuracy:g}" + (f"/{power}" if setting.decay else "")


def _print_table(result: Theory) -> None:
    from bltoolbox.cli.display.tables import print_rows

    heading = "step α, batch, accuracy, A, C, E‖e‖², min E‖∇f‖², bound, ratio, of it start, noise, error"
    rows: list[tuple[str, ...]] = [tuple(heading.split(", "))]
    for curve in result.curves:
        terms = curve.terms
        figures = (curve.slope, curve.offset, curve.error, curve.left[-1], curve.right[-1], curve.looseness)
        setting = curve.setting
        mark = "" if curve.applies else " (too long)"
        rows.append(
            (
                f"{curve.step:.2g}{mark}",
                str(setting.batch),
                _accuracy(curve),
                *(f"{figure:.2g}" for figure in figures),
                *(f"{term:.2g}" for term in (terms.start, terms.noise, terms.error)),
            )
        )
    print_rows(rows, left=3, title=f"{result.recipe}: {result.tasks} tasks, {result.steps} steps")
    order = result.error_order
    show(
        f"L = {result.lipschitz:.3g}, B = 1, f(θ₀) − f_inf = {result.gap:.3g}"
        + ("" if order is None else f"; E‖e‖² grows like ε^{order:.2f}")
    )
    for curve in result.curves:
        if curve.applies and not curve.holds:
            show(f"α = {curve.step:.2g}, batch {curve.setting.batch}, {_accuracy(curve)}: the bound fails")
