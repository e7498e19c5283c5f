"""A run directory as a place to write to: ownership, replacing an old run, logs.

Files are replaced atomically. Logs are appended; a checkpoint remembers how long they were, and a resumed run
truncates them there, so that no line is lost or duplicated. The directory is locked while a run writes to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bltoolbox.config.names import (
    FILES,
    FOLDERS,
    GIVEN_FILE,
    LOCK_FILE,
    LOG_FILE,
    LOGS,
    MANIFEST,
    RECIPE_FILE,
    is_component,
    refuse_unusable_name,
)
from bltoolbox.config.printable import printable
from bltoolbox.config.reading import open_file
from bltoolbox.config.recipe import Recipe
from bltoolbox.distributed.launch import invocation
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, UsageError
from bltoolbox.runs.files import (
    append_to,
    is_temporary,
    make_folder,
    make_root,
    remove,
    remove_temporaries,
    try_to_write,
    write_bytes,
    write_json,
    write_text,
)
from bltoolbox.runs.history import has_checkpoint
from bltoolbox.runs.layout import Manifest
from bltoolbox.runs.locks import locked


def fresh_directory(root: Path, name: str) -> Path:
    """``root/name/<time>``, not yet existing."""
    name = name if is_component(name) else "recipe"
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    path = root / name / stamp
    for count in range(2, 1000):
        if not path.exists():
            return path
        path = root / name / f"{stamp}_{count}"
    raise UsageError(f"{root / name} already contains too many runs with this time; try again")


class RunDirectory:
    """The folder of one run, written to by rank 0 alone."""

    def __init__(self, path: Path | str, *, overwrite: bool = False, ranks: Ranks = ALONE) -> None:
        refuse_unusable_name(path)
        self.path = Path(path)
        self.overwrite = overwrite
        self.ranks = ranks
        self.logs: dict[str, IO[bytes]] = {}
        self.began = 0.0
        #: Additional files of this run, e.g. the trace of a profiler.
        self.extra_files: list[str] = []

    @contextlib.contextmanager
    def begun(self, recipe: Recipe) -> Iterator[None]:
        """Set up the directory for a new run and hold its lock; nothing is deleted before the run can start."""
        with contextlib.ExitStack() as stack:
            self.ranks.each("run directory", lambda: self._begin(stack, recipe))
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directory of an existing run, so that nothing changes between reading and resuming it."""
        with contextlib.ExitStack() as stack:
            self.ranks.each("run directory", lambda: self._lock(stack))
            yield

    @contextlib.contextmanager
    def logging(self, recipe: Recipe, lengths: Mapping[str, int]) -> Iterator[None]:
        """Open the logs, truncated to ``lengths``; warnings of the toolbox are logged, too."""
        self.began = time.perf_counter()
        handler = _Warnings(self)
        with contextlib.ExitStack() as stack:
            opened = self.ranks.each("logs", lambda: self._open_logs(stack, recipe, lengths))
            assert opened is not None
            if self.ranks.first:
                logging.getLogger("bltoolbox").addHandler(handler)
                stack.callback(logging.getLogger("bltoolbox").removeHandler, handler)
            yield

    @contextlib.contextmanager
    def writing(self, *, resumable: bool = False) -> Iterator[None]:
        """Report errors of the disk in one sentence."""
        try:
            yield
        except OSError as error:
            command = f"run blt resume {shlex.quote(str(self.path))}"
            onwards = command if has_checkpoint(self.path) else "start the run again with --overwrite"
            hint = f"; earlier output is intact: fix this, then {onwards}"
            reason = f"cannot write to {self.path}: {error.strerror or error}"
            raise BltError(reason + (hint if resumable else "")) from error

    def claim(self) -> None:
        """List what this run is about to write, and make its folders."""
        if not self.ranks.first:
            return
        names = (*FILES, *self.extra_files, *(f"{name}/" for name in FOLDERS))
        Manifest(self.path).claim(*names, started_by=invocation())
        for name in FOLDERS:
            make_folder(self.path / name, within=self.path)

    def log(self, sentence: str) -> None:
        """Write one line to log.txt."""
        self.append(LOG_FILE, f"{time.perf_counter() - self.began:9.2f} s  {printable(sentence)}")

    def append(self, name: str, line: str) -> None:
        """Write one line of a log."""
        self.logs[name].write(line.encode() + b"\n")
        self.logs[name].flush()

    def log_lengths(self) -> dict[str, int]:
        """The lengths of the logs, after flushing them to disk."""
        for log in self.logs.values():
            log.flush()
            os.fsync(log.fileno())
        return {name: log.tell() for name, log in self.logs.items()}

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace a file atomically."""
        write_bytes(self.path / name, content, within=self.path)

    def write_text(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        write_text(self.path / name, text, within=self.path)

    def write_json(self, name: str, content: Any) -> None:
        """Replace a file atomically."""
        write_json(self.path / name, content, within=self.path)

    def _begin(self, stack: contextlib.ExitStack, recipe: Recipe) -> None:
        if not self.ranks.first:
            return
        with self.writing():
            self._refuse_foreign()  # before a lock file is created in a folder of someone else
            make_root(self.path)
        self._lock(stack)
        with self.writing():
            self._clear(self._refuse_foreign())
            self.claim()
            self.write_text(GIVEN_FILE, recipe.text or recipe.to_yaml())

    def _refuse_foreign(self) -> list[Path]:
        """What may be overwritten because the earlier run wrote it; a directory with anything else is refused."""
        if not self.path.is_dir():
            if self.path.exists():
                raise UsageError(f"{self.path} is a file; choose another run directory")
            return []
        # A run that was killed at once has left no more than this.
        if all(path.name == LOCK_FILE or is_temporary(path.name) for path in self.path.iterdir()):
            return []
        if not self.overwrite:
            raise UsageError(f"{self.path} is not empty; choose another run directory or add --overwrite")
        manifest = Manifest(self.path)
        if not manifest.there:
            raise UsageError(
                f"{self.path} is not empty and has no {MANIFEST}, the list of files of a run, so nothing in it"
                " is overwritten; choose another run directory"
            )
        mine, strays = manifest.files()
        if strays:
            raise UsageError(
                f"{strays[0]} is not in {MANIFEST}, the list of files of the run, so it is not"
                " overwritten; move it away or choose another run directory"
            )
        return mine

    def _clear(self, files: Sequence[Path]) -> None:
        """Delete the files of the overwritten run, so that they cannot be mistaken for those of this one."""
        for folder in {self.path, *(path.parent for path in files)}:  # or deleting would stop halfway
            try_to_write(folder, within=self.path)
        for path in files:
            remove(path, within=self.path)

    def _lock(self, stack: contextlib.ExitStack) -> None:
        """Rank 0 holds the lock for all ranks."""
        if self.ranks.first:
            busy = f"{self.path} is in use by another process; wait for it, or stop it first"
            with self.writing():
                stack.enter_context(locked(self.path, busy))
                for name in ("", *FOLDERS):
                    remove_temporaries(self.path / name, within=self.path)

    def _open_logs(self, stack: contextlib.ExitStack, recipe: Recipe, lengths: Mapping[str, int]) -> None:
        if not self.ranks.first:
            return
        for name in LOGS:
            self.logs[name] = stack.enter_context(append_to(self.path / name, within=self.path))
        for name, log in self.logs.items():
            self._cut(log, self.path / name, lengths.get(name, 0))
        # Only now, since the budget may have grown.
        self.write_text(RECIPE_FILE, recipe.to_yaml())

    def _cut(self, log: IO[bytes], path: Path, length: int) -> None:
        """Truncate a log to its length at the checkpoint, or less if it was damaged since, at the end of a line."""
        size = log.seek(0, os.SEEK_END)
        log.truncate(min(length, size))
        end = log.seek(0, os.SEEK_END)
        with open_file(path, follow=False) as same:
            same.seek(max(0, end - 1))
            if same.read(1) not in (b"", b"\n"):
                log.write(b"\n")


class _Warnings(logging.Handler):
    """Writes warnings of the toolbox to log.txt."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(logging.WARNING)
        self.directory = directory

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, or logs that are closed
            self.directory.log(f"{record.levelname.lower()}: {record.getMessage()}")
