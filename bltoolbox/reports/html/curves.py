"""The curves of a run for the report: every figure of every step, in the few numbers that a plot can show. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bltoolbox.config.names import METRICS_LOG
from bltoolbox.runs.history import IMAGES, RunHistory
from bltoolbox.runs.logs import by_step, number, read_lines
from bltoolbox.runs.metric import Metric
from bltoolbox.runs.settings import shown

#: Most points of a curve; a longer run is thinned out evenly.
POINTS = 2000
#: The possible x axes.
PLACES = ("computations", "seconds", "step")

Record = Mapping[str, Any]
Column = list[float | None]
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Line:
    """One figure: its key, its label, how it is read from a step, and how it is drawn."""

    key: str
    label: str
    find: Callable[[Record, Record], float | None]
    #: From the checks instead of the steps.
    checked: bool = False
    #: A faint line with its running mean on top.
    noisy: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share an axis; ``log`` means that a logarithmic axis suits them."""

    key: str
    title: str
    unit: str
    log: bool
    lines: tuple[Line, ...]
    #: Digits after the decimal point; None shows as many as a value needs.
    digits: int | None = None


def _of(name: str) -> Callable[[Record, Record], float | None]:
    return lambda now, before: number(now.get(name))


def _added(name: str) -> Callable[[Record, Record], float | None]:
    """The increase of a sum over samples in one step, per sample of its batch."""

    def find(now: Record, before: Record) -> float | None:
        total, size = number(now.get(name)), number(now.get("batch"))
        return (total - (number(before.get(name)) or 0.0)) / size if total is not None and size else None

    return find


LOSS = Chart("loss", "Training loss", "", True, (Line("loss", "loss of a step", _of("loss"), noisy=True),))
CHARTS = (
    Chart(
        "iterations",
        "Iterations per sample and step",
        "",
        False,
        (
            Line("lower", "lower level", _added("lower_iterations")),
            Line("linear", "linear system", _added("linear_iterations")),
        ),
    ),
    Chart(
        "tolerances",
        "Tolerances",
        "",
        True,
        (Line("tol", "lower level", _of("tol")), Line("adjoint_tol", "linear system", _of("adjoint_tol"))),
    ),
    Chart(
        "distances",
        "Distance to the lower-level minimiser",
        "",
        True,
        (
            Line("distance_mean", "mean over samples", _of("distance_mean")),
            Line("distance_max", "largest", _of("distance_max")),
        ),
    ),
    Chart(
        "bounds",
        "Error bound of the hypergradient",
        "",
        True,
        (
            Line("bound", "of the mean gradient", _of("bound")),
            Line("bound_mean", "mean over samples", _of("bound_mean")),
            Line("bound_max", "largest", _of("bound_max")),
        ),
    ),
    Chart("penalty", "Penalty of θ, part of the loss", "", False, (Line("penalty", "P(θ)", _of("penalty")),)),
    Chart("steps", "Step size", "", True, (Line("step_size", "step size", _of("step_size")),)),
    Chart(
        "gradients",
        "Norm of the hypergradient",
        "",
        True,
        (Line("gradient_norm", "norm", _of("gradient_norm")),),
    ),
)


def all_charts(metric: Metric, noun: str = "image") -> tuple[Chart, ...]:
    """The loss, the values of the checks on images or other tasks, and all other charts."""
    lines = tuple(
        Line(name, f"{name} {noun}s", _of(f"{images}_{metric.name}"), checked=True)
        for images, name in IMAGES.items()
    )
    quality = Chart(metric.name, metric.label, metric.unit, False, lines, metric.digits)
    return LOSS, quality, *CHARTS


def charts(metric: Metric, noun: str = "image") -> list[dict[str, Any]]:
    """The charts that have data, for the page."""
    return [
        {
            "key": chart.key,
            "title": chart.title,
            "unit": chart.unit,
            "digits": chart.digits,
            "log": chart.log,
            "lines": [
                {"key": line.key, "label": line.label, "noisy": line.noisy, "checked": line.checked}
                for line in chart.lines
            ],
        }
        for chart in all_charts(metric, noun)
    ]


def curves(run: RunHistory, metric: Metric) -> dict[str, Any]:
    """Each line of each chart as columns over the steps, or over the checks."""
    seconds = {entry.step: entry.seconds for entry in run.steps} | {0: 0.0}
    metrics = by_step(read_lines(run.path / METRICS_LOG, []))
    records: list[Record] = [metrics[step] for step in sorted(metrics)]
    befores: list[Record] = [{}, *records][: len(records)]
    steps = _thinned(list(zip(records, befores, strict=True)))
    checks: list[Record] = [entry.as_dict(metric) for entry in run.checks]
    placed = [({**now, "seconds": seconds.get(now["step"])}, before) for now, before in steps]
    lines = [line for chart in all_charts(metric) for line in chart.lines]
    return {
        "steps": _columns(placed, [line for line in lines if not line.checked]),
        "checks": _columns([(entry, {}) for entry in checks], [line for line in lines if line.checked]),
    }


def constants(runs: Sequence[dict[str, Any]], metric: Metric) -> dict[str, list[tuple[str, str]]]:
    """The charts in which nothing varies, neither in a run nor between runs: name and value of each of their lines."""
    constant: dict[str, list[tuple[str, str]]] = {}
    for chart in CHARTS:
        values = {
            line: {value for run in runs for value in run["steps"].get(line.key, ()) if value is not None}
            for line in chart.lines
        }
        present = {line: next(iter(states)) for line, states in values.items() if len(states) == 1}
        steps = max((len(run["steps"]["step"]) for run in runs), default=0)
        if steps > 1 and present and all(len(states) < 2 for states in values.values()):
            several = len(chart.lines) > 1
            constant[chart.key] = [
                (f"{chart.title}, {line.label}" if several else chart.title, shown(float(value)))
                for line, value in present.items()
            ]
    return constant


def _columns(rows: Sequence[tuple[Record, Record]], lines: Iterable[Line]) -> dict[str, Column]:
    places: dict[str, Column] = {place: [number(now.get(place)) for now, _ in rows] for place in PLACES}
    columns: dict[str, Column] = {
        line.key: [line.find(now, before) for now, before in rows] for line in lines
    }
    given = {key: column for key, column in columns.items() if any(value is not None for value in column)}
    return {key: [rounded(value) for value in column] for key, column in (places | given).items()}


def _thinned(rows: Sequence[_Row]) -> list[_Row]:
    """At most ``POINTS`` of them, including the first and the last."""
    if len(rows) <= POINTS:
        return list(rows)
    last = len(rows) - 1
    return [rows[round(k * last / (POINTS - 1))] for k in range(POINTS)]


def rounded(value: float | None) -> float | None:
    """Rounded to seven digits, which is exact enough for a plot."""
    if value is None:
        return None
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
