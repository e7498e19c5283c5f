"""``blt run``: from a recipe to a learned regularizer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, say, split_overrides
from bltoolbox.errors import UsageError

if TYPE_CHECKING:
    from bltoolbox.experiment import Experiment, RunResult
    from bltoolbox.run_dir import RunDirectory


class Terminated(BaseException):
    """SIGTERM, as an exception, so that the run can say goodbye."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("run")(run)


def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]...", help="A file or a shipped recipe's name, and overrides."
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the summary.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every check on stderr.")] = False,
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
    result = _train(experiment, out, overwrite=overwrite, quiet=quiet or as_json, verbose=verbose)
    if as_json:
        print_json(result.as_dict())
    else:
        from bltoolbox.cli.summary import print_summary

        print_summary(result)


def _assemble(source: str, overrides: Sequence[str], plugin: Sequence[Path] | None) -> Experiment:
    from bltoolbox.recipe import load_recipe

    registry = open_registry(plugin)
    recipe = load_recipe(source, overrides, registry)
    from bltoolbox.assemble import assemble

    return assemble(recipe, registry)


def _train(
    experiment: Experiment, out: Path | None, *, overwrite: bool, quiet: bool, verbose: bool
) -> RunResult:
    from dataclasses import replace

    from bltoolbox.cli.progress import Log, Progress
    from bltoolbox.run_dir import RunDirectory, fresh_directory

    directory = RunDirectory(
        out or fresh_directory(Path("runs"), experiment.recipe.name), overwrite=overwrite
    )
    display = Log() if verbose else Progress(quiet=quiet)
    with _goodbye(directory), display:
        result = experiment.run([directory, display])
    return replace(result, run_dir=directory.path)


@contextlib.contextmanager
def _goodbye(directory: RunDirectory) -> Iterator[None]:
    """An interrupted run says where its θ is, and exits with 130 or 143."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        saved = directory.path / "checkpoints" / "last.safetensors"
        say(
            f"interrupted; the last θ is in {saved}"
            if saved.exists()
            else "interrupted before the first step"
        )
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
