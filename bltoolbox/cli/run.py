"""``blt run`` and ``blt resume``: from a recipe to a learned regularizer."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, split_overrides
from bltoolbox.cli.completion import complete_recipe
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.cli.progress import Log, Progress
    from bltoolbox.experiment import Experiment
    from bltoolbox.listeners import RunResult
    from bltoolbox.run_dir import RunDirectory


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the summary.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every check on stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...",
            help="A file or a shipped recipe's name, and overrides.",
            autocompletion=complete_recipe,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="RUN_DIR", help="Where to write; runs/<recipe>/<time>."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="D", help="auto, cpu, cuda, cuda:1; as device=D.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As seed=N.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, print the resolved recipe, write nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a directory that is not empty.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Train what a recipe describes, and evaluate it.

    For example: blt run denoise sampler.size=8 device=cpu
    """
    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError("blt run takes one recipe" + (f", got {', '.join(sources)}" if sources else ""))
    overrides += [
        f"{key}={value}" for key, value in (("device", device), ("seed", seed)) if value is not None
    ]
    experiment = _assemble(sources[0], overrides, plugin)
    if dry_run:
        if as_json:
            print_json(
                {"recipe": experiment.recipe.to_dict(), "theta_size": experiment.model(experiment.theta).size}
            )
        else:
            typer.echo(experiment.recipe.to_yaml(), nl=False)
        return
    from bltoolbox.run_dir import RunDirectory, fresh_directory

    directory = RunDirectory(
        out or fresh_directory(Path("runs"), experiment.recipe.name), overwrite=overwrite
    )
    with _display(quiet or as_json, verbose) as display, _goodbye(directory):
        result = directory.run(experiment, [display])
    _show(result, as_json)


def resume(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RUN_DIR [KEY=VALUE]...", help="A run directory; only budgets may grow."),
    ],
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Go on with a run that was interrupted, or with a finished one whose budget grows.

    For example: blt resume runs/denoise/2026-01-31_12-00-00 budget.computations=2e5
    """
    from bltoolbox.resume import reopen

    sources, overrides = split_overrides(arguments)
    if len(sources) != 1:
        raise UsageError(
            "blt resume takes one run directory" + (f", got {', '.join(sources)}" if sources else "")
        )
    reopened = reopen(Path(sources[0]), overrides, open_registry(plugin))
    if reopened.summary is not None:
        say(
            f"{reopened.directory.path} is finished: {reopened.summary['status']}; let its budget grow to go on"
        )
        if as_json:
            print_json(reopened.summary)
        return
    with _display(quiet or as_json, verbose) as display, _goodbye(reopened.directory):
        result = reopened.directory.resume(reopened.experiment, [display])
    _show(result, as_json)


def _show(result: RunResult, as_json: bool) -> None:
    if as_json:
        print_json(result.as_dict())
        return
    from bltoolbox.cli.summary import print_summary

    print_summary(result)


def _assemble(source: str, overrides: Sequence[str], plugin: Sequence[Path] | None) -> Experiment:
    from bltoolbox.recipe import load_recipe

    registry = open_registry(plugin)
    recipe = load_recipe(source, overrides, registry)
    from bltoolbox.assemble import assemble

    return assemble(recipe, registry)


def _display(quiet: bool, verbose: bool) -> Log | Progress:
    from bltoolbox.cli.progress import Log, Progress

    return Log() if verbose else Progress(quiet=quiet)


@contextlib.contextmanager
def _goodbye(directory: RunDirectory) -> Iterator[None]:
    """An interrupted run has written a checkpoint; say how to go on, and exit with 130 or 143."""
    from bltoolbox.interrupts import Interrupted, handled

    try:
        with handled():
            yield
    except Interrupted as stop:
        say(f"interrupted; go on with: blt resume {shlex.quote(str(directory.path))}")
        raise typer.Exit(stop.exit_code) from None
