"""``blt run`` and ``blt resume``: from a recipe to a learned regularizer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, show, split_one
from bltoolbox.cli.completion import complete_recipe
from bltoolbox.cli.processes import (
    launch,
    left_by_this_run,
    next_command,
    passed_on,
    refuse_nameless,
    reporting_once,
    same_on_all_ranks,
    to_launch,
    was_restarted,
)
from bltoolbox.distributed.launch import Place

if TYPE_CHECKING:
    from bltoolbox.bilevel.events import Listener
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.config.registry import Registry
    from bltoolbox.distributed.ranks import Ranks
    from bltoolbox.reports.progress import Log, Progress
    from bltoolbox.restoration.results import RunResult
    from bltoolbox.training.experiment import Experiment
    from bltoolbox.training.resume import Reopened
    from bltoolbox.training.run_dir import RunDirectory


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the summary, no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every check on stderr.")]
Processes = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="Share the work among N processes (docs/scale.md)."),
]


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("run", rich_help_panel="Train")(run)
    app.command("resume", rich_help_panel="Train")(resume)


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...",
            help="A recipe file or the name of a shipped recipe; overrides.",
            autocompletion=complete_recipe,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="RUN_DIR", help="Output directory; default runs/<recipe>/<time>."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:1; same as device=D.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Same as seed=N.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe; do not train or write anything.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in RUN_DIR; keep its other files.")
    ] = False,
    nproc: Processes = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Write a profiler trace of the first steps to RUN_DIR/trace.json."),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Train a model from a recipe and evaluate it.

    For example: blt run denoise sampler.size=8 device=cpu
    """
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.training.resume import reopen

    source, overrides = split_one(arguments, "blt run takes one recipe")
    overrides += [
        f"{key}={value}" for key, value in (("device", device), ("seed", seed)) if value is not None
    ]
    with reporting_once():
        with same_on_all_ranks():
            registry = open_registry(plugin)
            recipe = load_recipe(source, overrides, registry)
            if dry_run:
                _dry_run(_assemble(recipe, registry), as_json)
                return
            refuse_nameless(out)
            several = to_launch(nproc)
        if several:
            out = out or _fresh(recipe)
            command = ["run", source, *overrides, "--out", str(out)]
            command += ["--overwrite"] * overwrite + ["--profile"] * profile
            launch([*command, *passed_on(quiet, verbose, as_json, debug, plugin)], nproc, out)
        from bltoolbox.distributed.ranks import joined
        from bltoolbox.reports.writer import ReportWriter
        from bltoolbox.training.driver import run_in
        from bltoolbox.training.run_dir import RunDirectory

        with joined() as ranks:
            experiment = ranks.in_step("recipe", lambda: _assemble(recipe, registry, ranks))
            path = Path(ranks.gather("name", str(out or _fresh(recipe)))[0])
            if was_restarted(ranks, path, recipe):
                with reopen(path, (), registry, ranks) as reopened:
                    _continue(reopened, ranks, quiet, verbose, as_json)
                return
            # A start that torchrun repeats left a directory but no checkpoint.
            may_replace = overwrite or left_by_this_run(path, recipe)
            directory = RunDirectory(path, overwrite=may_replace, ranks=ranks)
            with _display(quiet or as_json, verbose) as display, _resume_hint(directory, ranks):
                result = run_in(
                    directory,
                    experiment,
                    [display, *_profilers(profile, directory), ReportWriter(path, [display])],
                )
            _show(result, as_json, ranks)


def _profilers(wanted: bool, directory: RunDirectory) -> list[Listener]:
    if not wanted:
        return []
    from bltoolbox.config.names import TRACE_FILE
    from bltoolbox.training.profiling import Profile

    directory.extra_files.append(TRACE_FILE)
    return [Profile(directory.path / TRACE_FILE)]


def resume(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR [KEY=VALUE]...", help="A run directory; overrides may only raise its budget."
        ),
    ],
    nproc: Processes = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Resume an interrupted run, or extend a finished one.

    For example: blt resume runs/denoise/2026-01-31_12-00-00 budget.computations=2e5
    """
    from bltoolbox.training.resume import reopen

    source, overrides = split_one(arguments, "blt resume takes one run directory")
    path = Path(source)
    if to_launch(nproc):
        command = ["resume", str(path), *overrides, *passed_on(quiet, verbose, as_json, debug, plugin)]
        launch(command, nproc, path)
    with reporting_once():
        with same_on_all_ranks():
            registry = open_registry(plugin)
        from bltoolbox.distributed.ranks import joined

        with joined() as ranks, reopen(path, overrides, registry, ranks) as reopened:
            _continue(reopened, ranks, quiet, verbose, as_json)


def _continue(reopened: Reopened, ranks: Ranks, quiet: bool, verbose: bool, as_json: bool) -> None:
    if reopened.summary is not None:
        if ranks.first:
            path, status = reopened.directory.path, reopened.summary["status"]
            say(
                f"{path} is finished: {status}; raise its budget to train further, e.g. budget.computations=2e5"
            )
            if as_json:
                print_json(reopened.summary)
        return
    from bltoolbox.reports.writer import ReportWriter
    from bltoolbox.training.driver import resume_in

    directory = reopened.directory
    with _display(quiet or as_json, verbose) as display, _resume_hint(directory, ranks):
        result = resume_in(directory, reopened.experiment, [display, ReportWriter(directory.path, [display])])
    _show(result, as_json, ranks)


def _dry_run(experiment: Experiment, as_json: bool) -> None:
    if as_json:
        size = experiment.model(experiment.theta).size
        print_json({"recipe": experiment.recipe.to_dict(), "theta_size": size})
    else:
        show(experiment.recipe.to_yaml(), nl=False, lines=True)


def _show(result: RunResult, as_json: bool, ranks: Ranks) -> None:
    if not ranks.first:
        return
    if as_json:
        print_json(result.as_dict())
        return
    from bltoolbox.cli.display.summary import print_summary

    print_summary(result)


def _assemble(recipe: Recipe, registry: Registry, ranks: Ranks | None = None) -> Experiment:
    from bltoolbox.distributed.ranks import ALONE
    from bltoolbox.training.assemble import assemble

    return assemble(recipe, registry, ranks or ALONE)


def _fresh(recipe: Recipe) -> Path:
    from bltoolbox.training.run_dir import fresh_directory

    return fresh_directory(Path("runs"), recipe.name)


def _display(quiet: bool, verbose: bool) -> Log | Progress:
    from bltoolbox.reports.progress import Log, Progress

    if Place.here().rank > 0:
        return Progress(quiet=True)
    if verbose or not (quiet or sys.stderr.isatty()):
        return Log(verbose=verbose)
    return Progress(quiet=quiet)


@contextlib.contextmanager
def _resume_hint(directory: RunDirectory, ranks: Ranks) -> Iterator[None]:
    """When a run stops early, print how to resume it. An interrupted run exits with 130 or 143."""
    from bltoolbox.distributed.ranks import RankLost
    from bltoolbox.distributed.signals import Interrupted, handled

    complete = False
    try:
        with handled(answers=ranks.size == 1):
            yield
            complete = True
    except Interrupted as stop:
        if ranks.first:
            state = f"the run is complete: {directory.path}"
            say(f"interrupted; {state if complete else next_command(directory.path, ranks.size)}")
        raise typer.Exit(stop.exit_code) from None
    except RankLost as error:
        raise RankLost(f"{error}; {next_command(directory.path, ranks.size)}") from error
