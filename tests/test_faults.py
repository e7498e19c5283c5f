"""A full disk, a lost file, a newer version: one sentence, and nothing destroyed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bltoolbox import files, resume, run, run_dir
from bltoolbox.assemble import assemble
from bltoolbox.checkpoint import Checkpoints
from bltoolbox.errors import BltError, RecipeError, UsageError
from bltoolbox.model import read_theta
from bltoolbox.recipe import Recipe, recipe_from_dict
from bltoolbox.run_dir import RunDirectory

torch.set_num_threads(1)


def recipe(steps: int = 8, every: float = 0.0, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 8, "size": 16},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "sampler": {"size": 4},
        "validation": {"count": 0},
        "checkpoint": {"every": every},
        "budget": {"steps": steps},
    }
    return recipe_from_dict(settings | changes)


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("writes", [1, 5, 12, 20])
def test_a_full_disk_costs_only_what_came_after_the_last_checkpoint(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the nth synchronised write on; with room again the run ends as if nothing had been."""
    run(recipe(), out=tmp_path / "whole")
    left = [writes]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        with pytest.raises(BltError, match="No space left on device"):
            run(recipe(), out=tmp_path / "full")
    states = list((tmp_path / "full" / "checkpoints").glob("state-*.ckpt"))
    assert not list((tmp_path / "full").rglob(".*.ckpt.*")), "half a file was left behind"
    if not states:
        return
    resume(tmp_path / "full")
    one, other = (read_theta(tmp_path / name)[0] for name in ("whole", "full"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "full/metrics.jsonl").read_bytes()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BltError, match="cannot write to"):
        run(recipe(), out=tmp_path / "file" / "run")
    with pytest.raises(UsageError, match="is a file"):
        run(recipe(), out=tmp_path / "file")
    assert tree(tmp_path) == {"file": b"kept"}


def test_data_that_went_away_are_missed_by_name_and_the_run_is_kept(tmp_path: Path) -> None:
    array = tmp_path / "images.npy"
    images = np.random.default_rng(0).random((8, 16, 16, 3), dtype=np.float32)
    np.save(array, images)
    run(recipe(3, data={"name": "array", "path": str(array)}), out=tmp_path / "run")
    before = tree(tmp_path / "run")
    array.unlink()
    with pytest.raises(RecipeError, match="there is no file"):
        resume(tmp_path / "run", ["budget.steps=5"])
    assert tree(tmp_path / "run") == before
    np.save(array, images)
    assert resume(tmp_path / "run", ["budget.steps=5"]).steps == 5


def test_a_run_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    run(recipe(2), out=tmp_path / "run")
    path = tmp_path / "run" / "env.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bltoolbox": "99.0.0"}))
    before = tree(tmp_path / "run")
    with pytest.raises(BltError, match=r"written by bltoolbox 99\.0\.0, newer than this one"):
        resume(tmp_path / "run", ["budget.steps=3"])
    assert tree(tmp_path / "run") == before


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        resume(tmp_path)


def test_checkpoints_take_at_most_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that takes two seconds is next due after at least 38 more, however often they are wanted."""
    clock = [0.0]
    monkeypatch.setattr(run_dir.time, "perf_counter", lambda: clock[0])

    def slow(self: Checkpoints, content: object) -> None:
        clock[0] += 2.0

    monkeypatch.setattr(Checkpoints, "save", slow)
    directory = RunDirectory(tmp_path / "run")
    directory.experiment = assemble(recipe(every=1.0))
    directory.checkpoints = Checkpoints(tmp_path, {})
    directory.every, directory.kept_at = 1.0, 0.0
    clock[0] = 1.5
    assert directory.due()
    directory.keep({})
    kept = clock[0]
    for later, due in ((10.0, False), (37.9, False), (38.1, True)):
        clock[0] = kept + later
        assert directory.due() == due
