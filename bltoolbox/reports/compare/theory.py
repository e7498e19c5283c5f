"""The figure of the convergence theorem: the smallest gradient so far, and its bound, against the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bltoolbox.reports.compare.figures import STYLE, line_style, log_scale, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Curve(Protocol):
    @property
    def left(self) -> Sequence[float]: ...

    @property
    def right(self) -> Sequence[float]: ...

    @property
    def floor(self) -> Sequence[float]: ...


#: The titles of the panels, each with its curves and their labels.
Panels = Sequence[tuple[str, Sequence[tuple[str, _Curve]]]]


def draw_theory(panels: Panels) -> Figure:
    """One panel for each quantity that is varied: measurements as full lines, bounds as dashed ones and, in the last
    panel, what the bounds owe to inexact solutions as dotted ones."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = new_figure(7.4, 3.3)
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (title, curves) in zip(axes, panels, strict=True):
            for number, (label, curve) in enumerate(curves):
                steps = range(1, len(curve.left) + 1)
                style = line_style(number)
                axis.plot(steps, curve.left, label=label, **style)
                axis.plot(steps, curve.right, **(style | {"linestyle": "--", "linewidth": 1.0}))
                if axis is axes[-1]:
                    axis.plot(steps, curve.floor, **(style | {"linestyle": ":", "linewidth": 1.2}))
            log_scale(axis, "y")
            axis.set_title(title)
            axis.set_xlabel("steps T")
            axis.grid(True, which="major")
            axis.legend(frameon=False)
        axes[0].set_ylabel("min E‖∇f‖² (full), bound (dashed), its errors (dotted)")
    return figure
