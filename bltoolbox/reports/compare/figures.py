"""Figures of several runs: their curves on four panels. Colours are those of Okabe and Ito, for colour-blind
readers."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bltoolbox.config.names import refuse_unusable_name
from bltoolbox.errors import BltError, UsageError
from bltoolbox.reports.compare.comparison import Axis, Comparison, Curve, band
from bltoolbox.runs.files import write_bytes
from bltoolbox.runs.history import IMAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))

#: Text stays text in a vector file; the sizes suit a paper.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.0,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#3a3a3a",
    "xtick.color": "#3a3a3a",
    "ytick.color": "#3a3a3a",
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "bltoolbox",
}
_LABELS: dict[Axis, str] = {
    "computations": "computations (lower-level and linear iterations)",
    "seconds": "training time in s",
}
#: A logarithmic axis is used if the values span this factor.
_WIDE_X, _WIDE_Y = 30.0, 4.0
#: Characters that fit into a line of the legend.
_LEGEND_WIDTH = 102


def draw_curves(comparison: Comparison) -> Figure:
    """Loss (above) and quality (below) against computations (left) and seconds (right)."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        titles = [textwrap.fill(group.title, _LEGEND_WIDTH) for group in comparison.groups]
        columns = _legend_columns(titles)
        tallest = max((title.count("\n") + 1 for title in titles), default=1)
        rows = tallest * math.ceil(len(titles) / columns)
        figure = new_figure(7.4, 5.2 + 0.19 * rows)
        panels = figure.subplots(2, 2, sharex="col", sharey="row")
        axes: tuple[Axis, ...] = ("computations", "seconds")
        for column, axis in enumerate(axes):
            _draw_column(comparison, axis, panels[0][column], panels[1][column])
            panels[1][column].set_xlabel(_LABELS[axis])
        panels[0][0].set_ylabel("training loss per mini-batch")
        panels[1][0].set_ylabel(
            f"mean {IMAGES[comparison.images]} {_within_sentence(comparison.metric.title)}"
        )
        handles = [_handle(number, title) for number, title in enumerate(titles)]
        figure.legend(
            handles=handles, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.2
        )
        figure.align_ylabels(panels[:, 0])
    return figure


def _draw_column(comparison: Comparison, axis: Axis, above: Any, below: Any) -> None:
    from matplotlib.ticker import EngFormatter

    losses = [[comparison.losses(run, axis) for run in group.runs] for group in comparison.groups]
    raw = [
        [comparison.losses(run, axis, smoothed=False) for run in group.runs] for group in comparison.groups
    ]
    qualities = [[comparison.qualities(run, axis) for run in group.runs] for group in comparison.groups]
    places = [x for curves in [*losses, *qualities] for curve in curves for x, _ in curve]
    log = _spans(places, _WIDE_X)
    # The initial θ has cost 0, which a logarithmic axis cannot show, so it is drawn at the left end.
    left = _left_end(places) if log else 0.0
    for number, _ in enumerate(comparison.groups):
        for curve in raw[number]:
            above.plot(*_xy(curve), **line_style(number, width=0.5), alpha=0.22, zorder=1)
        _draw_band(above, number, losses[number], log)
        lifted = [[(max(x, left), y) for x, y in curve] for curve in qualities[number]]
        _draw_band(below, number, lifted, log, markers=True)
    values = [y for curves in losses for curve in curves for _, y in curve]
    if _spans(values, _WIDE_Y) and min(values) > 0:
        log_scale(above, "y")
    for panel in (above, below):
        if log:
            log_scale(panel, "x")
            panel.set_xlim(left=left)
        else:
            panel.set_xlim(left=0.0)
            if max(places, default=0.0) >= 1e4:  # a common factor would be drawn over the label of the axis
                panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(True, which="major")
        panel.tick_params(which="both", labelleft=True, length=3)
        panel.tick_params(which="minor", length=1.8)
    for panel, curves, nothing in (
        (above, losses, "no losses in the logs"),
        (below, qualities, f"no checks with a {comparison.quality}"),
    ):
        if not any(curve for group in curves for curve in group):
            panel.text(
                0.5, 0.5, nothing, ha="center", va="center", transform=panel.transAxes, color="#666666"
            )


def _draw_band(panel: Any, number: int, curves: Sequence[Curve], log: bool, markers: bool = False) -> None:
    common = band(curves, log)
    if common is None:  # seeds without a common range: each separately
        for curve in curves:
            panel.plot(*_xy(curve), **line_style(number), zorder=3)
        return
    if len([curve for curve in curves if curve]) > 1:
        panel.fill_between(
            common.x,
            common.low,
            common.high,
            color=COLOURS[number % len(COLOURS)],
            alpha=0.18,
            linewidth=0,
            zorder=2,
        )
    elif markers and len(common.x) <= 40:
        panel.plot(common.x, common.mean, **line_style(number, width=0), marker="o", markersize=2.6, zorder=3)
    panel.plot(common.x, common.mean, **line_style(number), zorder=3)


def line_style(number: int, width: float = 1.5) -> dict[str, Any]:
    """Colour, and once all colours are used, dashes."""
    dashes = _DASHES[number // len(COLOURS) % len(_DASHES)]
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": dashes if width else "none",
        "linewidth": width,
    }


def _handle(number: int, title: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=title, **line_style(number, 1.8))


def _within_sentence(title: str) -> str:
    """``Loss`` as loss, but ``PSNR`` and ``R²`` as they are."""
    return title[0].lower() + title[1:] if title[1:2].islower() else title


def _legend_columns(titles: Sequence[str]) -> int:
    longest = max((len(line) for title in titles for line in title.splitlines()), default=1)
    return max(1, min(4, len(titles), int((_LEGEND_WIDTH + 8) / (longest + 8))))


def log_scale(panel: Any, which: str) -> None:
    """A logarithmic axis, with labels between the powers of ten if there are few of them."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    (panel.set_xscale if which == "x" else panel.set_yscale)("log")
    axis = panel.xaxis if which == "x" else panel.yaxis
    low, high = axis.get_view_interval()
    if high / low < 30:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}" if high < 1e5 else LogFormatterSciNotation(labelOnlyBase=False))
    axis.set_minor_formatter(NullFormatter())


def _spans(values: Sequence[float], factor: float) -> bool:
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > factor


def _left_end(places: Sequence[float]) -> float:
    return 0.8 * min(place for place in places if place > 0)


def _xy(curve: Curve) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of its name."""
    import matplotlib

    kind = path.suffix[1:].lower()
    buffer = io.BytesIO()
    metadata = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, facecolor="white", metadata=metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
    except OSError as error:
        raise BltError(f"{path} cannot be written: {error.strerror or error}") from error


def check_targets(paths: Iterable[Path], force: bool) -> None:
    """Refuse targets that cannot be written or would be overwritten, before any work is done."""
    for path in paths:
        refuse_unusable_name(path)
        if path.suffix[1:].lower() not in FORMATS:
            raise UsageError(f"{path}: a figure is a .png, .svg or .pdf file")
        if path.is_dir():
            raise UsageError(f"{path} is a folder; give a file")
        if path.exists() and not force:
            raise UsageError(f"{path} exists; choose another name with -o, or replace it with --force")
