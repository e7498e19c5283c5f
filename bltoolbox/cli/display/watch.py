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
        for run in snapshots:
            news = run.state, run.status, *(len(values) for values in run.quality.values())
            if self.shown.get(str(run.path)) != news:
                self.shown[str(run.path)] = news
                show(line(run))

    def end(self, snapshots: Sequence[Snapshot]) -> None:
        """Print what remains on the screen."""
        if self.console.is_terminal:
            self.live.stop()
            self.console.print(self.picture(snapshots))
            return
        for run in snapshots if len(snapshots) == 1 else ():
            for label, before, after in run.images:
                show(f"  {label}: {run.metric.show(before)} -> {run.metric.show(after)}")

    def picture(self, snapshots: Sequence[Snapshot]) -> RenderableType:
        if len(snapshots) == 1:
            return one_run(snapshots[0], min(100, self.console.width))
        room = max(3, self.console.height - 6)
        order = sorted(snapshots, key=lambda run: (not run.active, run.state == "finished"))
        chosen = snapshots if len(snapshots) <= room else order[:room]
        counts: dict[str, int] = {}
        for run in snapshots:
            counts[run.state] = counts.get(run.state, 0) + 1
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        return Group(_many(chosen), _text(f" {len(snapshots)} runs: {summary}", style="dim"))


def line(run: Snapshot) -> str:
    """A run on one line, for a log."""
    parts = [
        f"{run.name}: {run.status if run.state in ('failed', 'finished') else run.state}",
        f"step {run.step}",
    ]
    parts += [f"{100 * run.fraction:.0f} %"] if run.state != "finished" else []
    parts += [f"{run.computations:,.0f} computations", duration(run.seconds)]
    parts += [f"loss {run.loss:.4g}"] if run.loss is not None else []
    parts += [
        f"{name} {run.metric.label} {run.metric.show(values[-1])}" for name, values in run.quality.items()
    ]
    parts += [f"about {duration(run.left)} left"] if run.left is not None else []
    parts += [run.phase] if run.phase else []
    return ", ".join(parts)


def one_run(run: Snapshot, width: int) -> Panel:
    """A run in a box."""
    inside = Table.grid(padding=(0, 1))
    inside.add_column(style="dim", justify="right", no_wrap=True)
    inside.add_column()
    spark = max(10, width - 46)
    progress = f"{100 * run.fraction:3.0f} %  {duration(run.seconds)}"
    progress += f", about {duration(run.left)} left" if run.left is not None else ""
    progress += f", {run.phase}" if run.phase else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=1.0, completed=run.fraction, width=spark), _text(progress))
    inside.add_row("budget", bar)
    if run.losses:
        inside.add_row("loss", _curve(sparkline(run.losses, spark, log=True), f"{run.loss:.4g}", "blue"))
    metric = run.metric
    for name, values in run.quality.items():
        text = f"{metric.show(values[-1])}, best {metric.number(metric.best(values))}"
        label = _text(f"{name} {metric.label}")
        inside.add_row(label, _curve(sparkline(values, spark), text, "magenta"))
    figures = [f"step {run.step:,}", f"{run.computations:,.0f} computations"]
    figures += [f"{run.iterations:.1f} iterations/sample"] if run.iterations is not None else []
    figures += [f"{_NAMES.get(name, name)} {value:.4g}" for name, value in run.last.items()]
    inside.add_row("last step", _text(" · ".join(figures)))
    if run.images:
        shown = [
            f"{label} {metric.show(before)} → {metric.show(after)}" for label, before, after in run.images
        ]
        inside.add_row("images", _text(" · ".join(shown)))
    if run.tested:
        results = [f"{name} {metric.show(value)}" for name, value in run.tested.items()]
        inside.add_row(f"test {run.noun}s", _text(", ".join(results)))
    title = Text.assemble(
        (f" {printable(run.name)} ", "bold"),
        (f"{printable(_status(run))} ", _STYLES.get(run.state, "yellow")),
    )
    return Panel(inside, title=title, title_align="left", box=box.ROUNDED, width=width, border_style="dim")


def _many(snapshots: Sequence[Snapshot]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("run", "state", "budget", "left", "step", "loss", "", "quality", ""):
        right = heading in ("budget", "left", "step")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for run in snapshots:
        values = run.quality.get("test") or run.quality.get("validation") or []
        table.add_row(
            _text(run.path.resolve().name),
            _text(run.state, style=_STYLES.get(run.state, "yellow")),
            f"{100 * run.fraction:.0f} %",
            "" if run.left is None else duration(run.left),
            f"{run.step:,}",
            "" if run.loss is None else f"{run.loss:.4g}",
            Text(sparkline(run.losses, 14, log=True), style="blue"),
            _text(f"{run.metric.label} {run.metric.show(values[-1])}" if values else ""),
            Text(sparkline(values, 10), style="magenta"),
        )
    return table


def _text(words: str, style: str = "") -> Text:
    """Text of a run directory, which may come from someone else."""
    return Text(printable(words), style=style)


def _curve(blocks: str, figures: str, style: str) -> Text:
    return Text.assemble((blocks, style), f"  {printable(figures)}")


def _status(run: Snapshot) -> str:
    if run.state == "finished":
        return f"finished: {run.status}"
    return run.status if run.status.startswith(run.state) else run.state
