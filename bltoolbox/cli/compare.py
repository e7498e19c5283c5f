"""``blt compare``: several runs in one figure and one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import (
    Debug,
    Json,
    Labels,
    Plugins,
    RunDirectories,
    open_registry,
    print_json,
    say,
    show,
)
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.reports.compare.comparison import Axis, Comparison, Group, Spread

FIGURE = Path("compare.png")


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("compare", rich_help_panel="Look")(compare_runs)


def compare_runs(
    directories: RunDirectories,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FIG", help="The .png, .svg or .pdf file to write.")
    ] = FIGURE,
    level: Annotated[
        list[float] | None,
        typer.Option(
            metavar="VALUE",
            help="Metric level for the table; repeatable. Default: chosen from the runs.",
        ),
    ] = None,
    at: Annotated[
        list[float] | None,
        typer.Option(metavar="C", help="Also show an image restored after C computations; repeatable."),
    ] = None,
    image: Annotated[
        int, typer.Option(metavar="N", min=0, help="The evaluation image that --at restores.")
    ] = 0,
    smooth: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps in the running mean of the loss; default 5 % of the run.",
        ),
    ] = None,
    label: Labels = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing figures.")] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Plot runs side by side and print a table.

    For example: blt compare runs/steps --level 27 --level 28 --at 1e4

    The loss and the metric by which the runs chose θ (validation.metric) are plotted against computations and time.
    Runs that differ only in their seed share one line, their mean, in a band from the worst to the best. The legend
    names the settings in which the runs differ. The metric is that of the evaluation images if the recipes have
    validation: {evaluation: true}, else that of the held-out images. Unfinished runs are plotted as far as they got.

    --at adds a second figure, FIG-images: an evaluation image, restored with the θ of the last check before each cost.
    """
    from bltoolbox.reports.compare.comparison import as_dict, compare
    from bltoolbox.reports.compare.figures import check_targets, draw_curves, save_figure
    from bltoolbox.runs.history import RunHistory, expand
    from bltoolbox.runs.labels import given_labels

    sheet = out.with_name(f"{out.stem}-images{out.suffix}")
    costs = sorted(set(at or ()))
    check_targets([out, sheet] if costs else [out], force)
    paths, missing = expand(directories)
    given = given_labels(label or (), paths)
    comparison = compare([RunHistory.read(path) for path in paths], level or (), smooth, given)
    for note in [*missing, *comparison.notes]:
        say(f"note: {note}")
    if not any(run.steps or run.checks for run in comparison.runs):
        raise UsageError("nothing to compare: none of the runs has completed a step")
    facts = as_dict(comparison) | {"figure": str(out)}
    if costs:
        from bltoolbox.reports.compare.images import draw_sheet, restore_rows

        rows = restore_rows(comparison, costs, image, open_registry(plugin))
        facts |= {"images_figure": str(sheet), "images": [row.as_dict() for row in rows]}
        save_figure(draw_sheet(rows, costs), sheet)
    save_figure(draw_curves(comparison), out)
    if as_json:
        print_json(facts)
        return
    _print_tables(comparison)
    say(" and ".join([str(out), *([str(sheet)] if costs else [])]) + " written")


def _print_tables(comparison: Comparison) -> None:
    from bltoolbox.cli.display.tables import print_rows
    from bltoolbox.reports.compare.comparison import over, to_reach

    rows = [
        (
            "setting",
            "runs",
            f"best {comparison.quality}",
            "chosen θ, test",
            "final loss",
            "computations",
            "seconds",
        )
    ]
    metric, form = comparison.metric, f".{comparison.metric.digits}f"
    for group in comparison.groups:
        finished = sum(run.finished for run in group.runs)
        count = str(finished) if finished == len(group.runs) else f"{finished} of {len(group.runs)}"
        rows.append(
            (
                group.label,
                count,
                _shown(over(group, lambda run: run.best(comparison.images, metric)), form),
                _shown(over(group, lambda run: run.tested(metric)), form),
                _shown(over(group, comparison.final_loss), ".4g"),
                _shown(over(group, lambda run: run.computations), ",.0f", spread=False),
                _shown(over(group, lambda run: run.seconds), ".1f", spread=False),
            )
        )
    print_rows(rows, title=f"Finished runs; {metric.title}, mean and range over the runs of a setting")
    if not comparison.levels:
        return
    axes: tuple[Axis, ...] = ("computations", "seconds")
    forms = {"computations": ",.0f", "seconds": ".1f"}
    heading = [f"{axis} to {level:g} {metric.unit}".strip() for axis in axes for level in comparison.levels]
    table: list[Sequence[str]] = [("setting", *heading)]
    for group in comparison.groups:
        cells = [
            _reached(over(group, to_reach(comparison, level, axis)), group, forms[axis])
            for axis in axes
            for level in comparison.levels
        ]
        table.append((group.label, *cells))
    show("")
    print_rows(table, title=f"Cost until a check reaches a {comparison.quality}")


def _shown(figure: Spread | None, form: str, spread: bool = True) -> str:
    if figure is None:
        return "–"
    mean, low, high = (format(value, form) for value in (figure.mean, figure.low, figure.high))
    return f"{mean} ({low} to {high})" if spread and low != high else mean


def _reached(figure: Spread | None, group: Group, form: str) -> str:
    if figure is None:
        return "–"
    share = "" if figure.count == len(group.runs) else f" ({figure.count} of {len(group.runs)})"
    return format(figure.mean, form) + share
