"""What ``blt apply`` shows: one bar over all pictures, a line for each, and a table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bltoolbox.cli.common import say, terminal_width
from bltoolbox.cli.display.tables import number, print_rows
from bltoolbox.config.printable import printable

if TYPE_CHECKING:
    from bltoolbox.restoration.apply import Outcome
    from bltoolbox.restoration.metrics import ImageMetric
    from bltoolbox.restoration.tiles import Progress

#: Columns of the bar for what is being done.
_LABEL = 42
#: Seconds between two lines where there is no terminal to draw a bar on.
_HEARTBEAT = 30.0


class Display:
    """How much of all pictures is done, by their numbers of pixels; ``show`` draws (part done, label), and ``message``
    prints a line above that."""

    def __init__(self, show: Callable[[float, str], None], message: Callable[[str], None] = say) -> None:
        self.show = show
        self.message = message
        self.weights: Sequence[int] = ()

    def say(self, label: str) -> None:
        """What is done before the first picture."""
        self.show(0.0, label)

    def picture(self, index: int, name: str) -> Progress:
        """The progress of one of the pictures."""
        total = max(1, sum(self.weights))
        before, own = sum(self.weights[:index]) / total, self.weights[index] / total
        place = f"{index + 1}/{len(self.weights)} " if len(self.weights) > 1 else ""

        def progress(part: float, phase: str) -> None:
            room = max(8, _LABEL - len(place) - len(phase) - 2)
            self.show(before + own * part, f"{place}{shortened(name, room)}: {phase}")

        return progress


@contextlib.contextmanager
def display(talk: bool) -> Iterator[Display]:
    """A bar on a terminal, elsewhere a line every half minute; nothing unless ``talk``."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    console = Console(stderr=True)
    if not talk or not console.is_terminal:
        yield Display(_heartbeat() if talk else lambda part, label: None)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("left"),
    )
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("", total=1.0)

        def draw(part: float, label: str) -> None:
            bar.update(task, completed=part, description=printable(label)[:_LABEL])

        yield Display(draw, lambda text: console.print(Text(printable(text))))


def _heartbeat() -> Callable[[float, str], None]:
    began = last = time.monotonic()

    def show(part: float, label: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _HEARTBEAT:
            return
        last = now
        left = f", about {(now - began) * (1 - part) / part:.0f} s left" if part > 0 else ""
        say(f"{label} ({part:.0%} done{left})")

    return show


def picture_line(outcome: Outcome, accuracy: bool = False) -> str:
    """What was done to a picture; with its certified ``accuracy`` where one was asked for."""
    from bltoolbox.restoration.noise_level import show_noise

    how = " (estimated)" if outcome.noise_estimated else ""
    facts = [] if outcome.noise is None else [f"noise {show_noise(outcome.noise)}{how}"]
    if (outcome.tiles or 1) > 1:
        facts.append(f"{outcome.tiles} tiles overlapping by {outcome.overlap} pixels")
    if accuracy and outcome.distance is not None:
        facts.append(f"certified: at most {outcome.distance:.1e} from the minimiser (RMS)")
    elif accuracy:
        facts.append("not certified: --tol bounds the gradient, since no strong convexity is known")
    return ": ".join(
        filter(None, (f"{outcome.input} → {outcome.output}", "; ".join([*facts, *outcome.notes])))
    )


def print_table(outcomes: Sequence[Outcome], metrics: Sequence[ImageMetric]) -> None:
    """The restored pictures, in the width of the terminal; names are shortened there, and whole elsewhere."""
    done = [outcome for outcome in outcomes if outcome.status == "restored"]
    heading = ["picture", "result", "size", "σ·255", "seconds", *(metric.label for metric in metrics)]
    figures = [
        [
            f"{outcome.width}×{outcome.height}",
            number(None if outcome.noise is None else 255 * outcome.noise, ".1f"),
            number(outcome.seconds, ".1f"),
            *(
                f"{metric.number(outcome.before[metric.name])} → {metric.number(outcome.after[metric.name])}"
                for metric in metrics
            ),
        ]
        for outcome in done
    ]
    names = [[outcome.input, outcome.output] for outcome in done]
    if (width := terminal_width()) is not None:
        cells = [max(map(len, column)) for column in zip(heading[2:], *figures, strict=True)]
        # Tables on a terminal have a space on both sides of a column.
        room = (width - sum(cells) - 2 * len(heading)) // 2
        names = [[shortened(Path(name).name, max(8, room)) for name in pair] for pair in names]
    print_rows([heading, *([*pair, *row] for pair, row in zip(names, figures, strict=True))], left=2)


def shortened(name: str, room: int) -> str:
    """A name with its middle cut out if it is too long: its beginning and its suffix tell it from others."""
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}…{name[len(name) - tail :]}"
