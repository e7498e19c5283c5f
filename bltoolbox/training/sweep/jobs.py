"""The runs of a sweep: a few at a time, each in its own process, so that a failure does not affect the others.

A signal to the sweep is passed on to its runs, which write their checkpoints. Runs have their own sessions: Ctrl-C
reaches them once, through the sweep, and they outlive a sweep that is killed; the next one waits for them.

This does not use ``concurrent.futures``: one killed worker breaks an entire pool of processes, its workers die with the
sweep, and a pool of threads would only wait for the same processes, which still have to be started, signalled and found
again.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bltoolbox.config.reading import FileRefused, read_end
from bltoolbox.distributed.gpus import VISIBLE, least_busy, visible_gpus
from bltoolbox.distributed.launch import processors
from bltoolbox.distributed.signals import collected
from bltoolbox.runs.files import append_to
from bltoolbox.runs.history import RunHistory, is_run
from bltoolbox.runs.locks import is_locked
from bltoolbox.runs.logs import read_status
from bltoolbox.training.sweep.plan import Planned, State, Sweep

_THREADS = "OMP_NUM_THREADS"
#: Seconds between two checks of the processes.
_PAUSE = 0.1


class Watcher(Protocol):
    """Displays the progress of the cells."""

    def show(self, cells: Sequence[Planned]) -> None:
        """Called a few times a second."""
        ...

    def say(self, sentence: str) -> None:
        """Show a message."""
        ...


@dataclass
class _Job:
    """A cell that is running; ``process`` is None if an earlier, killed sweep started it."""

    planned: Planned
    process: subprocess.Popen[bytes] | None
    #: The GPU that it was given, if any.
    gpu: str | None = None

    def ended(self) -> bool:
        return not is_locked(self.planned.path) if self.process is None else self.process.poll() is not None


class Jobs:
    """Runs the remaining cells of a sweep."""

    def __init__(self, sweep: Sweep, count: int, plugins: Sequence[Path], watcher: Watcher) -> None:
        self.sweep = sweep
        self.count = count
        self.plugins = [argument for file in plugins for argument in ("--plugin", str(file))]
        self.watcher = watcher
        self.waiting = [planned for planned in sweep.cells if planned.state is State.WAITING]
        self.running = [_Job(planned, None) for planned in sweep.cells if planned.state is State.RUNNING]
        #: The signals received, and how many of them were passed on.
        self.signals: list[int] = []
        self.passed = 0

    def run(self) -> int | None:
        """Run until all cells are done or a signal arrives; returns the number of the signal."""
        for job in self.running:
            self.watcher.say(f"{job.planned.name}: still running in another process; waiting for it")
        with collected() as self.signals:
            self._refill()
            while self.running or (self.waiting and not self.signals):
                while self.waiting and len(self.running) < self.count and not self.signals:
                    self._start(self.waiting.pop(0))
                for job in [job for job in self.running if job.ended()]:
                    self.running.remove(job)
                    self._end(job)
                self._refill()
                self._pass_on()
                if self.signals:  # a process of another sweep cannot be interrupted
                    self.running = [job for job in self.running if job.process is not None]
                self.watcher.show(self.sweep.cells)
                time.sleep(_PAUSE)
        return self.signals[0] if self.signals else None

    def _refill(self) -> None:
        """Look at the runs and add cells, where the next ones depend on the results; a grid has them all."""

    def _start(self, planned: Planned) -> None:
        resumed = self.sweep.resumable(planned)
        if resumed:
            arguments = ["resume", str(planned.path.absolute())]
        else:
            if kept := self.sweep.set_aside(planned):
                self.watcher.say(f"{planned.name}: restarted; the old run is kept in {kept}")
            arguments = start_arguments(self.sweep, planned)
        gpu = self._gpu(planned)
        command = [sys.executable, "-m", "bltoolbox", *arguments, "--verbose", *self.plugins]
        with append_to(planned.log, within=self.sweep.path) as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  $ blt {shlex.join(command[3:])}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(gpu),
                start_new_session=True,
            )
        planned.state, planned.reason, planned.code = State.RUNNING, None, None
        self.running.append(_Job(planned, process, gpu))

    def _gpu(self, planned: Planned) -> str | None:
        """The GPU with the fewest runs, for a run that does not name one itself."""
        if planned.recipe.get("device") not in ("auto", "cuda"):
            return None
        return least_busy(visible_gpus(), [job.gpu for job in self.running])

    def _environment(self, gpu: str | None = None) -> dict[str, str]:
        """The processors are divided among the runs, unless the user has decided otherwise; each sees one GPU."""
        environment = dict(os.environ) | ({} if gpu is None else {VISIBLE: gpu})
        at_once = min(self.count, len(self.sweep.cells))
        if at_once > 1:
            environment.setdefault(_THREADS, str(max(1, processors() // at_once)))
        return environment

    def _end(self, job: _Job) -> None:
        planned = job.planned
        note_end(planned, None if job.process is None else job.process.returncode, bool(self.signals))
        self.sweep.save()

    def _pass_on(self) -> None:
        """Pass on the first signal; a second one kills the runs without waiting for checkpoints."""
        ours = [job.process for job in self.running if job.process is not None]
        if self.passed == 0 and self.signals:
            self.passed = 1
            for process in ours:
                process.send_signal(self.signals[0])
            if ours:
                self.watcher.say(
                    "interrupting the runs, which write their checkpoints; interrupt again to kill them"
                )
        if self.passed == 1 and len(self.signals) > 1:
            self.passed = 2
            for process in ours:
                process.kill()


def start_arguments(sweep: Sweep, planned: Planned) -> list[str]:
    """The arguments of ``blt`` that start a cell from its beginning."""
    recipe, path = str(sweep.recipe_file.absolute()), str(planned.path.absolute())
    return ["run", recipe, *planned.cell.overrides, "--out", path]


def note_end(planned: Planned, code: int | None, interrupted: bool) -> None:
    """Record how a cell has ended, from its directory and its exit code, which is None if it is unknown."""
    there = is_run(planned.path)
    finished = there and RunHistory.read(planned.path).finished
    status = str((read_status(planned.path) or {}).get("status", ""))
    vanished = code is None and not there and not interrupted and planned.log.exists()
    if finished:
        planned.state = State.FINISHED
    elif status.startswith("failed") or not (
        interrupted or (code is None and not vanished) or (code or 0) < 0 or code in (130, 143)
    ):
        planned.state, planned.code = State.FAILED, 1 if status.startswith("failed") else code or 1
        planned.reason = (
            status.removeprefix("failed: ") if status.startswith("failed") else last_line_of(planned.log)
        )
    elif code is not None and code < 0 and not interrupted:
        planned.state, planned.reason = State.KILLED, f"killed by {signal.Signals(-code).name}"
    else:
        planned.state, planned.reason = State.INTERRUPTED, "interrupted"


def last_line_of(log: Path) -> str:
    """The last line of the output of a failed process."""
    try:
        lines = read_end(log, 2**16, follow=False).decode("utf-8", "replace").splitlines()
    except (OSError, FileRefused):
        lines = []
    output = [line.strip() for line in lines if line.strip() and "  $ blt " not in line]
    return output[-1].removeprefix("error: ") if output else "it exited without output"
