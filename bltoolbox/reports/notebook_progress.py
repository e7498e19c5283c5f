"""The progress of a run in a notebook: one small HTML table that is updated in place.

It needs IPython, which every notebook has, and no widgets: the last state stays in the saved notebook, in the colours
of its own theme.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Self

from bltoolbox.reports.progress import State, clock
from bltoolbox.restoration.results import RunResult

if TYPE_CHECKING:
    from bltoolbox.bilevel.records import Theta
    from bltoolbox.restoration.results import Check

#: Seconds between two updates.
_PAUSE = 0.25


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookProgress(State):
    """A bar over the budget with the figures of the last step and check."""

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self.html = HTML
        self.handle: Any = display(HTML(self._page()), display_id=True)
        self.updated_at = 0.0
        self.where = self.status = ""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.doing = self.status
        if error is not None:
            self.doing = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped by an error"
        self._update(at_once=True)

    def started(self, experiment: Any) -> None:
        super().started(experiment)
        self.where = "" if experiment.run_dir is None else str(experiment.run_dir)
        self._update(at_once=True)

    def phase(self, sentence: str) -> None:
        super().phase(sentence)
        self._update(at_once=True)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        super().stepped(record, seconds, fraction)
        self._update()

    def checked(self, check: Check, theta: Theta) -> None:
        super().checked(check, theta)
        self._update()

    def finished(self, result: RunResult) -> None:
        self.status = result.status

    def _update(self, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self.updated_at >= _PAUSE:
            self.updated_at = time.monotonic()
            self.handle.update(self.html(self._page()))

    def _page(self) -> str:
        left = self.left
        times = clock(self.elapsed) + (f", {clock(left)} left" if left and not self.doing else "")
        cells = [f"step {self.step}", self.doing, times, self.figures()]
        words = " · ".join(escape(cell) for cell in cells if cell)
        where = getattr(self, "where", "")
        below = f"<br><small>{escape(where)}</small>" if where else ""
        bar = f'<progress value="{self.fraction:.4f}" max="1" style="width: 16em"></progress>'
        return f'<div style="font-family: inherit">{bar} {100 * self.fraction:.0f} % · {words}{below}</div>'
