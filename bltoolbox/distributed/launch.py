"""``--nproc N``: a run as N processes on this machine, watched until they end.

Like torchrun without its restarts, but with what a user at a terminal expects: a signal reaches every rank
once, ranks may take their time to write a checkpoint, and the exit code is that of the run. A rank that
is killed is named, and the others stop. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bltoolbox.distributed.signals import collected
from bltoolbox.errors import UsageError

#: Where the ranks find each other, the pipe that closes with the launcher, and how long ranks wait for each other.
RENDEZVOUS, LIFELINE, TIMEOUT = "BLT_RENDEZVOUS", "BLT_LIFELINE", "BLT_RANK_TIMEOUT"
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
#: The number of a rank on its machine, by whoever started it.
_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
#: The default and the maximum of the time limit, in seconds.
_WAIT, _LONGEST_WAIT = 1800.0, 1e7
_PAUSE = 0.05
#: The processor time that a container may use: microseconds per period.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Seconds for the others to notice that a rank has failed, and then to exit when asked to.
_NOTICE, _END = 60.0, 20.0


@dataclass(frozen=True)
class Place:
    """The place of this process among those of a run."""

    rank: int = 0
    size: int = 1
    #: Number on this machine.
    local: int = 0
    #: How often torchrun has restarted these processes.
    restarts: int = 0

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """From the variables that torchrun sets; the number on this machine may also come from Slurm or Open MPI."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return cls()
        local = next((name for name in _LOCAL if name in environment), _LOCAL[0])
        names = ("RANK", "WORLD_SIZE", local, "TORCHELASTIC_RESTART_COUNT")
        try:
            rank, size, number, restarts = (int(environment.get(name, "0")) for name in names)
        except ValueError as error:
            raise UsageError(f"{', '.join(names)} must be numbers, as torchrun sets them: {error}") from error
        if not 0 <= rank < size or number < 0 or restarts < 0:
            raise UsageError(f"RANK={rank}, {local}={number} is not one of WORLD_SIZE={size} ranks")
        return cls(rank, size, number, restarts)


def invocation(environment: Mapping[str, str] = os.environ) -> str:
    """An identity shared by the restarts of one torchrun and by no other run: its id or its process."""
    named = environment.get("TORCHELASTIC_RUN_ID", "none")
    if named != "none":  # the default of torchrun
        return f"torchrun {named}"
    parent = os.getppid()
    try:  # its start time, since process numbers are reused
        since = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = ""
    return f"{platform.node()} {parent} {since}".rstrip()


def rank_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds that ranks wait for each other."""
    text = environment.get(TIMEOUT) or str(_WAIT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_WAIT:
        raise UsageError(f"{TIMEOUT}={text!r} is not a number of seconds between 0 and {_LONGEST_WAIT:g}")
    return seconds


def may_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun restarts these processes if one fails."""
    text = environment.get(_RESTARTS) or "0"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{_RESTARTS}={text!r} is not a whole number, as torchrun sets it")
    return int(text) > 0


class Launcher:
    """N processes with the same command, as ranks of one run."""

    def __init__(self, arguments: Sequence[str], count: int) -> None:
        self.arguments = arguments
        self.count = count
        self.processes: list[subprocess.Popen[bytes]] = []
        self.signals: list[int] = []

    def run(self) -> int:
        """Wait until all have ended; returns the exit code of the run, 1 if a rank was killed."""
        with (
            tempfile.TemporaryDirectory(prefix="blt-") as folder,
            collected() as self.signals,
            self._ending(),
            _pipe() as (read, _),
        ):
            for rank in range(self.count):
                command = [sys.executable, "-m", "bltoolbox", *self.arguments]
                # Its own session: Ctrl-C reaches a rank once, through this process.
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=self._environment(rank, folder, read),
                        pass_fds=[read],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
            self._watch()
        return self._code()

    def killed(self) -> dict[int, str]:
        """The ranks killed by a signal, with the signal."""
        return {
            rank: signal.Signals(-process.returncode).name
            for rank, process in enumerate(self.processes)
            if process.returncode < 0
        }

    def _environment(self, rank: int, folder: str, lifeline: int) -> dict[str, str]:
        """The processors are divided among the ranks, unless the user has decided otherwise."""
        environment = dict(os.environ) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            RENDEZVOUS: f"file://{folder}/ranks",
            LIFELINE: str(lifeline),
        }
        environment.setdefault("OMP_NUM_THREADS", str(max(1, processors() // self.count)))
        return environment

    def _watch(self) -> None:
        """Pass on signals, and stop the others soon after a rank has failed."""
        passed = 0
        failed_at: float | None = None
        told = False
        while any(process.poll() is None for process in self.processes):
            for number in self.signals[passed:]:
                # A second signal means: do not wait for the checkpoint.
                self._send(number if passed == 0 else signal.SIGKILL)
                passed += 1
            if failed_at is None and any(process.returncode for process in self.processes):
                failed_at = time.monotonic()
            late = 0.0 if failed_at is None else time.monotonic() - failed_at
            if late > _NOTICE and not told and not passed:
                told = True
                self._send(signal.SIGTERM)
            if late > _NOTICE + _END and told:
                self._send(signal.SIGKILL)
            time.sleep(_PAUSE)

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def _code(self) -> int:
        codes = [process.returncode for process in self.processes]
        if self.signals:
            return 128 + self.signals[0] if any(codes) else 0
        interrupted = [code for code in codes if code in (130, 143)]
        if any(code < 0 for code in codes) and not interrupted:
            return 1
        return next((code for code in (*interrupted, *codes) if code), 0)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Make sure that no process is left running, however this ends."""
        try:
            yield
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Only this process has the writing end, so readers notice when it ends, however it ends."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def processors() -> int:
    """The number of processors this process may use, limited by its affinity and its container."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # not Linux, no container, or "max"
        return usable
    return max(1, min(usable, round(quota / period)))
