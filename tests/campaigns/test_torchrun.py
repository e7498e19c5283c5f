"""A run under torchrun whose processes are killed again and again ends as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import PATIENCE, assert_same, run_on, wait_for_ranks

from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.reports.writer import ReportWriter

METHODS: dict[str, dict[str, object]] = {
    "isgd": {"upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1}, "sampler": {"size": 4}},
    "maid": {"upper_optimizer": {"name": "maid", "step": 1e-2, "tol": 0.05}, "sampler": {"name": "full"}},
}
STEPS = {"isgd": 14, "maid": 8}


def recipe(method: str, every: float) -> Recipe:
    settings: dict[str, object] = {
        "data": {"name": "dead-leaves", "count": 8, "size": 12},
        "dtype": "float64",
        "color": "gray",
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "lower_solver": "mm",
        "validation": {"count": 2, "checks": 4},
        "checkpoint": {"every": every},
        "budget": {"steps": STEPS[method]},
    }
    return recipe_from_dict(settings | METHODS[method])


def checkpoint_after(out: Path, number: int, process: subprocess.Popen[str]) -> int:
    """Wait for a checkpoint with a number above this one, and give its number."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = [int(one.stem.split("-")[1]) for one in out.glob("checkpoints/state-*.ckpt")]
        if found and max(found) > number:
            return max(found)
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    pytest.fail("no further checkpoint")


@pytest.mark.parametrize(
    ("method", "victims"),
    [("isgd", [1]), pytest.param("maid", [0, 1], marks=pytest.mark.slow)],
    ids=["one of two", "each in turn"],
)
def test_ranks_killed_under_torchrun_leave_no_trace(
    method: str, victims: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole, out = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "run"
    file.write_text(recipe(method, every=0.0).to_yaml())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    blt = ["-m", "bltoolbox", "run", str(file), "-o", str(out)]
    process = subprocess.Popen(
        [*torchrun, f"--max-restarts={len(victims)}", "--monitor-interval=0.1", *blt],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    number = 0
    for victim in victims:
        number = checkpoint_after(out, number + 2, process)
        os.kill(wait_for_ranks(process, out)[victim], signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert len(re.findall("exitcode: -9", said)) >= len(victims), f"nobody was killed: {said}"
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)
    monkeypatch.setattr(ReportWriter, "finished", lambda self, result: None)
    run_on(tmp_path, 2, recipe(method, every=60.0), whole)
    assert_same(whole, out)
