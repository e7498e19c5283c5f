"""The progress of a run on stderr, only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.printable import printable
from bltoolbox.restoration.results import Check, RunResult

if TYPE_CHECKING:
    from bltoolbox.bilevel.records import Theta
    from bltoolbox.training.experiment import Experiment


def say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)


class Progress(Listener):
    """A bar over the budget with the figures of the last step."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            disable=quiet or not (console.is_terminal or console.is_jupyter),
        )
        self.quality = ""
        self.task: TaskID | None = None
        self.quiet = quiet

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def started(self, experiment: Experiment) -> None:
        self.limit = experiment.recipe.budget.computations
        self.task = self.bar.add_task("preparing", total=1.0, figures="")

    def phase(self, sentence: str) -> None:
        if self.task is not None:
            self.bar.update(self.task, description=printable(sentence), figures="")
        elif not self.quiet:  # reported before the run starts, e.g. that a checkpoint was skipped
            say(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        loss = "–" if record["loss"] is None else f"{record['loss']:.4g}"
        spent = f"{record['computations']:,.0f}" + (f"/{self.limit:,.0f}" if self.limit else "")
        iterations = record["computations"] / max(1, record["step"] * max(1, record["batch"]))
        assert self.task is not None
        self.bar.update(
            self.task,
            description=f"step {record['step']}",
            completed=fraction,
            figures=f"{spent} computations  loss {loss}{self.quality}  {iterations:.0f} it/sample",
        )

    def checked(self, check: Check, theta: Theta) -> None:
        if check.validation is not None:
            self.quality = f"  {check.metric.label} {check.metric.show(check.validation)}"


class Log(Listener):
    """One line per check, for logs."""

    def __enter__(self) -> Self:
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def phase(self, sentence: str) -> None:
        self._say(sentence)

    def checked(self, check: Check, theta: Theta) -> None:
        self._say(str(check))

    def finished(self, result: RunResult) -> None:
        self._say(result.status)

    def _say(self, sentence: str) -> None:
        say(f"{time.perf_counter() - self.began:8.1f} s  {sentence}")
