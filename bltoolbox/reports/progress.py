"""The progress of a run on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.printable import printable
from bltoolbox.restoration.results import Check, RunResult

if TYPE_CHECKING:
    from bltoolbox.bilevel.records import Theta
    from bltoolbox.training.experiment import Experiment

#: Seconds between two lines of a run that nobody watches on a terminal.
HEARTBEAT = 30.0
#: Columns of a bar, and of everything but the figures: what remains is for them.
_BAR, _FIXED = 12, 50


def say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """``0:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class State(Listener):
    """Where a run is: the last step, check and phase, in words. Displays are made of it."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.doing = "preparing"
        self.step = 0
        self.fraction = 0.0
        self.loss: float | None = None
        self.quality = ""
        self.spent = ""
        self.stepped_at: float | None = None
        self.first: tuple[float, float] | None = None

    def started(self, experiment: Experiment) -> None:
        self.limit = experiment.recipe.budget.computations

    def resumed(self, step: int) -> None:
        self.step = step

    def phase(self, sentence: str) -> None:
        self.doing = printable(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.step, self.fraction, self.loss = record["step"], fraction, record["loss"]
        self.doing = ""
        self.spent = f"{record['computations']:,.0f}" + (f"/{self.limit:,.0f}" if self.limit else "")
        self.stepped_at = time.monotonic()
        self.first = self.first or (self.stepped_at, fraction)

    def checked(self, check: Check, theta: Theta) -> None:
        if check.validation is not None:
            self.quality = f"{check.metric.label} {check.metric.show(check.validation)}"

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        """Seconds that training will take at the speed of this process; None while that is unknown."""
        if self.first is None or self.stepped_at is None or self.fraction <= self.first[1]:
            return None
        rate = (self.stepped_at - self.first[0]) / (self.fraction - self.first[1])
        return max(0.0, rate * (1 - self.fraction) - (time.monotonic() - self.stepped_at))

    def figures(self, room: int = 1000) -> str:
        """The most important figures that fit into ``room`` columns."""
        loss = "" if self.loss is None else f"loss {self.loss:.4g}"
        parts: list[str] = []
        for text in (self.quality, loss, self.spent and f"{self.spent} computations"):
            if text and len("  ".join([*parts, text])) <= room:
                parts.append(text)
        return "  ".join(parts)


class _Times(ProgressColumn):
    """``1:23, 0:40 left``."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def render(self, task: Task) -> Text:
        left = self.state.left
        more = f", {clock(left)} left" if left is not None and not self.state.doing else ""
        return Text(f"{clock(self.state.elapsed)}{more}", style="cyan", no_wrap=True)


class Progress(State):
    """A bar over the budget with the figures of the last step, on a terminal; it fits into 80 columns."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__()
        console = Console(stderr=True)
        self.room = max(0, console.width - _FIXED)
        self.bar = Bar(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=_BAR),
            TextColumn("{task.percentage:>3.0f}%"),
            _Times(self),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            disable=quiet or not (console.is_terminal or console.is_jupyter),
        )
        self.task: TaskID | None = None
        self.quiet = quiet

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def started(self, experiment: Experiment) -> None:
        super().started(experiment)
        if not self.bar.disable and experiment.run_dir is not None:
            say(f"run directory: {experiment.run_dir}")
        self.task = self.bar.add_task(self.doing, total=1.0, figures="")

    def phase(self, sentence: str) -> None:
        super().phase(sentence)
        if self.task is None:
            if not self.quiet:  # reported before the run starts, e.g. that a checkpoint was skipped
                say(sentence)
        elif len(self.doing) > self.bar.console.width - 30:
            say(sentence)  # too long for the line of the bar, and worth reading
        else:
            self.bar.update(self.task, description=self.doing, figures="")

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        super().stepped(record, seconds, fraction)
        assert self.task is not None
        self.bar.update(
            self.task,
            description=f"step {self.step}",
            completed=fraction,
            figures=self.figures(self.room),
        )


class Log(State):
    """Lines on stderr: where the run is written, its start, a sign of life every 30 seconds, its end.

    With ``verbose`` also every check and everything else that takes time.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        super().__init__()
        self.verbose = verbose
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.said_at = 0.0

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join()

    def started(self, experiment: Experiment) -> None:
        super().started(experiment)
        recipe = experiment.recipe
        if experiment.run_dir is not None:
            self._say(f"run directory: {experiment.run_dir}")
        noun = "images" if recipe.of_images else "tasks"
        self._say(
            f"started: {recipe.name} on {experiment.train.device}, {len(experiment.train)} training {noun}"
        )
        # A thread, since a step or an evaluation may take longer than the time between two lines.
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def resumed(self, step: int) -> None:
        super().resumed(step)
        self._say(f"resumed at step {step}")

    def phase(self, sentence: str) -> None:
        super().phase(sentence)
        if self.verbose or self.thread is None:
            self._say(sentence)

    def checked(self, check: Check, theta: Theta) -> None:
        super().checked(check, theta)
        if self.verbose:
            self._say(str(check))

    def aborted(self, theta: Theta, reason: str) -> None:
        self.ended.set()

    def finished(self, result: RunResult) -> None:
        self._say(f"{result.status} after {result.steps:,} steps")

    def _beat(self) -> None:
        while not self.ended.wait(max(0.05, HEARTBEAT - (time.monotonic() - self.said_at))):
            if time.monotonic() - self.said_at >= HEARTBEAT:
                self._say(self._sign_of_life())

    def _sign_of_life(self) -> str:
        left = self.left
        more = "" if left is None or self.doing else f"about {clock(left)} left"
        where = f"step {self.step}, {100 * self.fraction:.0f} % of the budget"
        return "; ".join(filter(None, (self.doing, where, self.figures(), more)))

    def _say(self, sentence: str) -> None:
        self.said_at = time.monotonic()
        say(f"{clock(self.elapsed):>8}  {sentence}")
