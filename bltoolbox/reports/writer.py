"""The figures and the report of a run that has just finished."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from bltoolbox.bilevel.events import Listener
from bltoolbox.config.names import PICTURES, REPORT_FILE
from bltoolbox.reports.figures import draw
from bltoolbox.reports.html.build import report_result
from bltoolbox.restoration.results import RunResult

log = logging.getLogger(__name__)


class ReportWriter(Listener):
    """Writes figures and report into a run directory; an error here does not make the run fail.

    ``display`` shows what takes time here; the other listeners have seen the end of the run.
    """

    def __init__(self, path: Path, display: Sequence[Listener] = ()) -> None:
        self.path = path
        self.display = display

    def finished(self, result: RunResult) -> None:
        for name, noun, write in (
            (PICTURES, "figures", self._draw),
            (REPORT_FILE, "report", self._report),
        ):
            for listener in self.display:
                listener.phase(f"writing the {noun}")
            try:
                write(result)
            except Exception as error:
                log.warning("%s", f"{name} could not be written: {type(error).__name__}: {error}")

    def _draw(self, result: RunResult) -> None:
        draw(result, self.path / PICTURES)

    def _report(self, result: RunResult) -> None:
        report_result(self.path, result)
