"""What is not the toolbox's is not deleted, and odd beginnings neither hang nor crash."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import caller
from helpers import initial

from blt_builtins.regularizers.foe import FieldOfExperts, Planes
from bltoolbox import load_recipe, resume, run
from bltoolbox.bilevel.device import pick_device
from bltoolbox.config.recipe import Recipe
from bltoolbox.distributed.launch import Place
from bltoolbox.errors import MissingError
from bltoolbox.runs import files
from bltoolbox.runs.layout import Manifest
from bltoolbox.runs.locks import locked
from bltoolbox.training.checkpoint import read_checked

TINY = [
    "data={name: dead-leaves, count: 4, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "baseline=null",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler={name: epoch, size: 2}",
    "budget={steps: 3}",
    "device=cpu",
    "checkpoint={every: 0, keep_finished: true}",
]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that was never a run, with files of its own."""
    for name in ("images/holiday.jpg", "checkpoints/mine.pt"):
        (tmp_path / "proj" / name).parent.mkdir(parents=True)
        (tmp_path / "proj" / name).write_text("mine")
    return tmp_path / "proj"


def kept(folder: Path) -> bool:
    return (folder / "images" / "holiday.jpg").is_file() and (folder / "checkpoints" / "mine.pt").is_file()


def test_overwriting_deletes_only_what_a_run_left(foreign: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["smoke", *TINY, "-o", str(foreign), "-q"]
    before = sorted(foreign.rglob("*"))
    assert caller("run", capfd)(*words).returncode == 2
    done = caller("run", capfd)(*words, "--overwrite")
    assert done.returncode == 2 and "is not empty and has no files.json" in done.stderr
    assert sorted(foreign.rglob("*")) == before and kept(foreign), "not even a lock is left there"


def test_overwriting_keeps_what_others_put_beside_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    words = ["smoke", *TINY, "-o", str(path), "-q"]
    assert caller("run", capfd)(*words).returncode == 0
    others = [path / name for name in ("notes.txt", "images/holiday.jpg", "checkpoints/mine.pt")]
    for other in others:
        other.write_text("mine")
    # The list may come from someone else: what is not a name of the layout does not count.
    victim = tmp_path / "victim"
    victim.write_text("mine")
    listed = json.loads((path / "files.json").read_text())
    listed["files"] += [
        "../victim",
        str(victim),
        "notes.txt",
        "images/holiday.jpg",
        "/",
        "../",
        7,
        None,
        ["x"],
    ]
    (path / "files.json").write_text(json.dumps(listed))
    (path / "checkpoints" / "state-00000099.ckpt").write_text("of the run before")
    assert caller("run", capfd)(*words, "--overwrite").returncode == 0
    assert all(other.read_text() == "mine" for other in [*others, victim])
    assert not (path / "checkpoints" / "state-00000099.ckpt").exists()


def test_nothing_is_deleted_for_a_run_that_cannot_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    words = ["smoke", *TINY, "-o", str(path), "-q", "--overwrite"]
    assert caller("run", capfd)(*words).returncode == 0

    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    before = content()
    assert caller("run", capfd)(*words, "sampler.size=99").returncode == 3
    with locked(path, "busy"):
        done = caller("run", capfd)(*words)
        assert done.returncode == 2 and "in use" in done.stderr
    stray = path / "trace.json"
    stray.write_text("mine, not in the list")
    done = caller("run", capfd)(*words)
    assert done.returncode == 2 and "trace.json is not in files.json" in done.stderr
    stray.unlink()
    write = files.write_bytes

    def full(target: Path, data: bytes, within: Path | None = None) -> None:
        if target.parent.name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system")
        write(target, data, within)

    monkeypatch.setattr(files, "write_bytes", full)
    assert caller("run", capfd)(*words).returncode == 1
    assert content() == before


def test_every_file_of_a_run_has_a_name_of_the_layout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        *TINY,
        "evaluation={name: dead-leaves, count: 1, size: 16, seed: 1}",
        "-o",
        str(tmp_path / "run"),
        "-q",
    ]
    assert caller("run", capfd)("smoke", *words, "--profile").returncode == 0
    mine, strays = Manifest(tmp_path / "run").files()
    written = {path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert set(mine) == written - {tmp_path / "run" / "files.json", tmp_path / "run" / "lock"} and not strays


def test_a_restart_does_not_take_another_run_of_the_same_recipe_for_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blt_run = caller("run", capfd)
    words = ["smoke", *TINY, "-o", str(tmp_path / "run"), "-q"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "yesterday")
    assert blt_run(*words).returncode == 0
    restarted = replace(Place.here(), restarts=1)
    monkeypatch.setattr(Place, "here", classmethod(lambda cls: restarted))
    assert "is finished" in blt_run(*words).stderr, "its own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "today")
    done = blt_run(*words)
    assert done.returncode == 2 and "not empty" in done.stderr


def test_a_restart_goes_on_with_its_own_run_only(
    foreign: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blt_run = caller("run", capfd)
    assert blt_run("smoke", *TINY, "-o", str(tmp_path / "other"), "-q").returncode == 0
    before = (tmp_path / "other" / "metrics.jsonl").read_text()
    restarted = replace(Place.here(), restarts=1)
    monkeypatch.setattr(Place, "here", classmethod(lambda cls: restarted))
    for path in (foreign, tmp_path / "other"):
        done = blt_run("smoke", *TINY, "seed=7", "-o", str(path), "-q")
        assert done.returncode == 2 and "not empty" in done.stderr
    assert kept(foreign) and (tmp_path / "other" / "metrics.jsonl").read_text() == before
    (tmp_path / "other" / "checkpoints").rename(tmp_path / "none")
    assert blt_run("smoke", *TINY, "-o", str(tmp_path / "other"), "-q").returncode == 0, "its own, begun anew"


def test_a_damaged_checkpoint_is_passed_over_by_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    run(load_recipe("smoke", TINY), out=path)
    newest = sorted(path.glob("checkpoints/state-*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    done = caller("resume", capfd)(str(path), "budget.steps=4")
    assert done.returncode == 0, done.stderr
    assert "falling back to the checkpoint before it" in done.stderr


@pytest.mark.parametrize("optimizer", ["isgd-ls", "maid", "{name: isgd, step: auto}"])
def test_theta_may_begin_at_zero(optimizer: str, tmp_path: Path) -> None:
    words = [
        *TINY,
        "regularizer={name: tikhonov, weight: 1}",
        "sampler={name: full}",
        f"upper_optimizer={optimizer}",
    ]
    result = run(load_recipe("smoke", words), out=tmp_path / "run")
    assert any(float(value.abs().max()) > 0 for value in result.theta.values()), "it learns"


@pytest.mark.parametrize("name", ["mps", "meta", "xla"])
def test_devices_without_float64(name: str) -> None:
    # mps is refused on a Mac, too: it has no float64.
    with pytest.raises(MissingError, match=rf"{name}.*float64.*auto, cpu or cuda"):
        pick_device(name)


def test_planes_are_kept_for_a_few_sizes_only() -> None:
    planes = Planes(torch.rand(3))
    for side in range(4, 40):
        found = planes.at(torch.zeros(1, 3, side, side))
        assert found.shape == (1, 3, side, side)
    assert len(planes._made) <= 4


def test_inference_mode_leaves_nothing_behind() -> None:
    foe = FieldOfExperts(filters=2, kernel_size=3)
    theta, x = initial(foe), torch.rand(1, 3, 8, 8, dtype=torch.float64)
    expected = FieldOfExperts(filters=2, kernel_size=3).gradient(theta, x)
    with torch.inference_mode():
        inside = {name: value.clone() for name, value in theta.items()}
        torch.testing.assert_close(foe.gradient(inside, x), expected)
        torch.testing.assert_close(foe.gradient(theta, x), expected)
    x.requires_grad_()
    foe.energy(theta, x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


#: Methods that ask the oracle several times per step, with the sampler they need.
MAID = "{name: maid, tol: 0.5}"  # so inaccurate at first that only error bounds reject a step
SEARCHING = {MAID: "full", "hoag": "full", "isgd-ls": "{name: epoch, size: 2}"}
#: What the checks leave in the log: they are spread over the budget, so that a larger one has others.
CHECKED = {"validation_psnr", "evaluation_iterations"}


def searching(method: str, *words: str) -> Recipe:
    data = "data={name: dead-leaves, count: 4, size: 24}"
    options = [data, f"sampler={SEARCHING[method]}", f"upper_optimizer={method}", "dtype=float64"]
    return load_recipe("smoke", [*TINY, *options, *words])


def logged(path: Path) -> list[dict[str, object]]:
    """The log without what depends on the checks."""
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in record.items() if key not in CHECKED} for record in records]


@pytest.mark.parametrize("held_out", [0, 1])
@pytest.mark.parametrize("method", SEARCHING)
def test_steps_that_a_budget_cuts_off_are_continued_when_it_grows(
    method: str, held_out: int, tmp_path: Path
) -> None:
    whole, parts, validation = tmp_path / "whole", tmp_path / "parts", f"validation.count={held_out}"
    result = run(searching(method, validation, "budget={computations: 1300}"), out=whole)
    budgets = [1, 100, 250, 400, 550, 800, 1000]
    run(searching(method, validation, f"budget={{computations: {budgets[0]}}}"), out=parts)
    cut_off = 0
    for budget in [*budgets[1:], 1300]:
        cut_off += bool(
            read_checked(sorted(parts.glob("checkpoints/state-*"))[-1])["content"]["run"]["journal"]
        )
        grown = resume(parts, [f"budget.computations={budget}"])
    assert cut_off >= 2, "within a step"
    if method == MAID:
        assert any(record["tightenings"] for record in logged(whole)), "steps are meant to be computed again"
    assert logged(parts) == logged(whole)
    assert all(torch.equal(grown.last[name], value) for name, value in result.last.items())
    if not held_out:
        assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        assert grown.cost == result.cost


@pytest.mark.parametrize("method", SEARCHING)
def test_steps_that_the_clock_cuts_off_are_continued(method: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(searching(method, "budget={steps: 4}"), out=whole)
    run(searching(method, "budget={steps: 4, seconds: 0.02}"), out=parts)
    for seconds in ("0.1", "0.3", "0.4", "null"):
        resume(parts, [f"budget.seconds={seconds}"])
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
