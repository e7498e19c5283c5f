"""A sweep on a cluster: one job per cell, submitted with submitit and followed until all have ended.

The sweep directory must be on a file system that all machines share. The identifiers of the jobs are in its
``jobs.json``, so a repeated command follows jobs that are queued instead of submitting them twice. Jobs outlive the
command: interrupting it leaves them on the cluster.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bltoolbox.config.names import JOBS_FILE
from bltoolbox.config.reading import read_json
from bltoolbox.distributed.signals import collected
from bltoolbox.errors import BltError, MissingError
from bltoolbox.runs.files import make_folder, write_json
from bltoolbox.training.sweep.cell_task import CellTask
from bltoolbox.training.sweep.jobs import Watcher, note_end, start_arguments
from bltoolbox.training.sweep.plan import Planned, State, Sweep
from bltoolbox.training.sweep.resources import Resources

#: Seconds between two questions to the scheduler, and between two looks at the run directories.
_ASK, _PAUSE = 5.0, 0.2
#: Where submitit keeps its own files.
_FOLDER = "slurm"
_IDENTIFIER = re.compile(r"[0-9]+(_[0-9]+)?")


class Queue:
    """Jobs of a cluster: ``slurm``, or ``local`` for processes of this machine that behave alike."""

    def __init__(self, folder: Path, resources: Resources, cluster: Literal["slurm", "local"]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise MissingError(
                "--on slurm needs the package submitit, which is not installed or cannot be imported;"
                " run pip install 'bltoolbox[slurm]', or write a script with --emit"
            ) from error
        if cluster == "slurm" and not all(shutil.which(name) for name in ("sbatch", "squeue", "srun")):
            raise MissingError(
                "there is no Slurm here: sbatch, squeue or srun is not in PATH; run this on a login node, or write a"
                " script with --emit"
            )
        self.submitit: Any = submitit
        self.folder, self.resources, self.cluster = folder, resources, cluster
        self.jobs: dict[str, Any] = {}
        self.last: dict[str, str] = {}

    def submit(self, tasks: Sequence[CellTask], name: str) -> list[str]:
        """Queue tasks as one array; returns their identifiers."""
        resources = self.resources
        options: dict[str, Any] = {
            "name": name,
            "cpus_per_task": resources.cpus,
            "slurm_signal_delay_s": resources.notice,
            "slurm_additional_parameters": {"requeue": True, **resources.further},
        }
        chosen = {
            "slurm_partition": resources.partition,
            "timeout_min": resources.minutes,
            "gpus_per_node": resources.gpus or None,
            "slurm_array_parallelism": resources.parallel or len(tasks),
        }
        options |= {key: value for key, value in chosen.items() if value is not None}
        # A run that needs several time limits is queued again each time.
        executor = self.submitit.AutoExecutor(
            str(self.folder), cluster=self.cluster, slurm_max_num_timeout=1000
        )
        executor.update_parameters(**options)
        try:
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
        except Exception as error:
            detail = str(error).strip().splitlines()
            raise BltError(
                f"the cluster did not accept the jobs: {detail[-1] if detail else error}"
            ) from error
        self.jobs |= {job.job_id: job for job in jobs}
        return [job.job_id for job in jobs]

    def states(self, identifiers: Sequence[str]) -> dict[str, str]:
        """The state of each job that has not ended, e.g. ``PENDING``; the last answer if the scheduler gives none."""
        if self.cluster == "local":
            return {key: "RUNNING" for key in identifiers if key in self.jobs and not self.jobs[key].done()}
        command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            return self.last
        pairs = (line.split() for line in answer.stdout.splitlines())
        wanted = set(identifiers)
        self.last = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[0] in wanted}
        return self.last


class ClusterJobs:
    """Submits the remaining cells of a sweep and follows them."""

    def __init__(self, sweep: Sweep, queue: Queue, plugins: Sequence[Path], watcher: Watcher) -> None:
        self.sweep, self.queue, self.watcher = sweep, queue, watcher
        self.flags = [word for file in plugins for word in ("--plugin", str(Path(file).absolute()))]
        self.identifiers: dict[str, str] = {}

    def submit(self) -> list[str]:
        """Submit the cells that neither have a result nor are queued; returns the identifiers of all jobs."""
        self.identifiers = self._recorded()
        queued = self.queue.states(list(self.identifiers.values()))
        self.identifiers = {name: key for name, key in self.identifiers.items() if key in queued}
        remaining = [
            cell
            for cell in self.sweep.cells
            if cell.state is State.WAITING and cell.name not in self.identifiers
        ]
        if remaining:
            make_folder(self.sweep.path / _FOLDER, within=self.sweep.path)
            keys = self.queue.submit([self._task(cell) for cell in remaining], self.sweep.plan.name)
            self.identifiers |= {cell.name: key for cell, key in zip(remaining, keys, strict=True)}
        write_json(self.sweep.path / JOBS_FILE, self.identifiers, within=self.sweep.path)
        return list(dict.fromkeys(key.partition("_")[0] for key in self.identifiers.values()))

    def follow(self) -> int | None:
        """Wait until all jobs have ended; returns the number of a signal that ended the waiting."""
        left = {cell.name: cell for cell in self.sweep.cells if cell.name in self.identifiers}
        asked = -_ASK
        with collected() as signals:
            while left and not signals:
                if time.monotonic() - asked >= (_ASK if self.queue.cluster == "slurm" else _PAUSE):
                    states = self.queue.states([self.identifiers[name] for name in left])
                    asked = time.monotonic()
                    for cell in list(left.values()):
                        self._look(cell, states, left)
                self.watcher.show(self.sweep.cells)
                time.sleep(_PAUSE)
        self.sweep.save()
        return signals[0] if signals else None

    def _look(self, cell: Planned, states: Mapping[str, str], left: dict[str, Planned]) -> None:
        state = states.get(self.identifiers[cell.name])
        if state is None:
            note_end(cell, code=None, interrupted=False)
            del left[cell.name]
            self.sweep.save()
        else:
            cell.state = State.WAITING if state in ("PENDING", "REQUEUED", "REQUEUE_HOLD") else State.RUNNING

    def _task(self, cell: Planned) -> CellTask:
        if not self.sweep.resumable(cell) and (kept := self.sweep.set_aside(cell)):
            self.watcher.say(f"{cell.name}: restarted; the old run is kept in {kept}")
        paths = (str(path.absolute()) for path in (cell.path, cell.log, self.sweep.path))
        return CellTask(start_arguments(self.sweep, cell), self.flags, *paths)

    def _recorded(self) -> dict[str, str]:
        """The jobs of an earlier command, by cell."""
        try:
            content = read_json(self.sweep.path / JOBS_FILE, follow=False)
        except (OSError, ValueError):
            return {}
        names = {cell.name for cell in self.sweep.cells}
        return {
            name: key
            for name, key in (content.items() if isinstance(content, dict) else ())
            if name in names and isinstance(key, str) and _IDENTIFIER.fullmatch(key)
        }
