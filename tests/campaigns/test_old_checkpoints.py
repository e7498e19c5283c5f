"""Runs and θ files that earlier code wrote are read by this one, with the result that was recorded then.

How to add a row for a release is said in ``tests/data/checkpoints/README.md``.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from helpers import relative_error
from processes import resume_on

from bltoolbox import Model, resume
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.model import read_theta
from bltoolbox.training.checkpoint import FORMAT, read_checked

torch.set_num_threads(1)
DATA = ROOT / "tests" / "data" / "checkpoints"
ROWS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
#: How the runs of a row are resumed, and on how many ranks; a row has the runs that its code was able to make.
RESUMED = [("isgd", 1), ("maid", 1), ("maid", 2), ("maid-2-ranks", 2), ("maid-2-ranks", 1), ("rows", 1)]
CASES = [
    (row, name, ranks)
    for row in ROWS
    for name, ranks in RESUMED
    if name in {"isgd", "maid"} or (DATA / row / f"{name}.tar.xz").exists()
]
#: Rounding on another processor or with another torch, in float64.
PRECISION = 1e-8
#: Distance to the exact minimiser that the restored pixels were asked for.
TOL = 1e-3


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)
    monkeypatch.setattr(ReportWriter, "finished", lambda self, result: None)


def unpacked(row: str, name: str, folder: Path) -> Path:
    with tarfile.open(DATA / row / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("row", "name", "ranks"), CASES)
def test_a_run_of_earlier_code_ends_as_it_would_have_then(
    row: str, name: str, ranks: int, tmp_path: Path
) -> None:
    folder = unpacked(row, name, tmp_path)
    stopped, whole = folder / "stopped", folder / "whole"
    before = (stopped / "metrics.jsonl").read_bytes()
    held = read_checked(max(stopped.glob("checkpoints/state-*.ckpt")))
    assert held["format"] <= FORMAT
    assert bool(held["content"]["run"]["journal"]) == name.startswith("maid"), (
        "not stopped where it should be"
    )
    if ranks == 1:
        resume(stopped)
    else:
        resume_on(tmp_path, ranks, stopped)
    assert relative_error(read_theta(stopped)[0], read_theta(whole)[0]) < PRECISION
    assert before and (stopped / "metrics.jsonl").read_bytes().startswith(before)
    assert losses(stopped) == pytest.approx(losses(whole), rel=PRECISION)


@pytest.mark.parametrize("row", [row for row in ROWS if (DATA / row / "models.tar.xz").exists()])
def test_models_of_earlier_code_restore_as_they_did(row: str, tmp_path: Path) -> None:
    folder = unpacked(row, "models", tmp_path)
    models = sorted(folder.glob("*.safetensors"))
    assert models
    for path in models:
        recorded = np.load(path.with_suffix(".npz"))
        x = Model.load(path, device="cpu").solve(torch.from_numpy(recorded["y"]), tol=TOL)
        # Both are within TOL of the same minimiser.
        assert np.linalg.norm(x.numpy() - recorded["x"]) <= 2 * TOL, path.name


def test_every_row_is_explained() -> None:
    told = (DATA / "README.md").read_text()
    assert ROWS and all(f"`{row}`" in told for row in ROWS)
