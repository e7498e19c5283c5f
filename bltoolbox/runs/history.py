"""The history of a run, read from its directory without torch: finished or not, damaged or not.

``metrics.jsonl`` has a line for each step and ``timings.jsonl`` its time; ``checks.jsonl`` has a line for each check
on the images that are not used for training. What cannot be read is left out, with a sentence in ``notes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bltoolbox.config.names import (
    CHECKPOINT_NAME,
    CHECKPOINTS,
    CHECKS_LOG,
    METRICS_LOG,
    RECIPE_FILE,
    STATUS_FILE,
    SWEEP_FILE,
    SWEEP_NAMES,
    TIMINGS_LOG,
    is_component,
    theta_name,
)
from bltoolbox.config.reading import read_json
from bltoolbox.errors import UsageError
from bltoolbox.runs.budget import used_after
from bltoolbox.runs.locks import is_locked
from bltoolbox.runs.logs import by_step, number, read_lines, read_recipe, read_status, read_tail
from bltoolbox.runs.metric import Metric, described

#: The sets of restored images, and their names for people.
Images = Literal["evaluation", "validation"]
IMAGES: dict[Images, str] = {"evaluation": "test", "validation": "validation"}


@dataclass(frozen=True)
class StepRecord:
    """One step: its loss (None if the step computed none), and the cost and the time up to its end."""

    step: int
    computations: float
    seconds: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class CheckRecord:
    """One check: the values measured for θ after ``step`` steps, and the cost and the time until then."""

    step: int
    computations: float
    seconds: float | None = None
    #: Means by the names that logs give them, e.g. ``validation_psnr``.
    values: Mapping[str, float] = field(default_factory=dict)

    def value(self, images: Images, metric: Metric) -> float | None:
        return self.values.get(f"{images}_{metric.name}")

    def as_dict(self, metric: Metric) -> dict[str, Any]:
        """Plain data, with one metric of all images."""
        figures = {f"{images}_{metric.name}": self.value(images, metric) for images in IMAGES}
        return {"step": self.step, "computations": self.computations, "seconds": self.seconds, **figures}


@dataclass(frozen=True)
class RunHistory:
    """A run as recorded in its directory."""

    path: Path
    recipe: dict[str, Any]
    status: str
    finished: bool
    summary: dict[str, Any] = field(repr=False)
    steps: list[StepRecord] = field(repr=False)
    checks: list[CheckRecord] = field(repr=False)
    #: The metrics that were measured; the run chose θ by the first.
    metrics: tuple[Metric, ...]
    #: What is damaged or missing, one sentence each.
    notes: list[str]

    @classmethod
    def read(cls, path: Path | str) -> RunHistory:
        """Read a run directory: any folder with a ``resolved.yaml``."""
        path = Path(path)
        if not is_run(path):
            raise UsageError(f"{path} is not a run directory: it has no {RECIPE_FILE}")
        notes: list[str] = []
        recipe = read_recipe(path, notes)
        status = read_status(path)
        if status is None:
            notes.append(f"{STATUS_FILE} is missing or damaged")
        timings = by_step(read_lines(path / TIMINGS_LOG, notes))
        metrics = by_step(read_lines(path / METRICS_LOG, notes))
        seconds = {step: number(line.get("seconds")) for step, line in timings.items()} | {0: 0.0}
        steps = [
            StepRecord(
                step, number(line.get("computations")) or 0.0, seconds.get(step), number(line.get("loss"))
            )
            for step, line in sorted(metrics.items())
        ]
        lines = by_step(read_lines(path / CHECKS_LOG, notes, required=False))
        summary = status or {}
        measured = described(summary, *reversed(lines.values()))
        checks = [_check(step, line, seconds, measured) for step, line in sorted((lines or metrics).items())]
        return cls(
            path,
            recipe,
            _state(path, summary),
            bool(summary.get("finished")),
            summary,
            steps,
            checks if lines else [check for check in checks if check.values],
            measured,
            notes,
        )

    @property
    def metric(self) -> Metric:
        """The metric by which the run chose θ."""
        return self.metrics[0]

    @property
    def seed(self) -> Any:
        return self.recipe.get("seed")

    @property
    def computations(self) -> float:
        """The computations spent on training."""
        spent = [record.computations for record in self.steps] + [
            record.computations for record in self.checks
        ]
        return max([*spent, number(self.summary.get("computations")) or 0.0])

    @property
    def seconds(self) -> float | None:
        """The time the run has spent on training."""
        if (total := number(self.summary.get("seconds"))) is not None:
            return total
        times = [step.seconds for step in self.steps if step.seconds is not None]
        return times[-1] if times else None

    @property
    def step_count(self) -> int:
        return int(number(self.summary.get("steps")) or (self.steps[-1].step if self.steps else 0))

    def has(self, images: Images, metric: Metric) -> bool:
        """Whether the checks measured this metric on these images."""
        return bool(self.values(images, metric))

    def values(self, images: Images, metric: Metric) -> list[tuple[CheckRecord, float]]:
        """The checks that measured this metric on these images, with its values."""
        checked = [(check, check.value(images, metric)) for check in self.checks]
        return [(check, value) for check, value in checked if value is not None]

    def best(self, images: Images, metric: Metric) -> float | None:
        """The best value at a check."""
        return metric.best(value for _, value in self.values(images, metric))

    def tested(self, metric: Metric, when: str = "after") -> float | None:
        """The metric on the evaluation images, of the chosen θ or of a reference (``when``); None before the end."""
        return number(self.summary.get(f"{metric.name}_{when}"))

    def validated(self, metric: Metric) -> float | None:
        """The best value on the held-out images."""
        value = self.tested(metric, "validation")
        return self.best("validation", metric) if value is None else value

    def reached(self, level: float, images: Images, metric: Metric) -> CheckRecord | None:
        """The first check that reaches a level."""
        values = self.values(images, metric)
        return next((check for check, value in values if not metric.better(level, value)), None)

    def check_at(self, computations: float) -> CheckRecord | None:
        """The last check up to a cost."""
        made = [check for check in self.checks if check.computations <= computations]
        return made[-1] if made else None

    def theta_file(self, check: CheckRecord) -> Path:
        """The file with the θ of a check."""
        return self.path / theta_name(check.step)


def is_run(path: Path) -> bool:
    return (path / RECIPE_FILE).is_file()


def has_checkpoint(path: Path) -> bool:
    """Whether a run directory has something to resume from."""
    try:
        return any(CHECKPOINT_NAME.fullmatch(file.name) for file in (path / CHECKPOINTS).iterdir())
    except OSError:
        return False


def expand(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Run directories, with sweeps replaced by their runs, each once; and a sentence for each cell that has no run
    yet."""
    runs_by_path: dict[Path, Path] = {}
    notes: list[str] = []
    for path in paths:
        if is_run(path):
            runs = [path]
        elif (path / SWEEP_FILE).is_file():
            runs = list(_cells(path))
            notes += [f"{run} has not been started" for run in runs if not is_run(run)]
        elif path.exists():
            raise UsageError(
                f"{path} is neither a run directory nor a sweep: it has no {RECIPE_FILE} and no {SWEEP_FILE}"
            )
        else:
            raise UsageError(f"{path} does not exist; give run directories or sweeps")
        for run in runs:
            if is_run(run):
                runs_by_path.setdefault(run.resolve(), run)
    return list(runs_by_path.values()), notes


def _cells(path: Path) -> Iterator[Path]:
    try:
        cells = read_json(path / SWEEP_FILE, follow=False)["cells"]
        names = [str(cell["name"]) for cell in cells]
    except (OSError, ValueError, KeyError, TypeError):  # damaged: every run in it
        names = sorted(cell.name for cell in path.iterdir() if is_run(cell))
    refuse_paths(path / SWEEP_FILE, names)
    yield from (path / name for name in names)


def refuse_paths(file: Path, names: Iterable[str]) -> None:
    """The cells of a sweep are folders in its directory; their names must not be paths."""
    for name in names:
        if not is_component(name) or name.casefold() in SWEEP_NAMES:
            raise UsageError(
                f"{file} names a cell {name!r}, which is not the name of a folder in the sweep; correct the"
                " file or leave out this sweep"
            )


@dataclass(frozen=True)
class Glance:
    """The progress of a run that is still active."""

    step: int = 0
    fraction: float = 0.0
    #: The last value that was measured, with its unit.
    quality: str = ""


def glance(path: Path, recipe: Mapping[str, Any]) -> Glance:
    """Reads only the ends of the logs, so it is cheap to call often."""
    metrics, timings = read_tail(path / METRICS_LOG), read_tail(path / TIMINGS_LOG)
    checks = read_tail(path / CHECKS_LOG)
    metric = described(*reversed(checks))[0]
    records = [_check(0, line, {}, (metric,)) for line in [*metrics, *checks]]
    values = [value for check in records for value in list(check.values.values())[-1:]]
    step, timing = (lines[-1] if lines else {} for lines in (metrics, timings))
    share = used_after(recipe.get("budget"), step, timing)
    return Glance(int(number(step.get("step")) or 0), share, metric.show(values[-1]) if values else "")


def _check(
    step: int, line: Mapping[str, Any], seconds: Mapping[int, float | None], metrics: Sequence[Metric]
) -> CheckRecord:
    own = number(line.get("seconds"))
    names = [f"{images}_{metric.name}" for metric in metrics for images in ("validation", "evaluation")]
    return CheckRecord(
        step,
        number(line.get("computations")) or 0.0,
        seconds.get(step) if own is None else own,
        {name: value for name in names if (value := number(line.get(name))) is not None},
    )


def _state(path: Path, summary: Mapping[str, Any]) -> str:
    status = str(summary.get("status", "unknown"))
    # A killed run could not update its status.
    return "killed" if status == "running" and not is_locked(path) else status
