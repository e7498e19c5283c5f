"""Several runs side by side, without torch: groups of seeds, what distinguishes them, and their quality over time.

Runs whose resolved recipes differ only in ``seed``, in the seed of a problem's data, or in budget and checks, form one
group. Its curves are resampled on a common axis, where they have a mean and a range.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bltoolbox.runs.history import IMAGES, Images, RunHistory
from bltoolbox.runs.labels import short_labels
from bltoolbox.runs.metric import Metric, most_common
from bltoolbox.runs.settings import IRRELEVANT, labels, shown

Axis = Literal["computations", "seconds"]
#: Points (x, y) in the order of x.
Curve = list[tuple[float, float]]

#: Points of a mean curve.
_POINTS = 200
#: The running mean of the loss spans this share of a run, by default.
_SHARE = 0.05
#: Sections of a recipe that decide how long and how closely a run is followed, not its path.
_FOLLOWED = ("budget", "checkpoint")


@dataclass(frozen=True)
class Band:
    """The mean and the range of several curves, at common points."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: list[RunHistory]

    @property
    def title(self) -> str:
        """The label, with the number of runs."""
        return f"{self.label} ({len(self.runs)} runs)" if len(self.runs) > 1 else self.label


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, the images and the metric by which they are compared, levels, and what could not be
    compared."""

    groups: list[Group]
    images: Images
    metric: Metric
    levels: list[float]
    smooth: int | None
    notes: list[str]

    @property
    def runs(self) -> list[RunHistory]:
        return [run for group in self.groups for run in group.runs]

    @property
    def quality(self) -> str:
        """What is compared: ``test PSNR``."""
        return f"{IMAGES[self.images]} {self.metric.label}"

    def losses(self, run: RunHistory, axis: Axis, smoothed: bool = True) -> Curve:
        """Loss of each step, as it is or as its running mean, against cost or time."""
        records = [step for step in run.steps if step.loss is not None]
        values = [step.loss for step in records if step.loss is not None]
        if smoothed:
            values = running_mean(values, span(len(values), self.smooth))
        return _curve((getattr(step, axis), value) for step, value in zip(records, values, strict=True))

    def qualities(self, run: RunHistory, axis: Axis) -> Curve:
        """The metric at each check, against cost or time; before its first step, a run has the value of its start."""
        checks = run.values(self.images, self.metric)
        points = [(getattr(check, axis), value) for check, value in checks]
        if checks and checks[0][0].step == 0 and run.steps:
            end = getattr(run.steps[0], axis)
            points.append((None if end is None else end * (1 - 1e-9), checks[0][1]))
        return _curve(points)

    def final_loss(self, run: RunHistory) -> float | None:
        curve = self.losses(run, "computations")
        return curve[-1][1] if curve else None


def compare(
    runs: Sequence[RunHistory],
    levels: Sequence[float] = (),
    smooth: int | None = None,
    given: Mapping[Path, str] | None = None,
) -> Comparison:
    """Group runs and choose what to compare; ``levels`` are values of the metric, by default chosen from the runs, and
    ``given`` are labels by directory."""
    notes = [f"{run.path}: {note}" for run in runs for note in run.notes]
    notes += [
        f"{run.path}: the run is not finished ({run.status}); it is shown as far as it got"
        for run in runs
        if not run.finished
    ]
    metric = most_common([run.metric for run in runs])
    images = _images(runs, metric)
    for run in runs:
        if not run.has(images, metric) and any(other.has(images, metric) for other in runs):
            label = metric.label
            notes.append(f"{run.path}: no check has a {IMAGES[images]} {label}, so it has no {label} curve")
    chosen = sorted(levels) or default_levels(runs, images, metric)
    return Comparison(_groups(runs, given or {}), images, metric, chosen, smooth, notes)


def _images(runs: Sequence[RunHistory], metric: Metric) -> Images:
    """The test images if all runs with checks measured them, else the held-out ones if all did, else those
    available."""
    checked = [run for run in runs if any(run.has(images, metric) for images in IMAGES)]
    for images in IMAGES:
        if checked and all(run.has(images, metric) for run in checked):
            return images
    return "evaluation" if any(run.has("evaluation", metric) for run in checked) else "validation"


def _groups(runs: Sequence[RunHistory], given: Mapping[Path, str]) -> list[Group]:
    groups: dict[str, list[RunHistory]] = {}
    for run in runs:
        rest = _essence(run.recipe)
        # A run whose recipe cannot be read forms a group of its own.
        groups.setdefault(json.dumps(rest, sort_keys=True) if rest else str(run.path), []).append(run)
    members = [sorted(group, key=lambda run: (str(type(run.seed)), run.seed)) for group in groups.values()]
    recipes = [_essence(group[0].recipe) for group in members]
    names = labels([recipe for recipe in recipes if recipe])
    places = [group[0].path for recipe, group in zip(recipes, members, strict=True) if recipe]
    settings = iter(short_labels(names, places))
    return [
        Group(given.get(group[0].path) or (next(settings) if recipe else "") or _plain_name(group), group)
        for recipe, group in zip(recipes, members, strict=True)
    ]


def _essence(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without its seeds, and without the sections that decide how long and how closely a run is followed."""
    rest = {key: value for key, value in recipe.items() if key not in ("seed", *_FOLLOWED, *IRRELEVANT)}
    if isinstance(checks := rest.get("validation"), Mapping):
        rest["validation"] = {
            key: value for key, value in checks.items() if key not in ("checks", "evaluation")
        }
    problem = rest.get("problem")
    if isinstance(problem, Mapping) and isinstance(data := problem.get("data"), Mapping):
        rest["problem"] = {**problem, "data": {key: value for key, value in data.items() if key != "seed"}}
    return rest


def _plain_name(group: Sequence[RunHistory]) -> str:
    """The label if no setting distinguishes groups: the seeds of a group, or the names of its directories."""
    seeds = list(dict.fromkeys(shown(run.seed) for run in group))
    if len(seeds) > 1:
        return f"seed={', '.join(seeds)}"
    return ", ".join(dict.fromkeys(run.path.resolve().name for run in group))


def default_levels(runs: Sequence[RunHistory], images: Images, metric: Metric, count: int = 3) -> list[float]:
    """Round levels between the values at which the runs start and the best value reached."""
    sign = 1 if metric.higher else -1
    starts = [sign * found[0][1] for run in runs if (found := run.values(images, metric))]
    bests = [sign * best for run in runs if (best := run.best(images, metric)) is not None]
    if not bests or max(bests) <= max(starts):
        return []
    low, high = max(starts), max(bests)
    for exponent in range(2, -4, -1):
        for factor in (5, 2, 1):
            unit = factor * 10.0**exponent
            first, last = math.floor(low / unit) + 1, math.floor(high / unit)
            if last - first + 1 >= count:
                return sorted(round(sign * k * unit, 6) for k in range(first, last + 1)[-count:])
    return []


def span(count: int, smooth: int | None) -> int:
    """The number of steps in the running mean."""
    return max(1, round(_SHARE * count)) if smooth is None else max(1, smooth)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean over about ``width`` neighbours, fewer at the start, so that the initial decrease is kept."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for i in range(len(values)):
        before = min(width // 2, i)
        behind = min(before, len(values) - 1 - i)
        means.append((sums[i + behind + 1] - sums[i - before]) / (before + behind + 1))
    return means


def band(curves: Sequence[Curve], log: bool = False) -> Band | None:
    """Mean and range of curves where all of them are known; None if they do not overlap."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return None
    if len(curves) == 1:
        x, y = [point[0] for point in curves[0]], [point[1] for point in curves[0]]
        return Band(x, y, y, y)
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if first >= last:
        return None
    log = log and first > 0
    x = _spaced(first, last, log)
    rows = [[_at(curve, place, log) for curve in curves] for place in x]
    return Band(
        x, [sum(row) / len(row) for row in rows], [min(row) for row in rows], [max(row) for row in rows]
    )


def _spaced(first: float, last: float, log: bool) -> list[float]:
    shares = [k / (_POINTS - 1) for k in range(_POINTS)]
    if log:
        return [first, *(first * (last / first) ** share for share in shares[1:-1]), last]
    return [first, *(first + (last - first) * share for share in shares[1:-1]), last]


def _at(curve: Curve, x: float, log: bool) -> float:
    """A curve between its points, which a straight line joins as it is drawn."""
    right = bisect_right(curve, (x, math.inf))
    if right == 0 or right == len(curve):
        return curve[right and -1][1]
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    share = math.log(x / x0) / math.log(x1 / x0) if log else (x - x0) / (x1 - x0)
    return y0 + (y1 - y0) * share


def _curve(points: Iterable[tuple[float | None, float]]) -> Curve:
    """The points with a known x; of several with the same x, the last."""
    last = {x: y for x, y in points if x is not None}
    return sorted(last.items())


@dataclass(frozen=True)
class Spread:
    """A figure over the runs of a group: its mean and range, and the number of runs that have it."""

    mean: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    numbers = [value for value in values if value is not None]
    return Spread(sum(numbers) / len(numbers), min(numbers), max(numbers), len(numbers)) if numbers else None


def over(group: Group, figure: Callable[[RunHistory], float | None]) -> Spread | None:
    """A figure over all runs of a group."""
    return spread(map(figure, group.runs))


def to_reach(comparison: Comparison, level: float, axis: Axis) -> Callable[[RunHistory], float | None]:
    """The cost of a run until its first check at a level."""

    def figure(run: RunHistory) -> float | None:
        check = run.reached(level, comparison.images, comparison.metric)
        return None if check is None else getattr(check, axis)

    return figure


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Everything, curves included, for ``--json``."""
    return {
        "metric": comparison.metric.as_dict(),
        comparison.metric.name: IMAGES[comparison.images],
        "levels": comparison.levels,
        "notes": comparison.notes,
        "groups": [_group_facts(comparison, group) for group in comparison.groups],
    }


def _group_facts(comparison: Comparison, group: Group) -> dict[str, Any]:
    runs = [_run_facts(comparison, run) for run in group.runs]
    name = comparison.metric.name
    names = (f"best_{name}", f"{name}_test", "final_loss", "computations", "seconds")
    facts: dict[str, Any] = {"label": group.label}
    facts |= {name: _facts(spread(run[name] for run in runs)) for name in names}
    facts["levels"] = [
        {name: level} | {axis: _facts(over(group, to_reach(comparison, level, axis))) for axis in _AXES}
        for level in comparison.levels
    ]
    return facts | {"runs": runs}


_AXES: tuple[Axis, ...] = ("computations", "seconds")


def _facts(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else dict(vars(spread))


def _run_facts(comparison: Comparison, run: RunHistory) -> dict[str, Any]:
    reached = [
        (level, run.reached(level, comparison.images, comparison.metric)) for level in comparison.levels
    ]
    smooth, metric = comparison.losses(run, "computations"), comparison.metric
    return {
        "run_dir": str(run.path),
        "seed": run.seed,
        "status": run.status,
        "finished": run.finished,
        "steps": run.step_count,
        "computations": run.computations,
        "seconds": run.seconds,
        f"best_{metric.name}": run.best(comparison.images, metric),
        f"{metric.name}_test": run.tested(metric),
        "final_loss": comparison.final_loss(run),
        "levels": [
            {
                metric.name: level,
                "step": check and check.step,
                "computations": check and check.computations,
                "seconds": check and check.seconds,
            }
            for level, check in reached
        ],
        "curves": {
            "loss": [dict(vars(entry)) for entry in run.steps],
            "smoothed_loss": {"computations": [x for x, _ in smooth], "loss": [y for _, y in smooth]},
            "checks": [entry.as_dict(metric) for entry in run.checks],
        },
    }
