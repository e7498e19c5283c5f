"""The tables of the report: a column for each figure of several runs, the ladder of one run, the ledger. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bltoolbox.config.sections import task_noun
from bltoolbox.reports.html.facts import LEDGER, RunFacts, duration
from bltoolbox.runs.metric import most_common


@dataclass(frozen=True)
class Ladder:
    """The metric as bars, from the measured images upwards: key, name, width in percent and value of each."""

    caption: str
    rows: list[tuple[str, str, str, str]]


def ladder(one: RunFacts) -> Ladder | None:
    """None where there is nothing to compare the result with."""
    metric, steps = one.metric, one.qualities()
    if len(steps) < 2:
        return None
    values = [value for _, _, value in steps]
    least = 50 * 10.0**-metric.digits
    low = min(values) - 0.35 * max(max(values) - min(values), least)
    widths = [f"{100 * (value - low) / (max(values) - low):.2f}" for value in values]
    count = one.environment().get("images", {})
    sets = count.get("evaluation") if isinstance(count, dict) else None
    count = sets[0] if isinstance(sets, list) and sets else None
    noun = f"evaluation {task_noun(one.run.recipe)}s"
    caption = f"mean over {count} {noun}" if count else f"mean over the {noun}"
    rows = [
        (key, name, width, metric.number(value))
        for (key, name, value), width in zip(steps, widths, strict=True)
    ]
    return Ladder(caption, rows)


@dataclass(frozen=True)
class Column:
    """One figure of all runs, and the number of the run with the best one."""

    name: str
    cells: list[str]
    best: int | None = None


def columns(runs: Sequence[RunFacts]) -> list[Column]:
    """The outcome of each run."""
    made: list[Column] = []
    metric = most_common([one.metric for one in runs])
    form = f".{metric.digits}f"

    def add(name: str, values: Iterable[float | None], form: str, best: Any = None) -> None:
        found = list(values)
        known = [value for value in found if value is not None]
        if known:
            winner = found.index(best(known)) if best and len(known) > 1 else None
            cells = ["–" if value is None else format(value, form) for value in found]
            made.append(Column(name, cells, winner))

    add(f"Test {metric.label}", (one.run.tested(metric) for one in runs), form, metric.best)
    add("Best at a check", (one.run.best("evaluation", metric) for one in runs), form, metric.best)
    add(f"Validation {metric.label}", (one.run.validated(metric) for one in runs), form, metric.best)
    add("Final loss", (one.final_loss() for one in runs), ".4g", min)
    add("Steps", (one.run.step_count for one in runs), ",.0f")
    add("Computations", (one.run.computations for one in runs), ",.0f")
    times = ["–" if one.run.seconds is None else duration(one.run.seconds) for one in runs]
    return [*made, Column("Time", times)]


def ledger(runs: Sequence[RunFacts]) -> list[tuple[str, str, list[float | None]]]:
    """Name, meaning and the count of each run, for the entries that are not zero everywhere."""
    found = [one.ledger() for one in runs]
    return [
        (name, what, [one.get(key) for one in found])
        for key, (name, what) in LEDGER.items()
        if any(one.get(key) for one in found)
    ]
