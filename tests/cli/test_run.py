"""``blt run`` as a script or a person sees it: results, refusals, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import caller

from bltoolbox.config.recipe import load_recipe, parse_recipe
from bltoolbox.restoration.model import Model, read_theta

torch.set_num_threads(1)

TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation={name: dead-leaves, count: 2, size: 16, seed: 1}",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler.size=2",
    "validation={count: 2, checks: 2}",
    "budget={steps: 2}",
    "device=cpu",
]


class Outcome(NamedTuple):
    code: Any
    out: str
    err: str


@pytest.fixture
def blt_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run ``blt`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        done = caller("", capfd)(*arguments)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


def test_json_is_one_object_with_what_a_script_needs(
    blt_here: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = blt_here("run", "smoke", *TINY, "--json")
    result = json.loads(outcome.out)
    assert outcome.code == 0
    keys = (
        "run_dir",
        "psnr_before",
        "psnr_after",
        "steps",
        "computations",
        "seconds",
        "theta_size",
        "status",
    )
    assert set(keys) <= set(result)
    assert result["steps"] == 2 and result["theta_size"] == 2 * 3 * 9 + 2 + 1 + 1
    assert result["psnr_before"] < result["psnr_after"]
    run_dir = tmp_path / result["run_dir"]
    assert run_dir.parent == tmp_path / "runs" / "smoke"
    assert Model.load(run_dir).size == result["theta_size"]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["computations"] == result["computations"]


def test_a_person_gets_a_table_and_the_place_of_the_results(blt_here: Callable[..., Outcome]) -> None:
    outcome = blt_here("run", "smoke", *TINY, "-o", "here", "--seed", "7")
    assert outcome.code == 0
    assert "PSNR" in outcome.out and "here" in outcome.out
    assert load_recipe("here/resolved.yaml").seed == 7
    text = Path("here/recipe.yaml").read_text()
    assert "blt run smoke" in text, "the recipe as it was given, with its comments"


def test_dry_run_builds_everything_prints_the_recipe_and_writes_nothing(
    blt_here: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = blt_here("run", "smoke", *TINY, "--dry-run")
    assert outcome.code == 0
    assert parse_recipe(outcome.out) == load_recipe("smoke", TINY)
    assert list(tmp_path.iterdir()) == []


REFUSALS: dict[str, tuple[list[str], int, str]] = {
    "missing recipe": (["nowhere"], 2, "nowhere does not exist"),
    "no recipe": (["a=1"], 2, "one recipe"),
    "kernel larger than the images": (
        ["smoke", *TINY, "regularizer.kernel_size=17"],
        3,
        "17 is larger than the 16×16",
    ),
    "batch larger than the data": (
        ["smoke", *TINY, "sampler.size=5"],
        3,
        "5 is larger than the 4 training samples",
    ),
    "nothing left to train on": (["smoke", *TINY, "validation.count=6"], 3, "validation: count 6"),
    "mm with a box": (["smoke", *TINY, "lower_solver=mm", "constraint=box"], 3, "'mm' cannot keep x"),
    "maid with mini-batches": (["smoke", *TINY, "upper_optimizer=maid"], 3, "'maid' needs all data"),
    "misspelt parameter": (["smoke", *TINY, "sampler.sise=2"], 3, "did you mean 'size'"),
    "wrong type": (["smoke", *TINY, "sampler.size=two"], 3, "sampler.size"),
    "unknown component": (["smoke", *TINY, "lower_solver=adg"], 3, "did you mean 'agd'"),
    "missing file": (["smoke", *TINY, "data={name: array, path: no.npy}"], 3, "no.npy"),
    "missing theta": (["smoke", *TINY, "init=no.safetensors"], 3, "no.safetensors"),
    "another number of channels": (
        ["smoke", *TINY, "evaluation={name: array, path: gray.npy}"],
        3,
        "channels",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_a_sentence_and_writes_nothing(
    name: str, blt_here: Callable[..., Outcome], tmp_path: Path
) -> None:
    import numpy as np

    np.save(tmp_path / "gray.npy", np.full((2, 16, 16), 0.5))
    arguments, code, sentence = REFUSALS[name]
    outcome = blt_here("run", *arguments)
    assert sentence in outcome.err
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["gray.npy"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("how", [["device=cuda"], ["--device", "cuda:1"]])
def test_a_device_that_is_not_there(how: list[str], blt_here: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = blt_here("run", "smoke", *TINY, *how)
    assert outcome.code == 4
    assert "no CUDA device" in outcome.err and "device=cpu" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_empty_is_refused_and_untouched(
    blt_here: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    outcome = blt_here("run", "smoke", *TINY, "-o", "full")
    assert outcome.code == 2 and "not empty" in outcome.err
    assert {path.name: path.read_text() for path in (tmp_path / "full").iterdir()} == {"mine.txt": "mine"}
    assert blt_here("run", "smoke", *TINY, "-o", "full/mine.txt").code == 2
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_its_theta(number: signal.Signals, code: int, tmp_path: Path) -> None:
    overrides = [*TINY, "budget={seconds: 100}", "validation.count=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bltoolbox", "run", "smoke", *overrides, "-o", "run"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    metrics, patience = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size > 500):
        assert process.poll() is None and time.monotonic() < patience
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in out + err and "interrupted" in err
    theta, _ = read_theta(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert all(torch.isfinite(value).all() for value in theta.values())
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "interrupted"
    for line in metrics.read_text().splitlines():
        json.loads(line)  # no half-written line


def test_a_profile_of_the_first_steps(blt_here: Callable[..., Outcome], tmp_path: Path) -> None:
    done = blt_here("run", "smoke", *TINY, "-o", str(tmp_path / "run"), "--profile", "-q")
    assert done.code == 0, done.err
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert any("conv" in str(event.get("name")) for event in trace["traceEvents"])
