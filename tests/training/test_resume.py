"""A run survives anything: killed at random moments it ends as if it had never been interrupted, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bltoolbox import resume, run
from bltoolbox.bilevel.warm_starts import Stores
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import BltError, UsageError
from bltoolbox.restoration.model import read_theta
from bltoolbox.training.checkpoint import MAGIC, Checkpoints, read_checked, write_checked

torch.set_num_threads(1)
FORK = multiprocessing.get_context("fork")

RECIPES = {
    "isgd": {"upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1}, "sampler": {"size": 4}},
    "iadam": {
        "upper_optimizer": {"name": "iadam", "step": 1e-2, "tol": 0.1},
        "sampler": {"name": "nice", "size": 4},
    },
    "maid": {"upper_optimizer": {"name": "maid", "step": 1e-2, "tol": 0.05}, "sampler": {"name": "full"}},
}


def recipe(method: str, steps: int, every: float = 0.0) -> dict[str, object]:
    return {
        "data": {"name": "dead-leaves", "count": 12, "size": 12},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "lower_solver": "mm",
        "validation": {"count": 2, "checks": 4},
        "checkpoint": {"every": every, "keep_finished": True},
        "budget": {"steps": steps},
        **RECIPES[method],
    }


def start(method: str, path: Path, steps: int, every: float = 0.0) -> None:
    run(recipe_from_dict(recipe(method, steps, every)), out=path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Runs that nothing happened to, to be compared with or copied."""
    folder = tmp_path_factory.mktemp("finished")

    def path(method: str, steps: int) -> Path:
        out = folder / f"{method}-{steps}"
        if not out.exists():
            start(method, out, steps, every=60)
        return out

    return path


def manifests(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("state-*.ckpt"))


def assert_same(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    for name in ("theta.safetensors", "checkpoints/best.safetensors", "checkpoints/last.safetensors"):
        mine, theirs = read_theta(one / name)[0], read_theta(other / name)[0]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def kill_at_random(method: str, path: Path, steps: int, kills: int) -> int:
    """Start or resume in a child and kill it, each time after some progress; how often that was done."""
    chance, done = random.Random(f"{method} {steps}"), 0
    for _ in range(kills):
        before = manifests(path)[-1:] if path.exists() else []
        target, arguments = (resume, (path,)) if before else (start, (method, path, steps))
        child = FORK.Process(target=target, args=arguments)
        child.start()
        # A checkpoint or a few of progress, then at any moment of what comes next.
        wanted = chance.randint(1, 3)
        seen: set[str] = set()
        while child.is_alive() and len(seen) < wanted:
            seen |= {file.name for file in manifests(path) if [file] != before}
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.02))
        if not child.is_alive():
            break
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        done += 1
    return done


@pytest.mark.parametrize(("method", "steps", "kills"), [("isgd", 40, 5), ("maid", 8, 3)])
def test_a_run_killed_again_and_again_ends_as_if_it_had_not_been(
    method: str, steps: int, kills: int, finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    assert kill_at_random(method, killed, steps, kills) == kills
    resume(killed)
    assert_same(finished(method, steps), killed)


@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_finished_run_goes_on_when_its_budget_grows(
    method: str, finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    grown, whole = tmp_path / "grown", finished(method, 4)
    shutil.copytree(finished(method, 2), grown)
    with pytest.raises(UsageError, match="is finished"):
        resume(grown)
    resume(grown, ["budget.steps=4"])
    one, other = (read_theta(path / "checkpoints" / "last.safetensors")[0] for path in (grown, whole))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    "override", ["budget.steps=2", "seed=1", "upper_optimizer.step=1", "budget.seconds=9"]
)
def test_nothing_but_a_growing_budget_may_change(override: str, finished: Callable[[str, int], Path]) -> None:
    with pytest.raises(UsageError, match="budget"):
        resume(finished("isgd", 3), [override])


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "remove a segment"])
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_it_serves(
    damage: str, finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    whole, broken = finished("isgd", 8), tmp_path / "broken"
    kill_at_random("isgd", broken, steps=8, kills=1)
    newest = manifests(broken)[-1]
    raw = bytearray(newest.read_bytes())
    if damage == "truncate":
        newest.write_bytes(raw[: len(raw) // 2])
    elif damage == "flip":
        raw[-100] ^= 1
        newest.write_bytes(raw)
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        segments = {name for name, _ in read_checked(newest)["segments"]}
        older = {name for name, _ in read_checked(manifests(broken)[-2])["segments"]}
        for name in segments - older:
            (broken / "checkpoints" / name).unlink()
    resume(broken)
    assert_same(whole, broken)


def test_without_any_whole_checkpoint_there_is_one_sentence(
    finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    shutil.copytree(finished("isgd", 3), tmp_path / "run")
    for path in manifests(tmp_path / "run"):
        path.write_bytes(b"nonsense")
    with pytest.raises(BltError, match="no usable checkpoint"):
        resume(tmp_path / "run", ["budget.steps=4"])


def test_a_checkpoint_of_a_newer_version_is_refused(
    finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    shutil.copytree(finished("isgd", 3), tmp_path / "run")
    for path in manifests(tmp_path / "run"):
        write_checked(path, read_checked(path) | {"format": 99})
    with pytest.raises(BltError, match="newer bltoolbox"):
        resume(tmp_path / "run", ["budget.steps=4"])


def test_a_checkpoint_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    payload = pickle.dumps({"x": Evil()}, protocol=2)
    path = tmp_path / "state-00000001.ckpt"
    path.write_bytes(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
    with pytest.raises(BltError, match="not plain data"):
        read_checked(path)
    assert not (tmp_path / "owned").exists()


def test_two_processes_do_not_write_to_one_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    child = FORK.Process(target=start, args=("isgd", path, 100_000))
    child.start()
    try:
        while not manifests(path):
            time.sleep(0.01)
        with pytest.raises(UsageError, match="in use by another process"):
            resume(path)
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_checkpoint_and_its_exit_code(
    number: signal.Signals, code: int, finished: Callable[[str, int], Path], tmp_path: Path
) -> None:
    stopped, steps = tmp_path / "stopped", 40
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_from_dict(recipe("isgd", steps, every=60)).to_yaml())
    command = [sys.executable, "-m", "bltoolbox"]
    process = subprocess.Popen(
        [*command, "run", str(file), "-o", str(stopped)], stderr=subprocess.PIPE, text=True
    )
    metrics = stopped / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"blt resume {stopped}" in said and "Traceback" not in said
    resume(stopped)
    assert_same(finished("isgd", steps), stopped)


def test_adjoints_of_an_older_checkpoint_are_warm_starts_again(tmp_path: Path) -> None:
    kept = Stores(2)
    kept["memory.adjoint"].put([0, 1], torch.tensor([[1.0], [2.0]]))
    Checkpoints(tmp_path, kept).save({"run": {}, "lengths": {}})
    (segment,) = tmp_path.glob("warm-*.ckpt")
    write_checked(segment, {"adjoints": read_checked(segment)["memory.adjoint"]})
    again = Stores(2)
    Checkpoints(tmp_path, again).load()
    assert set(again) == {"memory.adjoint"}
    assert again["memory.adjoint"].get([0, 1], torch.zeros(2, 1)).flatten().tolist() == [1.0, 2.0]
