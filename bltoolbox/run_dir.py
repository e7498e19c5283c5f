"""The run directory: what was asked, what happened, what came out, and where to go on from.

Files are replaced atomically. The logs are appended; a checkpoint remembers how long they were, and a resumed
run cuts them there, so that no line is lost or doubled. One process at a time: the directory is locked while a
run writes to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

import bltoolbox
from bltoolbox.checkpoint import Checkpoints
from bltoolbox.errors import BltError, UsageError
from bltoolbox.experiment import Experiment
from bltoolbox.files import write_bytes, write_json, write_text
from bltoolbox.history import is_run
from bltoolbox.interfaces import Theta
from bltoolbox.listeners import Check, Listener, RunResult
from bltoolbox.model import THETA_FILE, encode
from bltoolbox.ranks import ALONE, Ranks
from bltoolbox.reading import LOG, parse_json, read_text
from bltoolbox.report import REPORT_FILE

_LOGS = ("metrics.jsonl", "timings.jsonl", "checks.jsonl", "log.txt")
#: State to go on from, θ at each check, pictures.
_FOLDERS = ("checkpoints", "thetas", "images")
#: At most this share of the time goes into checkpoints, however often they are wanted.
_SHARE = 0.05


def fresh_directory(root: Path, name: str) -> Path:
    """``root/name/<time>``, not yet existing."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = root / name / stamp
    for count in range(2, 1000):
        if not path.exists():
            return path
        path = root / name / f"{stamp}_{count}"
    raise UsageError(f"{root / name} holds too many runs of this second")


class RunDirectory(Listener):
    """Writes a run to disk as it happens, and keeps its checkpoints."""

    def __init__(self, path: Path | str, *, overwrite: bool = False, ranks: Ranks = ALONE) -> None:
        self.path = Path(path)
        self.ranks = ranks
        self.logs: dict[str, IO[bytes]] = {}
        if not ranks.first:
            return
        if self.path.is_file():
            raise UsageError(f"{self.path} is a file; choose another run directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not overwrite:
            raise UsageError(f"{self.path} is not empty; choose another run directory or add --overwrite")

    def run(self, experiment: Experiment, listeners: Sequence[Listener] = ()) -> RunResult:
        """Run an experiment from its beginning into this directory."""
        recipe = experiment.recipe

        def prepare() -> None:
            self._clear()
            write_text(self.path / "recipe.yaml", recipe.text or recipe.to_yaml())
            write_text(self.path / "resolved.yaml", recipe.to_yaml())

        with self._taken(experiment, self._make, prepare):
            return self._go(experiment, listeners, None, {})

    def resume(self, experiment: Experiment, listeners: Sequence[Listener] = ()) -> RunResult:
        """Take up a run where its newest whole checkpoint left it."""
        with self._taken(experiment):
            content, passed = self.checkpoints.load(partial(_find_flaw, experiment))
            for sentence in passed if self.ranks.first else ():
                for listener in listeners:
                    listener.phase(sentence)

            def note() -> None:
                if self.ranks.first:
                    write_text(self.path / "resolved.yaml", experiment.recipe.to_yaml())

            self.ranks.each("resuming", note)
            run = content["run"] | {"own": content["own"]}
            return self._go(experiment, listeners, run, content["lengths"])

    def _go(
        self,
        experiment: Experiment,
        listeners: Sequence[Listener],
        content: Mapping[str, Any] | None,
        lengths: Mapping[str, int],
    ) -> RunResult:
        self.began = self.kept_at = self.ranks.now()
        self.every = experiment.recipe.checkpoint.every
        with contextlib.ExitStack() as stack:
            self.ranks.each("logs", lambda: self._open_logs(stack, lengths) if self.ranks.first else None)
            history = [] if content is None or not self.ranks.first else self._history()
            result = experiment.run([self, *listeners], self, content, history)
        return replace(result, run_dir=self.path)

    def due(self) -> bool:
        """Whether a checkpoint is wanted, and the share of time they may take allows one."""
        return self.ranks.now() - self.kept_at >= self.every

    def keep(self, content: Mapping[str, Any]) -> None:
        began = self.ranks.now()
        for log in self.logs.values():
            log.flush()
            os.fsync(log.fileno())
        lengths = {name: log.tell() for name, log in self.logs.items()}
        run = dict(content)
        self.checkpoints.save({"own": run.pop("own", None), "run": run, "lengths": lengths})
        self.kept_at = self.ranks.now()
        spent = self.kept_at - began
        if self.experiment.recipe.checkpoint.every:
            self.every = max(self.experiment.recipe.checkpoint.every, spent * (1 - _SHARE) / _SHARE)

    def started(self, experiment: Experiment) -> None:
        write_json(self.path / "env.json", environment(experiment))
        write_json(self.path / "status.json", {"status": "running", "bltoolbox": bltoolbox.__version__})
        self.log(
            f"started: {experiment.recipe.name}, {experiment.train.device},"
            f" {len(experiment.train)} training images"
        )

    def phase(self, sentence: str) -> None:
        self.log(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self._append("metrics.jsonl", json.dumps(record))
        self._append("timings.jsonl", json.dumps({"step": record["step"], "seconds": round(seconds, 6)}))

    def checked(self, check: Check, theta: Theta) -> None:
        self.log(str(check))
        self._append("checks.jsonl", json.dumps(check.as_dict()))
        self._save_theta(f"thetas/{check.step:06d}", theta)
        self._save_theta("checkpoints/last", theta)
        if check.best:
            self._save_theta("checkpoints/best", theta)

    def aborted(self, theta: Theta, reason: str) -> None:
        self._save_theta("checkpoints/last", theta)
        write_json(self.path / "status.json", {"status": reason, "bltoolbox": bltoolbox.__version__})
        self.log(reason)

    def finished(self, result: RunResult) -> None:
        from bltoolbox.figures import draw

        self._save_theta("checkpoints/last", result.last)
        write_bytes(self.path / THETA_FILE, encode(result.theta, self.experiment.recipe))
        draw(result, self.path / "images")
        self.log(f"finished: {result.status}")
        summary = result.as_dict() | {"run_dir": str(self.path), "bltoolbox": bltoolbox.__version__}
        write_json(self.path / "status.json", summary | {"finished": True})
        self._report(result)

    def _report(self, result: RunResult) -> None:
        """The page about the run; whatever is wrong with it, the run is finished."""
        from bltoolbox.report import report_result

        try:
            report_result(self.path, result)
        except Exception as error:
            sentence = f"there is no {REPORT_FILE}: {type(error).__name__}: {error}"
            logging.getLogger(__name__).warning("%s", sentence)
            self.log(sentence)

    def log(self, sentence: str) -> None:
        self._append("log.txt", f"{time.perf_counter() - self.began:9.2f} s  {sentence}")

    def _append(self, name: str, line: str) -> None:
        self.logs[name].write(line.encode() + b"\n")
        self.logs[name].flush()

    def _make(self) -> None:
        try:
            for name in _FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BltError(f"cannot write to {self.path}: {error.strerror}") from error

    def _clear(self) -> None:
        """What a run that is overwritten left, so that nothing of it can be taken for this one's.

        A directory that holds other things keeps them.
        """
        if not is_run(self.path):
            return
        for folder in _FOLDERS:
            for path in (self.path / folder).iterdir():
                path.unlink()
        for name in (*_LOGS, "status.json", THETA_FILE, REPORT_FILE):
            (self.path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _taken(
        self,
        experiment: Experiment,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """The directory is this run's: rank 0 holds the lock, for all, and prepares it."""
        self.experiment = experiment
        experiment.run_dir = self.path
        self.checkpoints = Checkpoints(self.path / "checkpoints", experiment.oracle.stores, self.ranks)
        with contextlib.ExitStack() as stack:

            def take() -> None:
                if not self.ranks.first:
                    return
                if before is not None:
                    before()
                stack.enter_context(self._locked())
                if after is not None:
                    after()

            self.ranks.each("run directory", take)
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """No two processes write here; the lock goes with the process that holds it, however it ends.

        What the disk refuses meanwhile is told in one sentence.
        """
        try:
            with (self.path / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise UsageError(
                        f"{self.path} is in use by another process; wait for it, or stop it first"
                    ) from error
                yield
        except OSError as error:
            raise BltError(
                f"cannot write to {self.path}: {error.strerror or error}; what was written before is whole, so"
                f" mend that and go on with blt resume {self.path}"
            ) from error

    def _open_logs(self, stack: contextlib.ExitStack, lengths: Mapping[str, int]) -> None:
        """The logs, cut to where the checkpoint saw them end."""
        for name in _LOGS:
            self.logs[name] = stack.enter_context((self.path / name).open("ab"))
            self.logs[name].truncate(lengths.get(name, 0))
            self.logs[name].seek(0, os.SEEK_END)

    def _history(self) -> list[dict[str, Any]]:
        log = self.path / "metrics.jsonl"
        return [parse_json(line, log) for line in read_text(log, LOG, follow=False).splitlines()]

    def _save_theta(self, name: str, theta: Theta) -> None:
        write_bytes(self.path / f"{name}.safetensors", encode(theta, self.experiment.recipe))


def _find_flaw(experiment: Experiment, content: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot be resumed from, though it is whole."""
    run = content["run"]
    for theta in (run["theta"], run["before"], *(run["best"] or ())[2:]):
        if (flaw := experiment.find_flaw(theta)) is not None:
            return f"holds a θ that cannot be used: {flaw}"
    return None


def environment(experiment: Experiment) -> dict[str, Any]:
    """What a run needs to be explained later."""
    device = experiment.train.device
    return {
        "recipe": experiment.recipe.name,
        "bltoolbox": bltoolbox.__version__,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": experiment.oracle.ranks.size,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "command": sys.argv,
        "images": image_sets(experiment),
    }


def image_sets(experiment: Experiment) -> dict[str, list[Any]]:
    """How many images there are for what, and a digest that tells when they change."""
    sets = {
        "training": experiment.train,
        "validation": experiment.validation,
        "evaluation": experiment.evaluation,
    }
    return {name: [len(samples), samples.digest()] for name, samples in sets.items() if samples is not None}


def _git_state() -> str | None:
    """Commit of the checkout this package runs from, if it is one."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
