"""Where the time of a run goes: a trace of its first steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.names import TRACE_FILE
from bltoolbox.restoration.results import RunResult
from bltoolbox.runs.files import write_bytes

if TYPE_CHECKING:
    from bltoolbox.training.experiment import Experiment


class Profile(Listener):
    """Records what the host and the device do during the first steps, and writes it to ``path``."""

    def __init__(self, path: Path, steps: int = 5) -> None:
        self.path = path
        self.left = steps
        self._recording: profiler.profile | None = None

    def started(self, experiment: Experiment) -> None:
        self._recording = profiler.profile()
        self._recording.start()

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.left -= 1
        if self.left <= 0:
            self._write()

    def aborted(self, theta: Theta, reason: str) -> None:
        self._write()

    def finished(self, result: RunResult) -> None:
        self._write()

    def _write(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            with tempfile.TemporaryDirectory() as folder:
                exported = Path(folder, TRACE_FILE)
                self._recording.export_chrome_trace(str(exported))
                write_bytes(self.path, exported.read_bytes(), within=self.path.parent)
            self._recording = None
