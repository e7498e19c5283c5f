"""The run directory: what was asked, what happened, what came out, and where to go on from.

Files are replaced atomically. The logs are appended; a checkpoint remembers how long they were, and a resumed
run cuts them there, so that no line is lost or doubled. One process at a time: the directory is locked while a
run writes to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

import bltoolbox
from bltoolbox.checkpoint import Checkpoints
from bltoolbox.errors import BltError, UsageError
from bltoolbox.experiment import Experiment
from bltoolbox.files import (
    append_to,
    json_line,
    make_folder,
    remove,
    remove_temporaries,
    write_bytes,
    write_json,
    write_text,
)
from bltoolbox.history import LARGEST, has_checkpoint, read_lines
from bltoolbox.interfaces import Theta
from bltoolbox.launch import invocation
from bltoolbox.layout import FILES, FOLDERS, LOGS, MANIFEST, Manifest, is_component
from bltoolbox.listeners import Check, Listener, RunResult
from bltoolbox.locks import LOCK_FILE, locked
from bltoolbox.model import THETA_FILE, encode
from bltoolbox.output_names import refuse_unusable_name
from bltoolbox.printable import printable
from bltoolbox.ranks import ALONE, Ranks
from bltoolbox.reading import open_file
from bltoolbox.report import REPORT_FILE

#: At most this share of the time goes into checkpoints, however often they are wanted.
_SHARE = 0.05


def fresh_directory(root: Path, name: str) -> Path:
    """``root/name/<time>``, not yet existing."""
    name = name if is_component(name) else "recipe"
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
        refuse_unusable_name(path)
        self.path = Path(path)
        self.overwrite = overwrite
        self.ranks = ranks
        self.logs: dict[str, IO[bytes]] = {}
        #: What this run writes besides what every run does, e.g. the trace of a profiler.
        self.extra_files: list[str] = []

    def run(self, experiment: Experiment, listeners: Sequence[Listener] = ()) -> RunResult:
        """Run an experiment from its beginning into this directory."""
        with contextlib.ExitStack() as stack:
            self.ranks.each("run directory", lambda: self._begin(stack, experiment))
            with self._writing(resumable=True):
                return self._go(experiment, listeners, None, {})

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock a directory that holds a run, so that nobody changes what is read from it before it is resumed."""
        with contextlib.ExitStack() as stack:
            self.ranks.each("run directory", lambda: self._lock(stack))
            yield

    def resume(self, experiment: Experiment, listeners: Sequence[Listener] = ()) -> RunResult:
        """Take up a run where its newest whole checkpoint left it. Call it while the directory is ``held``."""
        with self._writing(resumable=True):
            self._attach(experiment)
            self.ranks.each("resuming", self._claim)
            content, passed = self.checkpoints.load(partial(_find_flaw, experiment))
            for sentence in passed if self.ranks.first else ():
                for listener in listeners:
                    listener.phase(sentence)
            run = content["run"] | {"own": content["own"]}
            return self._go(experiment, listeners, run, content["lengths"])

    def _begin(self, stack: contextlib.ExitStack, experiment: Experiment) -> None:
        """Rank 0 makes the directory this run's own; nothing is deleted before it is clear that the run can start."""
        self._attach(experiment)
        if not self.ranks.first:
            return
        with self._writing():
            self._refuse_foreign()  # before a lock is left in a folder that is somebody's
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock(stack)
        with self._writing():
            self._clear(self._refuse_foreign())
            self._claim()
            self._write_text("recipe.yaml", experiment.recipe.text or experiment.recipe.to_yaml())

    def _attach(self, experiment: Experiment) -> None:
        self.experiment = experiment
        experiment.run_dir = self.path
        self.checkpoints = Checkpoints(self.path / "checkpoints", experiment.oracle.stores, self.ranks)

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
            history = [] if content is None or not self.ranks.first else self._history(listeners)
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
        self._write_json("env.json", environment(experiment))
        self._write_json("status.json", {"status": "running", "bltoolbox": bltoolbox.__version__})
        self.log(
            f"started: {experiment.recipe.name}, {experiment.train.device},"
            f" {len(experiment.train)} training images"
        )

    def phase(self, sentence: str) -> None:
        self.log(sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self._append("metrics.jsonl", json_line(record))
        self._append("timings.jsonl", json_line({"step": record["step"], "seconds": round(seconds, 6)}))

    def checked(self, check: Check, theta: Theta) -> None:
        self.log(str(check))
        self._append("checks.jsonl", json_line(check.as_dict()))
        self._save_theta(f"thetas/{check.step:06d}", theta)
        self._save_theta("checkpoints/last", theta)
        if check.best:
            self._save_theta("checkpoints/best", theta)

    def aborted(self, theta: Theta, reason: str) -> None:
        self._save_theta("checkpoints/last", theta)
        self._write_json("status.json", {"status": reason, "bltoolbox": bltoolbox.__version__})
        self.log(reason)

    def finished(self, result: RunResult) -> None:
        from bltoolbox.figures import draw

        self._save_theta("checkpoints/last", result.last)
        self._save_theta(THETA_FILE.removesuffix(".safetensors"), result.theta)
        draw(result, self.path / "images")
        self.log(f"finished: {result.status}")
        summary = result.as_dict() | {"run_dir": str(self.path), "bltoolbox": bltoolbox.__version__}
        self._write_json("status.json", summary | {"finished": True})
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
        self._append("log.txt", f"{time.perf_counter() - self.began:9.2f} s  {printable(sentence)}")

    def _append(self, name: str, line: str) -> None:
        self.logs[name].write(line.encode() + b"\n")
        self.logs[name].flush()

    def _refuse_foreign(self) -> list[Path]:
        """What may be overwritten, as the run there wrote it; a directory that holds anything else is refused."""
        if not self.path.is_dir():
            if self.path.exists():
                raise UsageError(f"{self.path} is a file; choose another run directory")
            return []
        if {one.name for one in self.path.iterdir()} <= {LOCK_FILE}:
            return []
        if not self.overwrite:
            raise UsageError(f"{self.path} is not empty; choose another run directory or add --overwrite")
        manifest = Manifest(self.path)
        if not manifest.there:
            raise UsageError(
                f"{self.path} is not empty and has no {MANIFEST}, the list of what a run has written, so nothing in it"
                " is overwritten; choose another run directory"
            )
        mine, strays = manifest.files()
        if strays:
            raise UsageError(
                f"{strays[0]} is not in {MANIFEST}, the list of what the run there has written, so it is not"
                " overwritten; move it away or choose another run directory"
            )
        return mine

    def _clear(self, files: Sequence[Path]) -> None:
        """Delete what a run that is overwritten left, so that nothing of it can be taken for this one's."""
        for folder in {self.path, *(path.parent for path in files)}:  # or it would stop halfway
            probe = folder / ".writable"
            write_bytes(probe, b"", within=self.path)
            remove(probe, within=self.path)
        for path in files:
            remove(path, within=self.path)

    def _claim(self) -> None:
        """List what this run is about to write, and make its folders."""
        if not self.ranks.first:
            return
        names = (*FILES, *self.extra_files, *(f"{name}/" for name in FOLDERS))
        Manifest(self.path).claim(*names, started_by=invocation())
        for name in FOLDERS:
            make_folder(self.path / name, within=self.path)

    def _lock(self, stack: contextlib.ExitStack) -> None:
        """Rank 0 holds the lock, for all."""
        if self.ranks.first:
            busy = f"{self.path} is in use by another process; wait for it, or stop it first"
            with self._writing():
                stack.enter_context(locked(self.path, busy))
                for name in ("", *FOLDERS):
                    remove_temporaries(self.path / name, within=self.path)

    @contextlib.contextmanager
    def _writing(self, *, resumable: bool = False) -> Iterator[None]:
        """What the disk refuses is reported in one sentence."""
        try:
            yield
        except OSError as error:
            command = f"run blt resume {shlex.quote(str(self.path))}"
            onwards = command if has_checkpoint(self.path) else "start the run again with --overwrite"
            hint = f"; earlier output is intact: fix this, then {onwards}"
            reason = f"cannot write to {self.path}: {error.strerror or error}"
            raise BltError(reason + (hint if resumable else "")) from error

    def _open_logs(self, stack: contextlib.ExitStack, lengths: Mapping[str, int]) -> None:
        """The logs, cut to where the checkpoint saw them end."""
        for name in LOGS:
            self.logs[name] = stack.enter_context(append_to(self.path / name, within=self.path))
        for name, log in self.logs.items():
            self._cut(log, self.path / name, lengths.get(name, 0))
        # Only now, as a larger budget means that there is something to do.
        self._write_text("resolved.yaml", self.experiment.recipe.to_yaml())

    def _cut(self, log: IO[bytes], path: Path, length: int) -> None:
        """Let a log end where the checkpoint saw it end, or earlier if it was damaged since; then at a line's end."""
        size = log.seek(0, os.SEEK_END)
        log.truncate(min(length, size))
        end = log.seek(0, os.SEEK_END)
        with open_file(path, follow=False) as same:
            same.seek(max(0, end - 1))
            if same.read(1) not in (b"", b"\n"):
                log.write(b"\n")

    def _history(self, listeners: Sequence[Listener]) -> list[dict[str, Any]]:
        """The steps so far; what was damaged meanwhile is missing in the curves, and does not stop the run."""
        notes: list[str] = []
        lines = read_lines(self.path / "metrics.jsonl", notes)
        steps = [
            line
            for line in lines
            if all(_is_figure(line.get(key)) for key in ("step", "computations", "loss"))
        ]
        if len(steps) < len(lines):
            notes.append(
                f"metrics.jsonl: {len(lines) - len(steps)} lines do not describe a step and are left out"
            )
        for note in notes:
            for listener in (self, *listeners):
                listener.phase(note)
        return steps

    def _save_theta(self, name: str, theta: Theta) -> None:
        content = encode(theta, self.experiment.recipe)
        write_bytes(self.path / f"{name}.safetensors", content, within=self.path)

    def _write_text(self, name: str, text: str) -> None:
        write_text(self.path / name, text, within=self.path)

    def _write_json(self, name: str, content: Any) -> None:
        write_json(self.path / name, content, within=self.path)


def _is_figure(value: Any) -> bool:
    """Whether a curve can show it; a step may have no loss."""
    return value is None or (isinstance(value, int | float) and abs(value) < LARGEST)


def _find_flaw(experiment: Experiment, content: Mapping[str, Any]) -> str | None:
    """Why a checkpoint cannot be resumed from, though it is whole."""
    run = content["run"]
    best = run.get("best") or (0.0, 0, run.get("theta"))
    if not isinstance(best, list | tuple) or len(best) != 3:
        return "holds a best θ of another form"
    for theta in (run.get("theta"), run.get("before"), best[2]):
        if not isinstance(theta, Mapping):
            return "holds no θ"
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
