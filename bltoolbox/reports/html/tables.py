"""The tables of the report: a column for each figure of several runs, the ladder of one run, the ledger. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bltoolbox.config.problem_keys import task_noun
from bltoolbox.reports.html.facts import LEDGER, RunFacts, duration
from bltoolbox.runs.metric import Metric, most_common


@dataclass(frozen=True)
class Rung:
    """One row of the ladder: its place on the axis in percent, and its values of all metrics."""

    key: str
    name: str
    place: str
    value: str
    others: list[str]


@dataclass(frozen=True)
class Ladder:
    """The metric as dots on one axis, from the measured images upwards; the other metrics as numbers."""

    caption: str
    rows: list[Rung]
    others: list[Metric]
    #: The ends of the axis.
    low: str
    high: str


def measured(runs: Sequence[RunFacts]) -> list[Metric]:
    """The metrics of the runs, the deciding one first."""
    first = most_common([facts.metric for facts in runs])
    others = {metric.name: metric for facts in runs for metric in facts.run.metrics}
    return [first, *(metric for name, metric in others.items() if name != first.name)]


def ladder(facts: RunFacts) -> Ladder | None:
    """None where there is nothing to compare the result with."""
    metric, steps = facts.metric, facts.qualities()
    if len(steps) < 2:
        return None
    values = [value for _, _, value in steps]
    low, high = min(values), max(values)
    # Equal values stand in the middle; the ends of the axis are those of the data, and are written below it.
    span = high - low
    places = [f"{4 + 92 * (value - low) / span if span else 50:.2f}" for value in values]
    others = [
        other
        for other in facts.run.metrics
        if other.name != metric.name and facts.run.tested(other) is not None
    ]
    rows = [
        Rung(key, name, place, metric.number(value), [_other(facts, other, key) for other in others])
        for (key, name, value), place in zip(steps, places, strict=True)
    ]
    return Ladder(_over(facts), rows, others, metric.number(low), metric.number(high))


#: The name of a row in the summary of a run.
_WHEN = {"measured": "before", "initial": "initial", "baseline": "baseline", "learned": "after"}


def _other(facts: RunFacts, metric: Metric, key: str) -> str:
    return metric.number(facts.run.tested(metric, _WHEN[key]))


def _over(facts: RunFacts) -> str:
    """The images that the mean is taken over."""
    images = facts.environment().get("images", {})
    sets = images.get("evaluation") if isinstance(images, dict) else None
    count = sets[0] if isinstance(sets, list) and sets else None
    noun = f"evaluation {task_noun(facts.run.recipe)}s"
    return f"mean over {count} {noun}" if count else f"mean over the {noun}"


@dataclass(frozen=True)
class Column:
    """One figure of all runs, and the number of the run with the best one."""

    name: str
    cells: list[str]
    best: int | None = None


def columns(runs: Sequence[RunFacts]) -> list[Column]:
    """The outcome of each run."""
    made: list[Column] = []
    metric = most_common([facts.metric for facts in runs])
    form = f".{metric.digits}f"

    def add(name: str, values: Iterable[float | None], form: str, best: Any = None) -> None:
        figures = list(values)
        numbers = [value for value in figures if value is not None]
        if numbers:
            winner = figures.index(best(numbers)) if best and len(numbers) > 1 else None
            cells = ["–" if value is None else format(value, form) for value in figures]
            made.append(Column(name, cells, winner))

    for entry in measured(runs):
        values = (facts.run.tested(entry) for facts in runs)
        add(f"Test {entry.label}", values, f".{entry.digits}f", entry.best)
    add("Best at a check", (facts.run.best("evaluation", metric) for facts in runs), form, metric.best)
    add(f"Validation {metric.label}", (facts.run.validated(metric) for facts in runs), form, metric.best)
    add("Final loss", (facts.final_loss() for facts in runs), ".4g", min)
    add("Steps", (facts.run.step_count for facts in runs), ",.0f")
    add("Computations", (facts.run.computations for facts in runs), ",.0f")
    times = ["–" if facts.run.seconds is None else duration(facts.run.seconds) for facts in runs]
    return [*made, Column("Time", times)]


def ledger(runs: Sequence[RunFacts]) -> list[tuple[str, str, list[float | None]]]:
    """Name, meaning and the count of each run, for the entries that are not zero everywhere."""
    ledgers = [facts.ledger() for facts in runs]
    return [
        (name, what, [entries.get(key) for entries in ledgers])
        for key, (name, what) in LEDGER.items()
        if any(entries.get(key) for entries in ledgers)
    ]
