"""Several processes for ``blt run`` and ``blt resume``: starting them, and being one of them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from bltoolbox.cli.common import DEBUGGING, say
from bltoolbox.config.names import RECIPE_FILE
from bltoolbox.distributed.launch import Launcher, Place, invocation, may_restart, rank_timeout
from bltoolbox.errors import BltError, UsageError, explain

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.distributed.ranks import Ranks

T = TypeVar("T")


def to_launch(nproc: int | None) -> bool:
    """Whether this process starts others instead of doing the work."""
    if nproc is not None and Place.here().size > 1:
        raise UsageError(f"this is already one of {Place.here().size} processes; omit --nproc")
    rank_timeout()
    return nproc is not None and nproc > 1


def launch(arguments: Sequence[str], count: int | None, directory: Path) -> NoReturn:
    """Run as ``count`` processes, and exit with their code."""
    launcher = Launcher(arguments, count or 1)
    code = launcher.run()
    killed = launcher.killed()
    if killed and not launcher.signals:
        ends = ", ".join(
            f"rank {rank} (process {launcher.processes[rank].pid}) was killed by {name}"
            for rank, name in killed.items()
        )
        hint = " (out of memory?)" if "SIGKILL" in killed.values() else ""
        say(f"error: {ends}{hint}; the run stopped; {next_command(directory, count or 1)}")
    raise typer.Exit(code)


def passed_on(
    quiet: bool, verbose: bool, as_json: bool, debug: bool, plugin: Sequence[Path] | None
) -> list[str]:
    """The flags that a process passes to those it starts."""
    flags = {"--quiet": quiet, "--verbose": verbose, "--json": as_json, "--debug": debug or DEBUGGING.get()}
    files = [word for file in plugin or () for word in ("--plugin", str(file))]
    return [name for name, on in flags.items() if on] + files


def resume_command(path: Path, size: int) -> str:
    """The command that resumes a run."""
    return f"blt resume {shlex.quote(str(path))}" + (f" --nproc {size}" if size > 1 else "")


def next_command(path: Path, size: int) -> str:
    """What to do after a run has stopped."""
    from bltoolbox.runs.history import has_checkpoint

    if has_checkpoint(path):
        return f"continue from the last checkpoint with: {resume_command(path, size)}"
    return "there is no checkpoint to resume from; start the run again" + (
        " with --overwrite" if path.exists() else ""
    )


@contextlib.contextmanager
def reporting_once() -> Iterator[None]:
    """Rank 0 reports errors; other ranks report only what rank 0 cannot know."""
    place = Place.here()
    try:
        yield
    except Exception as error:
        if place.rank == 0 or isinstance(error, typer.Exit):
            raise
        if DEBUGGING.get() or not getattr(error, "told", False):
            say(f"rank {place.rank}: error: {explain(error)}", lines=True)
        raise typer.Exit(error.exit_code if isinstance(error, BltError) else 1) from error


@contextlib.contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """An error in here affects all ranks of a machine alike: the first of them reports it."""
    try:
        yield
    except BltError as error:
        error.told = Place.here().local > 0
        raise


def left_by_this_run(path: Path, recipe: Recipe) -> bool:
    """Whether torchrun restarted these processes and a directory contains their earlier work."""
    if Place.here().restarts == 0:
        return False
    from bltoolbox.config.reading import RECIPE, read_text
    from bltoolbox.runs.history import is_run
    from bltoolbox.runs.layout import Manifest

    if not is_run(path) or Manifest(path).started_by != invocation():
        return False
    return read_text(path / RECIPE_FILE, RECIPE, follow=False, errors="replace") == recipe.to_yaml()


def was_restarted(ranks: Ranks, path: Path, recipe: Recipe) -> bool:
    """Whether the directory contains our own earlier run."""
    if Place.here().restarts == 0:
        return False
    from bltoolbox.runs.history import has_checkpoint

    usable = left_by_this_run(path, recipe) and has_checkpoint(path)
    return bool(ranks.gather("restarted", usable)[0])


def refuse_nameless(out: Path | None) -> None:
    """A run that torchrun may restart needs a fixed directory."""
    if out is None and may_restart():
        raise UsageError("give a run directory with -o, so that a restart by torchrun finds the earlier run")
