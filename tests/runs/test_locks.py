"""One process at a time writes to a directory, also where the file system or the platform has no locks."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import caller
from test_nothing_lost import TINY

from bltoolbox import load_recipe, resume, run
from bltoolbox.cli import diagnosis as doctor
from bltoolbox.config.recipe import read_recipe
from bltoolbox.errors import BltError, UsageError
from bltoolbox.runs import locks
from bltoolbox.runs.locks import is_locked, locked
from bltoolbox.training import run_dir


def test_a_lock_keeps_others_out_and_is_never_truncated(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("precious")
    with locked(tmp_path, "busy"):
        assert is_locked(tmp_path)
        with pytest.raises(UsageError, match="busy"), locked(tmp_path, "busy"):
            pass
    assert not is_locked(tmp_path) and (tmp_path / "lock").read_text() == "precious"


def test_a_look_at_a_lock_does_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(locks, "acquire", lambda *arguments: next(answers))
    with locked(tmp_path, "busy"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(number, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    words = ["smoke", *TINY, "-q", "-o", str(tmp_path / "run")]
    done = caller("run", capfd)(*words)
    assert done.returncode == 1 and "has no locks" in done.stderr and "BLT_NO_LOCK=1" in done.stderr
    monkeypatch.setenv("BLT_NO_LOCK", "1")
    assert caller("run", capfd)(*words).returncode == 0
    (found,) = doctor._locks()
    assert found.verdict is doctor.Verdict.NOTE and "BLT_NO_LOCK=1" in found.found
    monkeypatch.delenv("BLT_NO_LOCK")
    (found,) = doctor._locks()
    assert found.verdict is doctor.Verdict.NOTE and "has no locks" in found.found


def test_other_refusals_are_not_taken_for_missing_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setenv("BLT_NO_LOCK", "1")
    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.raises(BltError, match="Input/output error"):
        run(load_recipe("smoke", TINY), out=tmp_path / "run")


def test_resuming_locks_before_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(load_recipe("smoke", TINY), out=tmp_path / "run")
    seen: list[bool] = []

    def look(*arguments: Any, **options: Any) -> Any:
        seen.append(is_locked(tmp_path / "run"))
        return read_recipe(*arguments, **options)

    monkeypatch.setattr(sys.modules["bltoolbox.training.resume"], "read_recipe", look)
    resume(tmp_path / "run", ["budget.steps=4"])
    assert seen and all(seen) and not is_locked(tmp_path / "run")
    with locked(tmp_path / "run", "busy"), pytest.raises(UsageError, match="in use"):
        resume(tmp_path / "run", ["budget.steps=5"])


def test_resuming_leaves_no_lock_in_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_fills_before_it_is_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may start and end between a look at an empty directory and the lock."""
    path = tmp_path / "run"

    def late(folder: Path, busy: str) -> Any:
        (path / "metrics.jsonl").write_text("of the other run")
        return locked(folder, busy)

    monkeypatch.setattr(run_dir, "locked", late)
    with pytest.raises(UsageError, match="not empty"):
        run(load_recipe("smoke", TINY), out=path)
    assert (path / "metrics.jsonl").read_text() == "of the other run"


def test_a_run_where_there_is_no_fcntl_and_no_descriptor_of_a_folder(tmp_path: Path) -> None:
    """As on Windows: links are looked for by name, and BLT_NO_LOCK accepts that there are no locks."""
    code = """
import os, sys
import torch, torchvision
sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("sysconf", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_DIRECTORY"):
    delattr(os, name)
os.supports_dir_fd.clear()
import bltoolbox.training.run_dir, bltoolbox.training.sweep.plan, bltoolbox.runs.history
import blt_builtins.data.download, bltoolbox.cli, bltoolbox.reports.writer
bltoolbox.reports.writer.draw = lambda result, folder: []  # figures take longer than the runs
from bltoolbox.runs.locks import fcntl
from bltoolbox import load_recipe, resume, run
assert fcntl is None
os.environ["BLT_NO_LOCK"] = "1"
run(load_recipe("smoke", sys.argv[2:]), out=sys.argv[1])
resume(sys.argv[1], ["budget.steps=4"])
os.unlink(sys.argv[1] + "/log.txt")
os.symlink(sys.argv[1] + "/env.json", sys.argv[1] + "/log.txt")
try:
    resume(sys.argv[1], ["budget.steps=5"])
except bltoolbox.runs.files.UnsafePath as error:
    print(error)
"""
    words = [sys.executable, "-c", code, str(tmp_path / "run"), *TINY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "log.txt is a symbolic link" in done.stdout, done.stderr
