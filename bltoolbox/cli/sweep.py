"""``blt sweep``: a grid of runs, which can be stopped and resumed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show, split_one
from bltoolbox.cli.completion import complete_grid
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.training.sweep.plan import Sweep
    from bltoolbox.training.sweep.resources import Resources


Grid = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE [KEY=A,B,...]...",
        help="A recipe file or the name of a shipped recipe; values for each key.",
        autocompletion=complete_grid,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Output directory; default runs/<recipe>/sweep-<time>."),
]
AtATime = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", metavar="N", min=1, help="Number of runs at a time; default 1, on Slurm all."
    ),
]
Search = Annotated[
    int | None,
    typer.Option(
        "--search", metavar="N", min=1, help="Search N cells with Optuna; KEY=LOW..HIGH are ranges."
    ),
]
On = Annotated[
    Literal["here", "slurm"], typer.Option("--on", help="Run on this machine or as jobs of Slurm.")
]
Partition = Annotated[str | None, typer.Option(metavar="P", help="With --on slurm: the partition.")]
TimeLimit = Annotated[
    str | None, typer.Option(metavar="T", help="With --on slurm: minutes or H:MM:SS per job.")
]
Gpus = Annotated[int | None, typer.Option(metavar="N", min=0, help="With --on slurm: GPUs per cell.")]
Cpus = Annotated[int | None, typer.Option(metavar="N", min=1, help="With --on slurm: processors per cell.")]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm", metavar="KEY=VALUE", help="With --on slurm: another option of sbatch; repeatable."
    ),
]
Emit = Annotated[bool, typer.Option("--emit", help="With --on slurm: write DIR/array.sh; submit nothing.")]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="With --on slurm: follow the jobs until they end.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check every cell and print its command; write nothing.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the table, no progress.")]


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("sweep", rich_help_panel="Train")(sweep)


def sweep(
    arguments: Grid,
    out: Out = None,
    jobs: AtATime = None,
    search: Search = None,
    on: On = "here",
    partition: Partition = None,
    time: TimeLimit = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    slurm: SlurmOptions = None,
    emit: Emit = False,
    wait: Wait = True,
    dry_run: DryRun = False,
    quiet: Quiet = False,
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

    --search N lets Optuna choose N cells instead: upper_optimizer.step=log:1e-4..1e-1 is a range on a logarithmic
    scale, sampler.size=4..32 one of whole numbers, a,b,c are choices. The metric on the held-out images decides, and
    cells that fall behind at a check are stopped.

    --on slurm submits one job per cell. A job that reaches its time limit or is preempted writes a checkpoint, is
    queued again and resumes. Ctrl-C leaves the jobs on the cluster; repeat the command to follow them.
    """
    source, overrides = split_one(arguments, "blt sweep takes one recipe")
    resources = _resources(on, partition, time, gpus, cpus, slurm, jobs, emit or not wait)
    registry = open_registry(plugin)
    if search is None:
        whole, signal = _planned(source, overrides, out, registry), None
    elif resources is None:
        whole, signal = _search(source, overrides, out, registry, search, jobs or 1, plugin, dry_run, quiet)
    else:
        raise UsageError(
            "--search runs on this machine only; remove --on slurm, or give a grid of values instead of --search"
        )
    if dry_run:
        _print_plan(whole, source, as_json)
        return
    if emit and resources is not None:
        _emit(whole, resources, plugin or ())
        return
    if search is None:
        signal = _run(whole, jobs or 1, resources, plugin or (), quiet, wait)
    _end(whole, signal, resources is not None, wait, as_json)


def _end(whole: Sweep, signal: int | None, on_cluster: bool, wait: bool, as_json: bool) -> NoReturn:
    """Print the results so far; the exit code is that of a signal, or whether all cells are complete."""
    from bltoolbox.cli.display.sweep import print_table

    facts = _facts(whole)
    if as_json:
        print_json(facts)
    elif wait:
        print_table(facts)
    if signal is not None:
        place = "the jobs stay on the cluster; to follow them" if on_cluster else "to continue"
        say(f"interrupted; {place}, repeat the command with -o {shlex.quote(str(whole.path))}")
        raise typer.Exit(128 + signal)
    complete = ("finished", "pruned") if wait else ("finished", "waiting", "running")
    raise typer.Exit(0 if all(cell["status"] in complete for cell in facts["cells"]) else 1)


def _resources(
    on: str,
    partition: str | None,
    time: str | None,
    gpus: int | None,
    cpus: int | None,
    slurm: list[str] | None,
    jobs: int | None,
    special: bool,
) -> Resources | None:
    """What a job asks for; None on this machine."""
    from bltoolbox.training.sweep.resources import Resources, further_options, minutes_of

    if on == "here":
        if special or any(value is not None for value in (partition, time, gpus, cpus, slurm)):
            raise UsageError(
                "--partition, --time, --gpus, --cpus, --slurm, --emit and --no-wait are for --on slurm"
            )
        return None
    minutes = None if time is None else minutes_of(time)
    return Resources(partition, minutes, gpus or 0, cpus or 1, jobs, further_options(slurm or ()))


def _planned(source: str, overrides: list[str], out: Path | None, registry: Registry) -> Sweep:
    """The sweep over a grid."""
    from bltoolbox.config.recipe import recipe_variants
    from bltoolbox.training.sweep.grid import parse_grid, with_variants
    from bltoolbox.training.sweep.plan import Sweep, fresh_sweep_directory, plan

    grid = with_variants(parse_grid(overrides), recipe_variants(source))
    planned = plan(source, grid, registry)
    return Sweep(out or fresh_sweep_directory(Path("runs"), planned.name), planned, registry)


def _run(
    whole: Sweep,
    jobs: int,
    resources: Resources | None,
    plugins: Sequence[Path],
    quiet: bool,
    wait: bool,
) -> int | None:
    """Run the cells of a grid, here or on a cluster; returns the number of a signal."""
    from bltoolbox.cli.display.sweep import Display
    from bltoolbox.training.sweep.jobs import Jobs

    if resources is None:
        with whole.opened(), Display(quiet) as display:
            return Jobs(whole, jobs, plugins, display).run()
    from bltoolbox.training.sweep.cluster import ClusterJobs, Queue

    queue = Queue(whole.path / "slurm", resources, "slurm")
    with whole.opened(), Display(quiet) as display:
        cluster = ClusterJobs(whole, queue, plugins, display)
        if names := cluster.submit():
            display.say(f"on Slurm as job {', '.join(names)}; output in {whole.path / 'logs'}")
        return cluster.follow() if wait else None


def _search(
    source: str,
    overrides: list[str],
    out: Path | None,
    registry: Registry,
    count: int,
    jobs: int,
    plugin: list[Path] | None,
    dry_run: bool,
    quiet: bool,
) -> tuple[Sweep, int | None]:
    """Search with Optuna; the sweep with its cells, and the number of a signal. A dry run has the corners as cells."""
    from bltoolbox.cli.display.sweep import Display
    from bltoolbox.config.recipe import recipe_variants
    from bltoolbox.training.sweep.plan import Sweep, fresh_sweep_directory, plan
    from bltoolbox.training.sweep.search import SearchJobs, Study, deciding_metric, recorded_cells
    from bltoolbox.training.sweep.space import parse_space

    space = parse_space(overrides, recipe_variants(source))
    corners = plan(source, space.grid, registry, space.corners())
    metric, seed = deciding_metric(source, space.corners()[0], registry)
    path = out or fresh_sweep_directory(Path("runs"), corners.name)
    if dry_run:
        return Sweep(path, corners, registry), None
    earlier = recorded_cells(path, space)
    cells = plan(source, space.grid, registry, earlier).cells if earlier else []
    whole = Sweep(path, replace(corners, cells=cells), registry)
    with whole.opened(), Display(quiet) as display:
        study = Study(whole, metric, seed)
        return whole, SearchJobs(whole, jobs, plugin or (), display, study, space, count, metric).run()


def _emit(sweep: Sweep, resources: Resources, plugins: Sequence[Path]) -> None:
    """Write a script for sbatch that runs the cells without a result."""
    from bltoolbox.config.names import SCRIPT_FILE
    from bltoolbox.runs.files import write_text
    from bltoolbox.training.sweep.jobs import start_arguments
    from bltoolbox.training.sweep.resources import array_script

    cells = [
        (cell.path.absolute(), start_arguments(sweep, cell))
        for cell in sweep.cells
        if cell.state == "waiting"
    ]
    if not cells:
        raise UsageError(f"all cells of {sweep.path} are finished or running")
    with sweep.opened():
        output = str(sweep.path.absolute() / "logs" / "slurm-%A_%a.log")
        directives = resources.directives(sweep.plan.name, len(cells), output)
        flags = [word for file in plugins for word in ("--plugin", str(file.absolute()))]
        text = array_script(directives, cells, [sys.executable, "-m", "bltoolbox"], flags)
        write_text(sweep.path / SCRIPT_FILE, text, within=sweep.path)
    show(str(sweep.path / SCRIPT_FILE))
    say(f"submit it with: sbatch {shlex.quote(str(sweep.path / SCRIPT_FILE))}")


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
