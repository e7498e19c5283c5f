"""``blt sweep``: a grid of runs, which can be stopped and resumed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show, split_overrides
from bltoolbox.cli.completion import complete_grid
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.training.sweep.plan import Sweep


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("sweep", rich_help_panel="Train")(sweep)


def sweep(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=A,B,...]...",
            help="A recipe file or the name of a shipped recipe; values for each key.",
            autocompletion=complete_grid,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Output directory; default runs/<recipe>/sweep-<time>."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", metavar="N", min=1, help="Number of runs at a time.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every cell and print its command; write nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show only the table, no progress.")] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Run a recipe for every combination of given values.

    For example: blt sweep denoise upper_optimizer.step=1e-3,1e-2 seed=0,1,2 -o runs/steps --jobs 2

    A comma inside brackets, braces or quotes belongs to the value, so a value may be a list or a complete component:
    upper_optimizer={name: isgd, step: 1},maid. A key with one value is a plain override. A recipe with variants is run
    in all of them, unless variant=A,B names some. All cells are checked before the first one starts. Each cell runs in
    its own process and run directory; a failure does not stop the others.

    Repeat the command to continue: finished cells are skipped, interrupted cells are resumed, and failed cells are
    restarted, with the old run kept in set-aside. The grid may have grown. blt compare DIR plots the runs.
    """
    from bltoolbox.config.recipe import recipe_variants
    from bltoolbox.training.sweep.grid import parse_grid, with_variants
    from bltoolbox.training.sweep.plan import Sweep, fresh_sweep_directory, plan

    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError("blt sweep takes one recipe" + (f", got {', '.join(sources)}" if sources else ""))
    grid = with_variants(parse_grid(overrides), recipe_variants(sources[0]))
    registry = open_registry(plugin)
    planned = plan(sources[0], grid, registry)
    whole = Sweep(out or fresh_sweep_directory(Path("runs"), planned.name), planned, registry)
    if dry_run:
        _print_plan(whole, sources[0], as_json)
        return
    from bltoolbox.cli.display.sweep import Display, print_table
    from bltoolbox.training.sweep.jobs import Jobs

    with whole.opened(), Display(quiet) as display:
        signal = Jobs(whole, jobs, plugin or (), display).run()
    facts = _facts(whole)
    if as_json:
        print_json(facts)
    else:
        print_table(facts)
    if signal is not None:
        say(f"interrupted; to continue, repeat the command with -o {shlex.quote(str(whole.path))}")
        raise typer.Exit(128 + signal)
    raise typer.Exit(0 if all(cell["status"] == "finished" for cell in facts["cells"]) else 1)


def _facts(sweep: Sweep) -> dict[str, Any]:
    """A sweep as JSON; the best finished cell is chosen on the held-out images, if there are any."""
    from bltoolbox.runs.metric import most_common

    histories = [planned.history() for planned in sweep.cells]
    metric = most_common([run.metric for run in histories if run is not None])
    cells = [planned.as_dict(run, metric) for planned, run in zip(sweep.cells, histories, strict=True)]
    best: dict[str, str | None] = {}
    for kind in ("validation", "test"):
        values = {
            cell["name"]: cell[f"{metric.name}_{kind}"] for cell in cells if cell["status"] == "finished"
        }
        top = metric.best(values.values())
        best[kind] = (
            next((name for name, value in values.items() if value == top), None) if top is not None else None
        )
    return {
        "directory": str(sweep.path),
        "recipe": sweep.plan.name,
        "grid": sweep.plan.grid.values,
        "metric": metric.as_dict(),
        "best": best["validation"] or best["test"],
        "best_validation": best["validation"],
        "best_test": best["test"],
        "cells": cells,
    }


def _print_plan(sweep: Sweep, source: str, as_json: bool) -> None:
    if as_json:
        print_json(_facts(sweep))
        return
    for planned in sweep.cells:
        command = ["blt", "run", source, *planned.cell.overrides, "-o", str(planned.path)]
        show(shlex.join(command) + ("" if planned.state == "waiting" else f"  # {planned.state}"))
