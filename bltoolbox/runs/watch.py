"""The progress of runs in other processes, read from their directories without torch.

The logs are read as they grow: each update reads only what is new, and an incomplete line waits for the next update.
A log that has become shorter, because a resumed run truncated it, is read again from the beginning.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bltoolbox.config.names import CHECKS_LOG, METRICS_LOG, RECIPE_FILE, STATUS_FILE, SWEEP_FILE, TIMINGS_LOG
from bltoolbox.config.problem_keys import start_noun, task_noun
from bltoolbox.errors import UsageError
from bltoolbox.runs.budget import used_after
from bltoolbox.runs.history import IMAGES, expand, is_run
from bltoolbox.runs.locks import is_locked
from bltoolbox.runs.logs import Tail, log_end, number, read_index, read_recipe, read_status
from bltoolbox.runs.metric import UNDESCRIBED, Metric, described

BLOCKS = "▁▂▃▄▅▆▇█"
#: The share of the last steps from which the remaining time is estimated.
_RECENT = 0.25
#: Figures of the last step that are shown, if available.
_FIGURES = (
    "batch",
    "penalty",
    "step_size",
    "tol",
    "adjoint_tol",
    "gradient_norm",
    "distance_max",
    "bound_mean",
    "trials",
)


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment."""

    path: Path
    name: str
    #: finished, running, starting, interrupted, killed, failed or unknown; and the status that the run recorded.
    state: str
    status: str
    step: int = 0
    computations: float = 0.0
    seconds: float = 0.0
    #: The part of the budget that is used.
    fraction: float = 0.0
    #: What the run is doing once its budget is spent, e.g. tuning the baseline.
    phase: str = ""
    #: Seconds until the budget is spent, at the pace of the last steps.
    left: float | None = None
    losses: list[float] = field(default_factory=list, repr=False)
    #: The metric of the checks, and its values on test and validation images.
    metric: Metric = UNDESCRIBED
    quality: dict[str, list[float]] = field(default_factory=dict, repr=False)
    #: Figures of the last step.
    last: dict[str, float] = field(default_factory=dict)
    #: Iterations per sample in the last step.
    iterations: float | None = None
    #: At the end: label, measured, learned of each evaluation image that was kept.
    images: list[tuple[str, float | None, float | None]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: What a task is called, and its cold start.
    noun: str = "image"
    start: str = "measured"

    @property
    def active(self) -> bool:
        return self.state in ("running", "starting")

    @property
    def tested(self) -> dict[str, float]:
        """At the end: the metric of the evaluation images, measured, by the baseline and learned."""
        parts = {self.start: "before", "baseline": "baseline", "learned": "after"}
        values = {
            name: number(self.summary.get(f"{self.metric.name}_{when}")) for name, when in parts.items()
        }
        numbers = {name: value for name, value in values.items() if value is not None}
        return numbers if "learned" in numbers else {}

    @property
    def loss(self) -> float | None:
        return self.losses[-1] if self.losses else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "run_dir": str(self.path),
            "state": self.state,
            "status": self.status,
            "step": self.step,
            "computations": self.computations,
            "seconds": self.seconds,
            "fraction": self.fraction,
            "phase": self.phase,
            "seconds_left": self.left,
            "loss": self.loss,
            "metric": self.metric.as_dict(),
            **{f"{self.metric.name}_{name}": values[-1] for name, values in self.quality.items()},
            "iterations_per_sample": self.iterations,
            "last_step": self.last,
            "images": [
                {"label": label, f"{self.metric.name}_before": before, f"{self.metric.name}_after": after}
                for label, before, after in self.images
            ],
            "summary": dict(self.summary) if self.state == "finished" else None,
        }


class Watched:
    """A run directory that is read repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics, self.timings, self.checks = (
            Tail(path / name) for name in (METRICS_LOG, TIMINGS_LOG, CHECKS_LOG)
        )
        self._recipe: tuple[int, dict[str, Any]] | None = None

    def look(self) -> Snapshot:
        # The lock first: a run that ends during this function is then seen as ended in the next update.
        locked = is_locked(self.path)
        status = read_status(self.path) or {}
        metrics, timings, checks = (log.look() for log in (self.metrics, self.timings, self.checks))
        seconds = number(timings[-1].get("seconds")) if timings else None
        last, before = (metrics[-1] if metrics else {}), (metrics[-2] if len(metrics) > 1 else {})
        metric = described(status, *reversed(checks))[0]
        finished = bool(status.get("finished"))
        state = _state(str(status.get("status", "")), finished, locked)
        shares = self._shares(metrics, timings)
        losses = [value for line in metrics if (value := number(line.get("loss"))) is not None]
        total = number(status.get("seconds")) if finished else seconds
        spent = state == "running" and bool(shares) and shares[-1] >= 1
        return Snapshot(
            path=self.path,
            name=_place(self.path),
            state=state,
            status=str(status.get("status", state)),
            step=int(number(last.get("step")) or 0),
            computations=number(last.get("computations")) or 0.0,
            seconds=total or 0.0,
            fraction=1.0 if finished else (shares[-1] if shares else 0.0),
            phase=_last_words(self.path) if spent else "",
            left=_left(shares, timings) if state == "running" and not spent else None,
            losses=losses,
            metric=metric,
            quality=_quality(checks, metric),
            last={name: value for name in _FIGURES if (value := number(last.get(name))) is not None},
            iterations=_iterations(last, before),
            images=_images(self.path, metric) if finished else [],
            summary=status,
            noun=task_noun(self.recipe()),
            start=start_noun(self.recipe()),
        )

    def recipe(self) -> dict[str, Any]:
        """Read again only when it has changed, e.g. by a resumed run with a larger budget."""
        try:
            changed = (self.path / RECIPE_FILE).stat().st_mtime_ns
        except OSError:
            return {}
        if self._recipe is None or self._recipe[0] != changed:
            self._recipe = changed, read_recipe(self.path, [])
        return self._recipe[1]

    def _shares(
        self, metrics: Sequence[Mapping[str, Any]], timings: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """The part of the budget that was used after each step."""
        budget = self.recipe().get("budget")
        unknown: Mapping[str, Any] = {}
        steps = itertools.zip_longest(metrics, timings[: len(metrics)], fillvalue=unknown)
        return [used_after(budget, step, timing) for step, timing in steps]


def find(directories: Sequence[Path]) -> list[Path]:
    """The runs to watch: sweeps as those of their runs that have been started."""
    return expand(directories)[0]


def newest(root: Path) -> Path:
    """The run that was written to last, or its sweep while that is active."""
    runs = []
    for recipe in root.rglob(RECIPE_FILE):
        logs = [recipe.parent / name for name in (METRICS_LOG, STATUS_FILE, RECIPE_FILE)]
        times = [log.stat().st_mtime for log in logs if log.exists()]
        runs.append((is_locked(recipe.parent), max(times), recipe.parent))
    if not runs:
        raise UsageError(f"no run found under {root}; give the run directory to watch")
    run = max(runs)[2]
    return run.parent if (run.parent / SWEEP_FILE).is_file() and is_locked(run.parent) else run


def is_active(directories: Sequence[Path]) -> bool:
    """Whether a sweep among them may still start runs."""
    return any(not is_run(path) and is_locked(path) for path in directories)


def sparkline(values: Sequence[float], width: int, *, log: bool = False) -> str:
    """Values as blocks of eight heights; if there are many, each block combines several."""
    if not values:
        return ""
    heights = [math.log(value) for value in values] if log and min(values) > 0 else list(values)
    count = min(width, len(heights))
    edges = [round(k * len(heights) / count) for k in range(count + 1)]
    means = [sum(heights[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return BLOCKS[3] * count
    return "".join(BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def _quality(checks: Sequence[Mapping[str, Any]], metric: Metric) -> dict[str, list[float]]:
    curves = {}
    for images, name in IMAGES.items():
        values = (number(line.get(f"{images}_{metric.name}")) for line in checks)
        curves[name] = [value for value in values if value is not None]
    return {name: values for name, values in curves.items() if values}


def _state(status: str, finished: bool, locked: bool) -> str:
    if finished and not locked:
        return "finished"
    if locked:
        return "running" if status else "starting"
    if status == "running":
        return "killed"
    return "failed" if status.startswith("failed") else status or "unknown"


def _left(shares: Sequence[float], timings: Sequence[Mapping[str, Any]]) -> float | None:
    """At the pace of the last quarter of the steps."""
    count = min(len(shares), len(timings))
    if count < 2:
        return None
    first = max(0, count - 1 - max(1, round(_RECENT * count)))
    begin, end = (number(timings[k].get("seconds")) for k in (first, count - 1))
    gained = shares[count - 1] - shares[first]
    if begin is None or end is None or gained <= 0:
        return None
    return (1 - shares[count - 1]) * (end - begin) / gained


def _last_words(path: Path) -> str:
    """The last message of a run, without its time."""
    lines = log_end(path)
    return re.sub(r"^\s*[\d.]+ s\s+", "", lines[-1]) if lines else ""


def _iterations(last: Mapping[str, Any], before: Mapping[str, Any]) -> float | None:
    spent, size = number(last.get("computations")), number(last.get("batch"))
    return (spent - (number(before.get("computations")) or 0.0)) / size if spent and size else None


def _images(path: Path, metric: Metric) -> list[tuple[str, float | None, float | None]]:
    """The evaluation images that a finished run has kept."""
    rows = []
    for image in read_index(path):
        try:
            values = {variant["key"]: number(variant.get(metric.name)) for variant in image["variants"]}
            rows.append((str(image["label"]), values.get("measured"), values.get("learned")))
        except (KeyError, TypeError, AttributeError):
            return []
    return rows


def _place(path: Path) -> str:
    return "/".join(path.resolve().parts[-2:])
