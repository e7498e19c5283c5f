"""The figure of hypergradient components: the error of z against derivatives and against time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bltoolbox.reports.compare.figures import STYLE, line_style, log_scale, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Point(Protocol):
    @property
    def error(self) -> float: ...

    @property
    def cost(self) -> float: ...

    @property
    def seconds(self) -> float: ...


class _Curve(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def points(self) -> Sequence[_Point]: ...


_AXES = {
    "cost": "derivatives per task (gradients, Hessian products, θ-derivatives)",
    "seconds": "processor time in s",
}


def draw_errors(curves: Sequence[_Curve]) -> Figure:
    """Relative error of z, one line per component, through its settings that no cheaper one beats."""
    import matplotlib
    from matplotlib.lines import Line2D

    with matplotlib.rc_context(STYLE):
        columns = min(5, max(1, len(curves)))
        figure = new_figure(7.4, 3.4 + 0.19 * -(-len(curves) // columns))
        panels = figure.subplots(1, 2, sharey=True)
        for panel, (axis, label) in zip(panels, _AXES.items(), strict=True):
            for number, curve in enumerate(curves):
                x, y = front([(getattr(point, axis), point.error) for point in curve.points])
                panel.plot(x, y, marker="o", markersize=2.6, **line_style(number))
            if any(curve.points for curve in curves):
                log_scale(panel, "x")
                log_scale(panel, "y")
            panel.set_xlabel(label)
            panel.grid(True, which="major")
        panels[0].set_ylabel("relative error of z")
        handles = [
            Line2D([], [], label=curve.name, **line_style(number, 1.8)) for number, curve in enumerate(curves)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)
    return figure


def front(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The points (cost, error) with a smaller error than every cheaper one, in the order of cost."""
    kept: list[tuple[float, float]] = []
    for cost, error in sorted(points):
        if not kept or error < kept[-1][1]:
            kept.append((cost, max(error, 1e-16)))
    return [cost for cost, _ in kept], [error for _, error in kept]
