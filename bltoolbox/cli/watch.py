"""``blt watch``: follow runs from another shell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bltoolbox.cli.common import Debug, Json, print_json, say

if TYPE_CHECKING:
    from bltoolbox.runs.watch import Snapshot, Watched


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("watch")(watch)


def watch(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_DIR]...", help="Run directories or sweeps; the newest run under runs/."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once instead of following.")] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how far runs are: loss, PSNR, the budget that is used and the time that is left.

    For example: blt watch runs/denoise/2026-01-31_12-00-00

    It reads the run directories alone, so it may be started and stopped at any time, with Ctrl-C. It ends with the
    runs, with exit code 0 when all of them have finished, else with 1. With --once or --json it looks once, and the
    exit code is 0.
    """
    from bltoolbox.runs.watch import Watched, find, goes_on, newest

    named = directories or [newest(Path("runs"))]
    known: dict[Path, Watched] = {}

    def look() -> list[Snapshot]:
        for path in find(named):
            known.setdefault(path, Watched(path))
        return [one.look() for one in known.values()]

    if as_json:
        found = [one.as_dict() for one in look()]
        print_json(found[0] if len(found) == 1 and len(named) < 2 else found)
        return
    from bltoolbox.cli.display.watch import WatchDisplay

    with WatchDisplay() as display:
        while True:
            # Before the look: what a sweep starts after it is then seen next time.
            more = goes_on(named)
            snapshots = look()
            display.show(snapshots)
            if once or not (more or any(one.going_on for one in snapshots)):
                break
            time.sleep(every)
        display.end(snapshots)
    if not once:
        _farewell(snapshots)


def _farewell(snapshots: Sequence[Snapshot]) -> None:
    """How they ended, where they did not end well."""
    bad = [one for one in snapshots if one.state != "finished"]
    for one in bad:
        say(f"{one.name}: {one.status if one.status.startswith(one.state) else one.state}")
    if bad or not snapshots:
        raise typer.Exit(1)
