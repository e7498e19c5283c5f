"""A cell of a sweep as a job of a cluster: it runs ``blt`` and resumes by itself when the job is started again.

Before its time limit or a preemption Slurm sends SIGUSR2, which submitit turns into a call of ``checkpoint``: the run
writes its checkpoint, and the job is queued once more. What decides whether a run is resumed is the run directory, not
the state of the job.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bltoolbox.runs.files import append_to
from bltoolbox.runs.history import RunHistory, has_checkpoint, is_run

#: Seconds between two looks at the process, and those it gets for its checkpoint.
_PAUSE, _PATIENCE = 0.5, 90.0


class CellTask:
    """Runs one cell; plain texts only, since submitit stores it in a file."""

    def __init__(self, start: list[str], flags: list[str], path: str, log: str, root: str) -> None:
        #: ``run RECIPE KEY=VALUE… --out PATH``, and options for starting and resuming.
        self.start, self.flags = start, flags
        self.path, self.log, self.root = path, log, root

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "process"}

    def __call__(self) -> int:
        """Run or resume until the run ends; returns its exit code."""
        command = [sys.executable, "-m", "bltoolbox", *self._arguments(), "--verbose", *self.flags]
        with append_to(Path(self.log), within=Path(self.root)) as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{stamp}  $ blt {shlex.join(command[3:])}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_ignore_warning
            )
        # Not wait(), which would hold a lock that ``checkpoint``, called by a signal, needs.
        while self.process.poll() is None:
            time.sleep(_PAUSE)
        return int(self.process.returncode)

    def _arguments(self) -> list[str]:
        path = Path(self.path)
        if is_run(path) and (has_checkpoint(path) or RunHistory.read(path).finished):
            return ["resume", self.path]
        # A job that was stopped before its first checkpoint has left a directory.
        return [*self.start, *(["--overwrite"] if is_run(path) else [])]

    def checkpoint(self) -> Any:
        """Stop the run, which writes its checkpoint; returns what is queued again."""
        from submitit.helpers import DelayedSubmission

        deadline = time.monotonic() + _PATIENCE
        os.kill(self.process.pid, signal.SIGTERM)
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return DelayedSubmission(CellTask(self.start, self.flags, self.path, self.log, self.root))


def _ignore_warning() -> None:
    """Slurm may send its warning to all processes of a job; this one is stopped by ``checkpoint``."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
