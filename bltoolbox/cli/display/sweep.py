"""The display of a sweep: one line per cell on stderr while it runs, and a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bltoolbox.cli.common import say
from bltoolbox.cli.display.tables import number, print_rows
from bltoolbox.config.printable import printable
from bltoolbox.runs.history import glance
from bltoolbox.runs.metric import Metric
from bltoolbox.training.sweep.plan import Planned, State

_STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "bold",
    State.FINISHED: "green",
    State.INTERRUPTED: "yellow",
    State.KILLED: "red",
    State.FAILED: "red",
    State.PRUNED: "dim",
}
#: Seconds between two readings of the logs.
_PAUSE = 0.5


class Display:
    """Lines that are redrawn on a terminal; elsewhere one line whenever the state of a cell changes."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self.quiet = quiet
        self.height = console.height
        self.live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal and not quiet
            else None
        )
        self.known: dict[str, State] = {}
        self.shown_at = 0.0

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, sentence: str) -> None:
        if self.live:
            self.live.console.print(Text(printable(sentence)), soft_wrap=True)
        elif not self.quiet:
            say(sentence)

    def show(self, cells: Sequence[Planned]) -> None:
        states = {cell.name: cell.state for cell in cells}
        if not self.known:
            self._begin(cells)
        if self.live:
            if time.monotonic() - self.shown_at >= _PAUSE or states != self.known:
                self.live.update(self._picture(cells), refresh=True)
                self.shown_at = time.monotonic()
        elif not self.quiet:
            for cell in cells:
                if cell.state is not self.known.get(cell.name, State.WAITING):
                    say(f"{cell.name}: {cell.state}" + (f": {cell.reason}" if cell.reason else ""))
        self.known = states

    def _begin(self, cells: Sequence[Planned]) -> None:
        finished = sum(cell.state is State.FINISHED for cell in cells)
        self.known = {
            cell.name: cell.state if cell.state is State.FINISHED else State.WAITING for cell in cells
        }
        if finished:
            self.say(f"{finished} of {len(cells)} cells are already finished")

    def _picture(self, cells: Sequence[Planned]) -> Group:
        counts = {state: sum(cell.state is state for cell in cells) for state in State}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        table = Table.grid(padding=(0, 2))
        room = max(3, self.height - 3)
        for cell in cells if len(cells) <= room else _important(cells)[:room]:
            figures = ("", "", "")
            if cell.state in (State.RUNNING, State.FINISHED):
                far = glance(cell.path, cell.recipe)
                figures = (f"{100 * far.fraction:.0f} %", f"step {far.step}", printable(far.quality))
            words = (
                Text(printable(cell.name)),
                Text(cell.state, style=_STYLES[cell.state]),
                *map(Text, figures),
            )
            table.add_row(*words)
        return Group(table, Text(f"{len(cells)} cells: {summary}", style="dim"))


def _important(cells: Sequence[Planned]) -> list[Planned]:
    """If not all lines fit: running cells first, then failed, finished and waiting ones."""
    order = [
        *(State.RUNNING, State.FAILED, State.KILLED, State.INTERRUPTED),
        *(State.FINISHED, State.PRUNED, State.WAITING),
    ]
    return sorted(cells, key=lambda cell: order.index(cell.state))


def print_table(facts: Mapping[str, Any]) -> None:
    """Print every cell with its figures on stdout, then why some have none."""
    cells, metric = facts["cells"], Metric(**facts["metric"])
    kinds = {kind: f"{metric.name}_{kind}" for kind in ("validation", "test")}
    headings = [f"{kind} {metric.title}" for kind in kinds]
    rows = [("cell", "status", "steps", "computations", "seconds", *headings)]
    for cell in cells:
        rows.append(
            (
                cell["name"],
                cell["status"],
                number(cell["steps"], "d"),
                number(cell["computations"], ",d"),
                number(cell["seconds"], ".1f"),
                *(
                    metric.number(cell.get(key)) + _mark(facts[f"best_{kind}"], cell, cells)
                    for kind, key in kinds.items()
                ),
            )
        )
    print_rows(rows, left=2)
    for cell in cells:
        if cell["status"] not in ("finished", "waiting", "pruned"):
            log = f" ({cell['log']})" if cell["log"] else ""
            say(f"{cell['name']} {cell['status']}: {cell['reason'] or cell['status']}{log}")
    say(
        f"results in {facts['directory']}"
        + (f"; best: {facts['best']}" if len(cells) > 1 and facts["best"] else "")
    )


def _mark(best: str | None, cell: Mapping[str, Any], cells: Sequence[Any]) -> str:
    """The best cell of a column has an asterisk, the others a space."""
    if len(cells) < 2 or best is None:
        return ""
    return "*" if cell["name"] == best else " "
