"""Pictures of a run: restored images, convergence, learned filters and other parameters."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bltoolbox.errors import UsageError
from bltoolbox.restoration.layout import to_unit
from bltoolbox.restoration.metrics import UNIT, Range
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.shown_parameters import shown_filters, shown_parameters
from bltoolbox.runs.files import write_bytes
from bltoolbox.runs.metric import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bltoolbox.restoration.results import RunResult

_INK, _ACCENT, _SECOND = "#1f2933", "#2563eb", "#d9480f"
#: Characters of a caption that fit above one map.
_CAPTION = 40


def draw(result: RunResult, folder: Path) -> list[Path]:
    """Write all figures of a run as PNG files to ``folder``."""
    figures = {
        "restored.png": restored(result),
        "curves.png": curves(result),
        "filters.png": filters(result),
        "maps.png": maps(result),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=130, facecolor="white")
            write_bytes(folder / name, buffer.getvalue(), within=folder.parent)
            written.append(folder / name)
    return written


def plot(result: RunResult) -> Figure:
    """Loss and metric of a run against computations, as a figure that notebooks display."""
    figure = curves(result)
    if figure is None:
        raise UsageError("nothing to plot: the run completed no step; raise its budget")
    return figure


def show_images(result: RunResult) -> Figure:
    """Evaluation images of a run: clean, measured, baseline and restored, as a figure that notebooks display."""
    figure = restored(result)
    if figure is None:
        raise UsageError(
            "no images to show: the recipe has no evaluation images; add evaluation: {name: photos}"
        )
    return figure


def restored(result: RunResult) -> Figure | None:
    """Clean (if known), measured, baseline (if there is one) and restored: one row per evaluation image."""
    evaluation, baseline = result.evaluation, result.baseline
    if evaluation is None or not evaluation.images:
        return None
    metric, rows = evaluation.metric, []
    for i, image in enumerate(evaluation.images):
        row: list[tuple[str, Tensor, float | None]] = []
        if image.x_true is not None:
            row.append(("clean", image.x_true, None))
        row.append(("measured", image.start, _value(evaluation.before, metric, i)))
        if baseline and result.model.recipe.baseline:
            row.append(
                (result.model.recipe.baseline.name, baseline.images[i].x, _value(baseline.after, metric, i))
            )
        row.append(("restored", image.x, _value(evaluation.after, metric, i)))
        rows.append(row)
    figure = _figure(2.6 * len(rows[0]), 2.72 * len(rows))
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for i, row in enumerate(rows):
        for j, (title, picture, value) in enumerate(row):
            _show(axes[i, j], picture, evaluation.range)
            label = title if metric is None or value is None else f"{title}  {metric.show(value)}"
            text = label if j else f"{evaluation.labels[i]}, {label}"
            axes[i, j].set_title(text, fontsize=9, color=_INK)
    return figure


def _value(values: Mapping[str, Sequence[float]], metric: Metric | None, i: int) -> float | None:
    return None if metric is None else values[metric.name][i]


def curves(result: RunResult) -> Figure | None:
    """Loss of each batch and the metric of the checks against computations."""
    history = [record for record in result.history if record["loss"] is not None]
    if not history:
        return None
    figure = _figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    cost = [record["computations"] for record in history]
    loss = [record["loss"] for record in history]
    left.plot(cost, loss, color=_ACCENT, alpha=0.35, linewidth=0.8, label="per step")
    left.plot(cost, _smooth(loss), color=_ACCENT, linewidth=1.6, label="running mean")
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.set_title("training loss", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    for images, label, color in (("validation", "validation", _SECOND), ("evaluation", "test", _ACCENT)):
        name = f"{images}_{result.metric.name}"
        checks = [(record["computations"], record[name]) for record in history if name in record]
        if checks:
            places, values = zip(*checks, strict=True)
            right.plot(places, values, color=color, marker="o", markersize=3, label=label)
    right.set_title(result.metric.title, fontsize=10)
    if right.lines:
        right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("computations", fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 3))
    return figure


def filters(result: RunResult) -> Figure | None:
    """The filters of the regularizer, most important first."""
    model = result.model
    pictures = shown_filters(model.problem, model.prepared) if isinstance(model, Model) else None
    if pictures is None:
        return None
    columns = min(len(pictures), 10)
    rows = -(-len(pictures) // columns)
    figure = _figure(0.95 * columns, 0.95 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False)
    for cell in axes.flat:
        cell.axis("off")
    for cell, kernel in zip(axes.flat, pictures.detach().cpu(), strict=False):
        _show(cell, 0.5 + 0.5 * kernel / kernel.abs().max().clamp_min(1e-12))
    figure.suptitle("learned filters, most important first", fontsize=10, color=_INK)
    return figure


def maps(result: RunResult) -> Figure | None:
    """The other pictures that components make of θ, e.g. a kernel or a sampling pattern: one row each."""
    model = result.model
    parameters = shown_parameters(model.problem, model.prepared) if isinstance(model, Model) else []
    if not parameters:
        return None
    columns = max(len(parameter.values) for parameter in parameters)
    figure = _figure(2.6 * columns, 3.1 * len(parameters))
    for row, parameter in zip(
        figure.subfigures(len(parameters), 1, squeeze=False).flat, parameters, strict=True
    ):
        cells = row.subplots(1, columns, squeeze=False, gridspec_kw={"wspace": 0.08})[0]
        for cell in cells:
            cell.axis("off")
        for cell, picture in zip(cells, parameter.shades, strict=False):
            _show(cell, picture)
        caption = textwrap.fill(parameter.caption, _CAPTION * columns)
        row.suptitle(f"{caption}\n{parameter.scale}", fontsize=8, color=_INK, x=0.01, ha="left")
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _shown_figure()(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@cache
def _shown_figure() -> type[Figure]:
    """A figure that a notebook displays with any backend."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110, facecolor="white")
            return buffer.getvalue()

    return ShownFigure


def _show(axes: Any, picture: Tensor, span: Range = UNIT) -> None:
    image = to_unit(picture, span).permute(1, 2, 0).numpy()
    axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.axis("off")


def _smooth(values: list[float], share: float = 0.05) -> list[float]:
    """Exponential running mean over a share of the run."""
    rate = 1 / max(1.0, share * len(values))
    smooth, mean = [], values[0]
    for value in values:
        mean += rate * (value - mean)
        smooth.append(mean)
    return smooth
