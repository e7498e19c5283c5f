"""How good a θ is: cold solves to a tight tolerance, and the metrics of their solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Counter, Solution, Status, Theta
from bltoolbox.bilevel.roles import LowerSolver, Problem
from bltoolbox.bilevel.tasks import BoundTasks, Tasks
from bltoolbox.bilevel.tensors import detached, full_precision
from bltoolbox.config.shown import Shown
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.distributed.signals import allowed
from bltoolbox.errors import BltError, NumericalError, RecipeError, UsageError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.image_upper import BoundOperator
from bltoolbox.restoration.metrics import LOSS, UNIT, ImageMetric, Range, measure, pick, values_in
from bltoolbox.restoration.roles import Sample
from bltoolbox.restoration.variational import Variational, VariationalAt, VariationalTasks
from bltoolbox.runs.metric import Metric

if TYPE_CHECKING:
    from bltoolbox.config.recipe import Recipe


@dataclass(frozen=True)
class Restored:
    """One evaluated image, kept for pictures (CPU), and the true one where it is known."""

    start: Tensor
    x: Tensor
    x_true: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Each metric of each task by name, before (the cold start) and after; the first metric is the deciding one.

    There are none where the true images are not known.
    """

    metrics: tuple[Metric, ...]
    before: dict[str, list[float]]
    after: dict[str, list[float]]
    labels: list[str]
    iterations: int
    images: list[Restored] = field(default_factory=list, repr=False)
    #: The values between which images lie.
    range: Range = UNIT
    #: Whether the tasks are images.
    of_images: bool = True

    def __repr__(self) -> str:
        count, noun = len(self.labels), "image" if self.of_images else "task"
        return (
            f"Evaluation({', '.join(filter(None, [f'{count} {noun}' + 's' * (count != 1), self.summary]))})"
        )

    @property
    def metric(self) -> Metric | None:
        return self.metrics[0] if self.metrics else None

    @property
    def summary(self) -> str:
        """The means of the deciding metric: ``PSNR 20.17 -> 28.31 dB``; empty without one."""
        metric = self.metric
        if metric is None:
            return ""
        return f"{metric.label} {metric.number(self.mean_before())} -> {metric.show(self.mean())}"

    def mean_before(self, name: str | None = None) -> float | None:
        """The mean of a metric over the cold starts, of the deciding one if none is named; None if it was not
        measured."""
        return self._mean(self.before, name)

    def mean(self, name: str | None = None) -> float | None:
        """The mean of a metric over the restored images, of the deciding one if none is named; None if it was not
        measured."""
        return self._mean(self.after, name)

    def _mean(self, values: Mapping[str, Sequence[float]], name: str | None) -> float | None:
        each = values.get(name or (self.metric.name if self.metric else ""), ())
        return sum(each) / len(each) if each else None

    def values_of(self, number: int) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of one image, before and after."""
        before, after = (
            {name: each[number] for name, each in values.items()} for values in (self.before, self.after)
        )
        return before, after


def solve_cold(solver: LowerSolver, lower: Lower, tol: float, limit: int) -> Solution:
    """From an estimate of the minimiser to a distance ``tol`` (a gradient norm where no μ > 0 is known).

    Not differentiable.
    """
    return solve_until(solver, lower, lower.gradient_tol(tol), limit)


def solve_until(solver: LowerSolver, lower: Lower, residual: Tensor | float, limit: int) -> Solution:
    """The same to a residual."""
    with full_precision(lower.mu):
        solution = solve(solver, lower, lower.estimate(), residual, limit=limit)
    for status in solution.status:
        if status in (Status.NOT_FINITE, Status.DIVERGED):
            raise NumericalError(f"lower-level solver {type(solver).__name__}: {status.value}")
    return solution


def evaluate(
    problem: Variational,
    theta: Theta,
    samples: Samples,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int = 32,
    limit: int = 2000,
    metrics: Sequence[str] = ("psnr",),
    positions: Sequence[int] | None = None,
    keep: int = 0,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Restore ``samples`` from a cold start and measure, as ``evaluate_tasks`` does for the tasks of any problem."""
    return evaluate_tasks(
        problem,
        theta,
        VariationalTasks(problem, samples),
        solver,
        tol=tol,
        chunk=chunk,
        limit=limit,
        metrics=metrics,
        positions=positions,
        keep=keep,
        ranks=ranks,
    )


def evaluate_tasks(
    problem: Problem,
    theta: Theta,
    tasks: Tasks,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int = 32,
    limit: int = 2000,
    metrics: Sequence[str],
    positions: Sequence[int] | None = None,
    keep: int = 0,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Solve tasks from a cold start and measure; the first of ``metrics`` is the deciding one.

    Metrics that need the true images are left out where these are not known. ``tol`` is relative to the ``unit`` of the
    problem, for images the width of the range of values. The first ``keep`` images are returned with the figures.

    On several ranks each solves some; all get the figures, and rank 0 the images.
    """
    positions = range(len(tasks)) if positions is None else positions
    wanted = measurable(pick(metrics, metrics_of(problem)), tasks)
    samples = tasks.samples if isinstance(tasks, VariationalTasks) else None
    keep = 0 if samples is None else keep
    share = _Share(_views(theta, tasks, wanted, keep), positions, keep)
    mine = range(ranks.rank, len(positions), ranks.size)

    def work() -> dict[str, Any]:
        with allowed(), detached(), computing(tasks.device):
            for first in range(0, len(mine), chunk):
                share.solve(mine[first : first + chunk], solver, tol * problem.unit, limit)
        return {"before": share.before, "after": share.after, "iterations": share.iterations}

    by_rank = ranks.each("evaluation", work)
    if samples is not None:
        _bring_to_first(ranks, share.images, min(keep, len(positions)), samples)
    before, after = (
        {metric.name: _in_order([measured[when][metric.name] for measured in by_rank]) for metric in wanted}
        for when in ("before", "after")
    )
    return Evaluation(
        wanted,
        before,
        after,
        [tasks.label(position) for position in positions],
        sum(measured["iterations"] for measured in by_rank),
        [share.images[place] for place in sorted(share.images)],
        UNIT if samples is None else samples.range,
        samples is not None,
    )


def metrics_of(problem: Problem | type[Problem]) -> dict[str, Metric]:
    """Everything that can be measured of the tasks of a problem, by name."""
    return {**problem.metrics, LOSS.name: LOSS}


def deciding(recipe: Recipe, problem: Problem) -> Metric:
    """The metric by which a recipe chooses θ, the first of the problem by default; a name that it does not have is a
    problem of the recipe."""
    among = metrics_of(problem)
    try:
        return pick([recipe.validation.metric or next(iter(among))], among)[0]
    except UsageError as error:
        raise RecipeError([recipe.problem_at("validation.metric", str(error))]) from error


def measurable(metrics: Sequence[Metric], tasks: Tasks) -> tuple[Metric, ...]:
    """The metrics that can be measured of tasks: of images whose true ones are not known, only some."""
    if not isinstance(tasks, VariationalTasks):
        return tuple(metrics)
    of_images = [metric for metric in metrics if isinstance(metric, ImageMetric)]
    return tasks.problem.measurable(of_images, tasks.samples)


@dataclass(frozen=True)
class _Part:
    """Some tasks: their lower level, the metrics of an x, and the true images where there are any."""

    lower: Lower
    measure: Callable[[Tensor], dict[str, list[float]]]
    truth: Tensor | None = None


class _View(Protocol):
    """Tasks that some metrics are about."""

    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    def on(self, ids: Sequence[int]) -> _Part: ...


class _Share:
    """The tasks of one rank: solved and measured chunk by chunk."""

    def __init__(self, views: Sequence[_View], positions: Sequence[int], keep: int) -> None:
        self.views, self.positions, self.keep = views, positions, keep
        self.before: dict[str, list[float]] = {metric.name: [] for view in views for metric in view.metrics}
        self.after: dict[str, list[float]] = {metric.name: [] for view in views for metric in view.metrics}
        self.iterations = 0
        self.images: dict[int, Restored] = {}

    def solve(self, places: Sequence[int], solver: LowerSolver, distance: float, limit: int) -> None:
        for view in self.views:
            part = view.on([self.positions[place] for place in places])
            start = part.lower.start()
            solution = solve_cold(solver, part.lower, distance, limit)
            for values, x in ((self.before, start), (self.after, solution.x)):
                for name, more in part.measure(x).items():
                    values[name] += more
            self.iterations += int(solution.iterations.sum())
            if view is self.views[0]:
                self._keep(places, part, start, solution.x)

    def _keep(self, places: Sequence[int], part: _Part, start: Tensor, x: Tensor) -> None:
        """The images for the figure."""
        if not any(place < self.keep for place in places):
            return
        rows = [part.lower.view(start), part.lower.view(x)] + ([] if part.truth is None else [part.truth])
        for place, *row in zip(places, *rows, strict=True):
            if place < self.keep:
                self.images[place] = Restored(*(image.cpu().contiguous() for image in row))


def _views(theta: Theta, tasks: Tasks, metrics: tuple[Metric, ...], keep: int) -> Sequence[_View]:
    """One, unless an upper loss splits measurements: then it is measured as in training, and everything else of the
    measurements as they are."""
    if not isinstance(tasks, VariationalTasks):
        return [_TaskView(tasks.at(theta, Counter()), metrics)]
    problem, samples = tasks.problem, tasks.samples
    if samples.range != problem.range:
        raise BltError(
            f"the model is for images with {values_in(problem.range)}, but these have {values_in(samples.range)}"
        )
    trained = problem.at(theta, samples.shape)
    if samples.as_in_training is samples:
        return [_ImageView(trained, samples, metrics)]
    views = [_ImageView(trained, samples.as_in_training, (LOSS,))] if LOSS in metrics else []
    others = tuple(metric for metric in metrics if metric != LOSS)
    if others or keep:
        views.insert(0, _ImageView(problem.restoring.at(theta, samples.shape), samples, others))
    return views


@dataclass(frozen=True)
class _TaskView:
    """The tasks of any problem."""

    at: BoundTasks
    metrics: tuple[Metric, ...]

    def on(self, ids: Sequence[int]) -> _Part:
        lower, upper = self.at.on(ids)
        own = [metric.name for metric in self.metrics if metric != LOSS]

        def measure(x: Tensor) -> dict[str, list[float]]:
            values = self.at.measure(own, ids, x) if own else {}
            return values | ({LOSS.name: upper.value(x).tolist()} if LOSS in self.metrics else {})

        return _Part(lower, measure)


@dataclass(frozen=True)
class _ImageView:
    """The samples with the measurements that some metrics are about, and the problem to restore them with."""

    at: VariationalAt
    samples: Samples
    metrics: tuple[Metric, ...]

    def on(self, ids: Sequence[int]) -> _Part:
        sample = self.samples.batch(ids)
        lower = self.at.on(sample.y, sample.context)

        def measure(x: Tensor) -> dict[str, list[float]]:
            return self._measure(sample, lower, lower.view(x))

        return _Part(lower, measure, sample.truth)

    def _measure(self, sample: Sample, lower: ImageLower, x: Tensor) -> dict[str, list[float]]:
        values: dict[str, list[float]] = {}
        of_images = [metric for metric in self.metrics if isinstance(metric, ImageMetric) and metric != LOSS]
        if of_images:
            assert sample.truth is not None
            values |= measure(of_images, x, sample.truth, self.samples.range)
        if LOSS in self.metrics:
            upper = self.at.problem.upper_loss.bind(sample, BoundOperator(lower))
            values[LOSS.name] = upper.value(x).tolist()
        return values


def _in_order(parts: Sequence[Sequence[float]]) -> list[float]:
    """The results of all ranks, which share the images in turn."""
    return [parts[k % len(parts)][k // len(parts)] for k in range(sum(len(values) for values in parts))]


def _bring_to_first(ranks: Ranks, images: dict[int, Restored], keep: int, samples: Samples) -> None:
    """Send the images for the figure to rank 0."""
    for place in range(keep):
        home = place % ranks.size
        if home == 0 or ranks.rank not in (0, home):
            continue
        buffer = torch.empty((3 if samples.has_truth else 2, *samples.shape), dtype=samples.dtype)
        if ranks.first:
            ranks.exchange({}, {home: buffer})
            images[place] = Restored(*buffer)
        else:
            restored = images[place]
            parts = [image for image in (restored.start, restored.x, restored.x_true) if image is not None]
            ranks.exchange({0: torch.stack(parts, out=buffer)}, {})
