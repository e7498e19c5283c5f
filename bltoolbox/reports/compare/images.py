"""A sheet of restored images: one image, restored by each setting for a given cost.

A row for each group of runs: the true image, the measured one, and for each cost the image restored with the θ of the
last check up to that cost. Everything is computed on the CPU, one image at a time.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bltoolbox.config.names import RECIPE_FILE
from bltoolbox.errors import BltError, UsageError
from bltoolbox.reports.compare.comparison import Comparison, Group
from bltoolbox.reports.compare.figures import STYLE, new_figure
from bltoolbox.restoration.metrics import UNIT, Range
from bltoolbox.runs.history import CheckRecord, RunHistory
from bltoolbox.runs.metric import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.data_loading import Samples
    from bltoolbox.restoration.evaluation import Evaluation

#: Maximum number of rows of a readable sheet.
MAX_ROWS = 24
_WIDTH = 1.75


@dataclass(frozen=True)
class Picture:
    """One cell of the sheet; without an image its caption says why."""

    caption: str
    image: Tensor | None = field(default=None, repr=False)
    value: float | None = None
    check: CheckRecord | None = None
    #: Whether θ differs from the initial θ, and if not, whether there are steps that no check has seen.
    moved: bool | None = None
    unseen: bool = False


@dataclass(frozen=True)
class Row:
    """One setting: the run that represents it, the name of the image, and the pictures."""

    group: Group
    run: RunHistory
    metric: Metric
    image: str
    pictures: list[Picture]
    #: The values between which images lie.
    range: Range = UNIT

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        kept = [picture for picture in self.pictures if picture.check is not None]
        return {
            "label": self.group.label,
            "run_dir": str(self.run.path),
            "image": self.image,
            f"{self.metric.name}_measured": self.pictures[1].value,
            "pictures": [
                {
                    self.metric.name: picture.value,
                    "moved": picture.moved,
                    **picture.check.as_dict(self.metric),
                }
                for picture in kept
                if picture.check is not None
            ],
        }


def restore_rows(
    comparison: Comparison, costs: Sequence[float], position: int, registry: Registry
) -> list[Row]:
    """Restore the images of the sheet; the first seed of a group represents it."""
    if len(comparison.groups) > MAX_ROWS:
        raise UsageError(
            f"a sheet of {len(comparison.groups)} rows is not readable; compare at most {MAX_ROWS} settings"
        )
    return [_restore(group, comparison.metric, costs, position, registry) for group in comparison.groups]


def _restore(group: Group, metric: Metric, costs: Sequence[float], position: int, registry: Registry) -> Row:
    run = group.runs[0]
    samples = _samples(run, registry)
    if not 0 <= position < len(samples):
        raise UsageError(
            f"{run.path} has {len(samples)} evaluation images, counted from 0; --image {position} does not exist"
        )
    x_true = samples.batch([position]).truth
    true = Picture("true", x_true[0]) if x_true is not None else Picture("no true image")
    measured = Picture("measured")
    pictures: list[Picture] = []
    for cost in costs:
        check = run.check_at(cost)
        if check is None or not run.theta_file(check).is_file():
            pictures.append(Picture("no check yet" if check is None else "θ was not kept", check=check))
            continue
        evaluation = _evaluate(run, check, metric, samples, position, registry)
        measured = Picture("measured", evaluation.images[0].start, evaluation.mean_before())
        unseen = any(check.computations < step.computations <= cost for step in run.steps)
        pictures.append(
            Picture("", evaluation.images[0].x, evaluation.mean(), check, _moved(run, check), unseen)
        )
    return Row(group, run, metric, samples.label(position), [true, measured, *pictures], samples.range)


def _samples(run: RunHistory, registry: Registry) -> Samples:
    from bltoolbox.config.recipe import load_recipe
    from bltoolbox.restoration.from_recipe import build_problem, evaluation_samples

    recipe = load_recipe(run.path / RECIPE_FILE, (), registry)
    if not recipe.of_images:
        raise UsageError(f"{run.path}: problem {recipe.problem.name!r} has no images to show; omit --at")
    if recipe.evaluation is None:
        raise UsageError(f"{run.path}: its recipe has no evaluation images to show; omit --at")
    recipe = replace(recipe, device="cpu")
    try:
        return evaluation_samples(recipe, build_problem(recipe, registry), registry)
    except BltError as error:
        raise BltError(f"{run.path}: the evaluation images cannot be loaded: {error}") from error


def _evaluate(
    run: RunHistory,
    check: CheckRecord,
    metric: Metric,
    samples: Samples,
    position: int,
    registry: Registry,
) -> Evaluation:
    from bltoolbox.restoration.evaluation import evaluate
    from bltoolbox.restoration.model import Model

    model = Model.load(run.theta_file(check), "cpu", registry)
    recipe = model.recipe
    return evaluate(
        model.problem,
        model.theta,
        samples,
        model.solver,
        tol=recipe.evaluation_tol,
        limit=recipe.iteration_limit,
        metrics=[metric.name],
        positions=[position],
        keep=1,
    )


def _moved(run: RunHistory, check: CheckRecord) -> bool:
    """Whether θ differs from the initial θ; a method may spend much before its first step succeeds."""
    from bltoolbox.restoration.theta_file import read_theta

    first = run.checks[0]
    if check.step == 0:
        return False
    if first.step != 0 or not run.theta_file(first).is_file():
        return True
    (before, _), (now, _) = read_theta(run.theta_file(first)), read_theta(run.theta_file(check))
    return any(not value.equal(now[name]) for name, value in before.items())


def draw_sheet(rows: Sequence[Row], costs: Sequence[float]) -> Figure:
    """The rows, with their labels at the left and the metric above each picture."""
    import matplotlib

    columns = 2 + len(costs)
    shapes = [
        picture.image.shape[-2:] for row in rows for picture in row.pictures if picture.image is not None
    ]
    height = _WIDTH * (shapes[0][0] / shapes[0][1] if shapes else 1) + 0.24
    labels = [textwrap.wrap(row.group.label, 28, break_on_hyphens=False)[:6] for row in rows]
    room = 0.075 * max(len(line) for label in labels for line in label)
    with matplotlib.rc_context(STYLE):
        figure = new_figure((_WIDTH + 0.06) * columns + room, height * len(rows) + 0.3)
        layout: Any = figure.get_layout_engine()
        layout.set(w_pad=0.02, h_pad=0.04, wspace=0.01, hspace=0.01)
        panels = figure.subplots(len(rows), columns, squeeze=False)
        for number, row in enumerate(rows):
            for panel, picture in zip(panels[number], row.pictures, strict=True):
                _show(panel, picture, row.metric, row.range)
            label = "\n".join(labels[number])
            panels[number][0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=7.5)
        headings = [f"≤ {_cost(cost)} computations" for cost in costs]
        for panel, heading in zip(panels[0][2:], headings, strict=True):
            panel.annotate(
                heading,
                (0.5, 1),
                (0, 17),
                xycoords="axes fraction",
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8.5,
                fontweight="bold",
            )
    return figure


def _show(panel: Any, picture: Picture, metric: Metric, span: Range) -> None:
    from bltoolbox.restoration.layout import to_unit

    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set_visible(False)
    if picture.image is None:
        panel.text(
            0.5, 0.5, picture.caption, ha="center", va="center", transform=panel.transAxes, color="#666666"
        )
        return
    image = to_unit(picture.image, span).permute(1, 2, 0).numpy()
    panel.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    parts = [picture.caption] if picture.caption else []
    parts += [metric.show(picture.value)] if picture.value is not None else []
    if picture.moved is False:
        parts.append("initial θ, no check since" if picture.unseen else "no step yet")
    panel.set_title(", ".join(parts), fontsize=8, pad=3)


def _cost(cost: float) -> str:
    """1e4 as 10⁴, 1500 as 1,500."""
    mantissa, exponent = f"{cost:.2e}".split("e")
    if int(exponent) < 4:
        return f"{cost:,.0f}"
    factor = "" if float(mantissa) == 1 else f"{float(mantissa):g}·"
    return f"{factor}10" + str(int(exponent)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
