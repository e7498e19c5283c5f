"""A full disk, a lost file, a newer version: one sentence, and nothing destroyed."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bltoolbox import resume, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.errors import BltError, RecipeError, UsageError
from bltoolbox.training.assemble import assemble
from bltoolbox.training.checkpoint import Checkpoints
from bltoolbox.training.keeper import CheckpointKeeper
from bltoolbox.training.run_dir import RunDirectory

torch.set_num_threads(1)


def recipe(steps: int = 8, every: float = 0.0, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 8, "size": 16},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "sampler": {"size": 4},
        "validation": {"count": 0},
        "checkpoint": {"every": every, "keep_finished": True},
        "budget": {"steps": steps},
    }
    return recipe_from_dict(settings | changes)


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BltError, match="cannot write to"):
        run(recipe(), out=tmp_path / "file" / "run")
    with pytest.raises(UsageError, match="is a file"):
        run(recipe(), out=tmp_path / "file")
    assert tree(tmp_path) == {"file": b"kept"}


def bound_by_permissions() -> None:
    """Take from a process of root what lets it write everywhere; runs between fork and exec."""
    set_bounding, override = 24, 1  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(set_bounding, override, 0, 0, 0):
        os._exit(77)


@pytest.mark.skipif(sys.platform != "linux", reason="root is held to permissions only on Linux")
def test_a_read_only_directory_is_one_sentence_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    run(recipe(2), out=folder / "run")
    before = tree(folder)
    places = (folder, *folder.rglob("*"))
    for path in places:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for command in (
        ["run", "smoke", "-o", str(folder / "other")],
        ["resume", str(folder / "run"), "budget.steps=4"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "bltoolbox", *command],
            capture_output=True,
            text=True,
            preexec_fn=bound_by_permissions,
        )
        if done.returncode == 77:
            pytest.skip("root cannot give up its privilege here")
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "cannot write to" in done.stderr and "Permission denied" in done.stderr
    assert tree(folder) == before
    for path in places:
        path.chmod(0o755)


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


@pytest.mark.parametrize("trouble", ["gone", "cut", "mangled"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_lost_during_a_run_is_named_and_the_run_goes_on_once_it_is_back(
    trouble: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLT_KEPT_MEASUREMENTS", "1")  # an image in memory is not missed
    folder = tmp_path / "images"
    folder.mkdir()
    for i, pixels in enumerate(np.random.default_rng(0).integers(256, size=(8, 16, 16, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / f"{i}.png")
    # The last image is used, but not in the first step.
    asked = recipe(6, data={"name": "folder", "path": str(folder)}, workers=workers)
    whole = run(asked, out=tmp_path / "whole")
    lost, content = folder / "7.png", (folder / "7.png").read_bytes()

    class Trouble(Listener):
        def stepped(self, record: Any, seconds: float, fraction: float) -> None:
            if record["step"] != 3:
                return
            if trouble == "gone":
                lost.unlink()
            else:
                middle = len(content) // 2
                lost.write_bytes(
                    content[:middle] + (b"" if trouble == "cut" else b"?" * (len(content) - middle))
                )

    with pytest.raises(BltError, match=r"an image cannot be loaded: .*7\.png") as caught:
        run(asked, out=tmp_path / "run", listeners=[Trouble()])
    assert type(caught.value) is BltError and caught.value.exit_code == 1
    assert "failed" in json.loads((tmp_path / "run" / "status.json").read_text())["status"]
    before = tree(tmp_path / "run")
    if trouble == "gone":
        # Fewer images have other ids: going on would mix them up.
        with pytest.raises(
            BltError,
            match=r"the training images are not those .*: there were 8, now there are 7; restore them",
        ):
            resume(tmp_path / "run")
        assert tree(tmp_path / "run") == before
        lost.with_name("8.png").write_bytes(content)
        with pytest.raises(BltError, match="some have other names"):
            resume(tmp_path / "run")
        lost.with_name("8.png").unlink()
    lost.write_bytes(content)
    result = resume(tmp_path / "run")
    assert all(torch.equal(result.theta[key], whole.theta[key]) for key in whole.theta)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "run/metrics.jsonl").read_bytes()


def test_an_array_cut_short_during_a_run_ends_in_a_sentence(tmp_path: Path) -> None:
    """Not in a bus error."""
    array = tmp_path / "images.npy"
    np.save(array, np.random.default_rng(0).random((8, 16, 16, 3), dtype=np.float32))
    content = array.read_bytes()

    class Trouble(Listener):
        def stepped(self, record: Any, seconds: float, fraction: float) -> None:
            if record["step"] == 3:
                os.truncate(array, 500)

    asked = recipe(6, data={"name": "array", "path": str(array)})
    with pytest.raises(BltError, match=r"images\.npy was cut short while it was in use"):
        run(asked, out=tmp_path / "run", listeners=[Trouble()])
    array.write_bytes(content)
    assert resume(tmp_path / "run").steps == 6


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
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slow(self: Checkpoints, content: object) -> None:
        clock[0] += 2.0

    monkeypatch.setattr(Checkpoints, "save", slow)
    keeper = CheckpointKeeper(RunDirectory(tmp_path / "run"), assemble(recipe(every=1.0)))
    clock[0] = 1.5
    assert keeper.due()
    keeper.keep({})
    kept = clock[0]
    for later, due in ((10.0, False), (37.9, False), (38.1, True)):
        clock[0] = kept + later
        assert keeper.due() == due
