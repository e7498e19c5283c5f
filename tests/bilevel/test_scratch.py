"""Where large files lie: on a disk of this machine that has room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from bltoolbox.bilevel import scratch
from bltoolbox.bilevel import warm_starts as stores
from bltoolbox.bilevel.scratch import in_memory, in_scratch, scratch_folders
from bltoolbox.bilevel.warm_starts import Store
from bltoolbox.errors import UsageError


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, on a disk."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(folder))
    monkeypatch.setattr(scratch, "in_memory", lambda folder: False)
    monkeypatch.delenv("BLT_SCRATCH", raising=False)
    return folder


def test_temporary_files_come_before_the_run_directory(local: Path, tmp_path: Path) -> None:
    assert scratch_folders(tmp_path / "run") == [local, tmp_path / "run"]
    assert scratch_folders(None) == [local]


def test_a_folder_in_memory_comes_last(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "in_memory", lambda folder: folder == local)
    assert scratch_folders(tmp_path / "run") == [tmp_path / "run", local]


def test_the_variable_decides_or_is_refused(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLT_SCRATCH", str(tmp_path))
    assert scratch_folders(local) == [tmp_path]
    monkeypatch.setenv("BLT_SCRATCH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"BLT_SCRATCH=.*nowhere is not a folder that can be written to"):
        scratch_folders(local)


def test_a_full_disk_leads_to_the_next_and_other_errors_to_nothing(local: Path, tmp_path: Path) -> None:
    def make(number: int, folder: Path) -> Path:
        if folder == local:
            raise OSError(number, os.strerror(number))
        return folder

    assert in_scratch(tmp_path, lambda folder: make(errno.ENOSPC, folder)) == tmp_path
    with pytest.raises(OSError, match="Input/output"):
        in_scratch(tmp_path, lambda folder: make(errno.EIO, folder))


def test_mapped_warm_starts_are_not_in_the_run_directory(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []
    mkstemp = stores.tempfile.mkstemp
    monkeypatch.setattr(
        stores.tempfile, "mkstemp", lambda **options: made.append(str(options["dir"])) or mkstemp(**options)
    )
    monkeypatch.setattr(stores, "MAPPED", 1)
    store = Store(2, folder=tmp_path / "run")
    store.put([0], torch.ones(1, 3, 4, 4))
    assert made == [str(local)] and bool((store.get([0], torch.zeros(1, 3, 4, 4)) == 1).all())


def test_the_longest_mount_point_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(scratch, "MOUNTS", mounts)
    assert not in_memory(tmp_path), "where the system does not say"
    mounts.write_text(f"disk / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\nodd\n")
    assert in_memory(tmp_path) and in_memory(tmp_path / "below") and not in_memory(Path("/"))
