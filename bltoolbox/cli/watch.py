"""``blt watch``: follow runs from another shell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import Debug, Json, print_json, say
from bltoolbox.distributed.signals import Interrupted

if TYPE_CHECKING:
    from bltoolbox.runs.watch import Snapshot, Watched


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("watch", rich_help_panel="Look")(watch)


def watch(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR]...", help="Run directories or sweeps; default the newest run under runs/."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two updates.")
    ] = 1.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Follow the progress of runs.

    For example: blt watch runs/denoise/2026-01-31_12-00-00

    Shows loss, metric, the budget used and the time left. It only reads the run directories, so you can start and stop
    it (Ctrl-C) at any time. It exits when the runs end: with code 0 if all of them finished, else with 1. With --once
    or --json it prints the current state and exits with 0.
    """
    from bltoolbox.runs.watch import Watched, find, is_active, newest

    named = directories or [newest(Path("runs"))]
    watched: dict[Path, Watched] = {}

    def look() -> list[Snapshot]:
        for path in find(named):
            watched.setdefault(path, Watched(path))
        return [run.look() for run in watched.values()]

    if as_json:
        states = [snapshot.as_dict() for snapshot in look()]
        print_json(states[0] if len(states) == 1 and len(named) < 2 else states)
        return
    from bltoolbox.cli.display.watch import WatchDisplay

    with _until_interrupted(), WatchDisplay() as display:
        while True:
            # Read first: a run that the sweep starts afterwards is seen in the next update.
            more = is_active(named)
            snapshots = look()
            display.show(snapshots)
            if once or not (more or any(snapshot.active for snapshot in snapshots)):
                break
            time.sleep(every)
        display.end(snapshots)
    if not once:
        _report_unfinished(snapshots)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """Ctrl-C is the usual way to leave, and needs no message."""
    try:
        yield
    except Interrupted as stop:
        raise typer.Exit(stop.exit_code) from None


def _report_unfinished(snapshots: Sequence[Snapshot]) -> None:
    """Print how the runs ended that did not finish."""
    bad = [snapshot for snapshot in snapshots if snapshot.state != "finished"]
    for snapshot in bad:
        say(
            f"{snapshot.name}: {snapshot.status if snapshot.status.startswith(snapshot.state) else snapshot.state}"
        )
    if bad or not snapshots:
        raise typer.Exit(1)
