"""The display of ``blt watch``: redrawn on a terminal; elsewhere one line whenever something happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bltoolbox.cli.common import show
from bltoolbox.config.printable import printable
from bltoolbox.reports.html.facts import duration
from bltoolbox.runs.watch import Snapshot, sparkline

_STYLES = {
    "finished": "green",
    "running": "bold cyan",
    "starting": "cyan",
    "interrupted": "yellow",
    "killed": "red",
    "failed": "red",
}
_NAMES = {
    "step_size": "step size",
    "adjoint_tol": "adjoint tol",
    "gradient_norm": "‖gradient‖",
    "distance_max": "distance ≤",
    "bound_mean": "error bound",
}


class WatchDisplay:
    """Prints on stdout, since this is the requested data."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.shown: dict[str, tuple[object, ...]] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.stop()

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        if self.console.is_terminal:
            self.live.update(self.picture(snapshots), refresh=True)
            return
        for one in snapshots:
            news = one.state, one.status, *(len(values) for values in one.quality.values())
            if self.shown.get(str(one.path)) != news:
                self.shown[str(one.path)] = news
                show(line(one))

    def end(self, snapshots: Sequence[Snapshot]) -> None:
        """Print what remains on the screen."""
        if self.console.is_terminal:
            self.live.stop()
            self.console.print(self.picture(snapshots))
            return
        for one in snapshots if len(snapshots) == 1 else ():
            for label, before, after in one.images:
                show(f"  {label}: {one.metric.show(before)} -> {one.metric.show(after)}")

    def picture(self, snapshots: Sequence[Snapshot]) -> RenderableType:
        if len(snapshots) == 1:
            return one_run(snapshots[0], min(100, self.console.width))
        room = max(3, self.console.height - 6)
        order = sorted(snapshots, key=lambda one: (not one.active, one.state == "finished"))
        chosen = snapshots if len(snapshots) <= room else order[:room]
        counts: dict[str, int] = {}
        for one in snapshots:
            counts[one.state] = counts.get(one.state, 0) + 1
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        return Group(_many(chosen), _text(f" {len(snapshots)} runs: {summary}", style="dim"))


def line(one: Snapshot) -> str:
    """A run on one line, for a log."""
    parts = [
        f"{one.name}: {one.status if one.state in ('failed', 'finished') else one.state}",
        f"step {one.step}",
    ]
    parts += [f"{100 * one.fraction:.0f} %"] if one.state != "finished" else []
    parts += [f"{one.computations:,.0f} computations", duration(one.seconds)]
    parts += [f"loss {one.loss:.4g}"] if one.loss is not None else []
    parts += [
        f"{name} {one.metric.label} {one.metric.show(values[-1])}" for name, values in one.quality.items()
    ]
    parts += [f"about {duration(one.left)} left"] if one.left is not None else []
    parts += [one.phase] if one.phase else []
    return ", ".join(parts)


def one_run(one: Snapshot, width: int) -> Panel:
    """A run in a box."""
    inside = Table.grid(padding=(0, 1))
    inside.add_column(style="dim", justify="right", no_wrap=True)
    inside.add_column()
    spark = max(10, width - 46)
    progress = f"{100 * one.fraction:3.0f} %  {duration(one.seconds)}"
    progress += f", about {duration(one.left)} left" if one.left is not None else ""
    progress += f", {one.phase}" if one.phase else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=1.0, completed=one.fraction, width=spark), _text(progress))
    inside.add_row("budget", bar)
    if one.losses:
        inside.add_row("loss", _curve(sparkline(one.losses, spark, log=True), f"{one.loss:.4g}", "blue"))
    metric = one.metric
    for name, values in one.quality.items():
        said = f"{metric.show(values[-1])}, best {metric.number(metric.best(values))}"
        label = _text(f"{name} {metric.label}")
        inside.add_row(label, _curve(sparkline(values, spark), said, "magenta"))
    figures = [f"step {one.step:,}", f"{one.computations:,.0f} computations"]
    figures += [f"{one.iterations:.1f} iterations/sample"] if one.iterations is not None else []
    figures += [f"{_NAMES.get(name, name)} {value:.4g}" for name, value in one.last.items()]
    inside.add_row("last step", _text(" · ".join(figures)))
    if one.images:
        shown = [
            f"{label} {metric.show(before)} → {metric.show(after)}" for label, before, after in one.images
        ]
        inside.add_row("images", _text(" · ".join(shown)))
    if one.tested:
        known = [f"{name} {metric.show(value)}" for name, value in one.tested.items()]
        inside.add_row("test images", _text(", ".join(known)))
    title = Text.assemble(
        (f" {printable(one.name)} ", "bold"),
        (f"{printable(_status(one))} ", _STYLES.get(one.state, "yellow")),
    )
    return Panel(inside, title=title, title_align="left", box=box.ROUNDED, width=width, border_style="dim")


def _many(snapshots: Sequence[Snapshot]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("run", "state", "budget", "left", "step", "loss", "", "quality", ""):
        right = heading in ("budget", "left", "step")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for one in snapshots:
        values = one.quality.get("test") or one.quality.get("validation") or []
        table.add_row(
            _text(one.path.resolve().name),
            _text(one.state, style=_STYLES.get(one.state, "yellow")),
            f"{100 * one.fraction:.0f} %",
            "" if one.left is None else duration(one.left),
            f"{one.step:,}",
            "" if one.loss is None else f"{one.loss:.4g}",
            Text(sparkline(one.losses, 14, log=True), style="blue"),
            _text(f"{one.metric.label} {one.metric.show(values[-1])}" if values else ""),
            Text(sparkline(values, 10), style="magenta"),
        )
    return table


def _text(words: str, style: str = "") -> Text:
    """Text of a run directory, which may come from someone else."""
    return Text(printable(words), style=style)


def _curve(blocks: str, figures: str, style: str) -> Text:
    return Text.assemble((blocks, style), f"  {printable(figures)}")


def _status(one: Snapshot) -> str:
    if one.state == "finished":
        return f"finished: {one.status}"
    return one.status if one.status.startswith(one.state) else one.state
