"""Several processes that do one run, for tests: start them, trouble them, wait for them, compare what they left."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import flat

from bltoolbox import resume, run
from bltoolbox.config.recipe import Recipe
from bltoolbox.distributed.launch import Place
from bltoolbox.distributed.ranks import Group, Ranks
from bltoolbox.distributed.signals import handled
from bltoolbox.restoration.model import read_theta
from bltoolbox.training.experiment import Experiment

FORK = multiprocessing.get_context("fork")
#: Seconds after which processes that wait for each other have failed.
PATIENCE = 120.0


class Processes:
    """Ranks as forked processes, each of which writes down what became of it."""

    def __init__(self, folder: Path, size: int, work: Callable[[Ranks], Any]) -> None:
        self.folder = folder / f"ranks-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.size, self.work = size, work
        self.children = [FORK.Process(target=self._be, args=(rank,)) for rank in range(size)]
        for child in self.children:
            child.start()

    def _be(self, rank: int) -> None:
        torch.set_num_threads(1)
        try:
            with handled():
                ranks = Group(Place(rank, self.size, rank), f"file://{self.folder}/meet")
                told = ["fine", self.work(ranks)]
        except BaseException as error:
            told = [type(error).__name__, str(error)]
        (self.folder / f"{rank}.json").write_text(json.dumps(told))

    def wait(self) -> list[list[Any]]:
        """What became of each; whoever was killed told nothing."""
        end = time.monotonic() + PATIENCE
        for child in self.children:
            child.join(max(0.0, end - time.monotonic()))
        hung = [child for child in self.children if child.is_alive()]
        for child in hung:
            child.kill()
            child.join()
        assert not hung, "the ranks wait for each other"
        files = [self.folder / f"{rank}.json" for rank in range(self.size)]
        return [json.loads(file.read_text()) if file.exists() else ["killed", ""] for file in files]


def on_ranks(folder: Path, size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What ``work`` returned on each rank."""
    ends = Processes(folder, size, work).wait()
    assert [kind for kind, _ in ends] == ["fine"] * size, ends
    return [result for _, result in ends]


def run_on(folder: Path, size: int, one: Recipe, out: Path) -> None:
    def work(ranks: Ranks) -> None:
        run(one, out=out, ranks=ranks)

    on_ranks(folder, size, work)


def resume_on(folder: Path, size: int, out: Path) -> None:
    def work(ranks: Ranks) -> None:
        resume(out, ranks=ranks)

    on_ranks(folder, size, work)


def assert_same(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    for name in ("theta.safetensors", "checkpoints/best.safetensors", "checkpoints/last.safetensors"):
        assert torch.equal(flat(read_theta(one / name)[0]), flat(read_theta(other / name)[0]))


def spoil(
    experiment: Experiment, error: BaseException | int, sample: int | None = 5, calls: Sequence[int] = (3,)
) -> None:
    """Whoever solves ``sample`` (any if None) meets an error, or gets a signal, in some of the oracle's calls."""
    oracle, count = experiment.oracle, [0]
    ask, solve = oracle.ask, oracle.solve

    def counted(question: str, compute: Callable[[], Any]) -> Any:
        count[0] += 1
        return ask(question, compute)

    def spoiled(chunk: Any, tol: float) -> Any:
        if count[0] in calls and (sample is None or sample in chunk.samples):
            if isinstance(error, int):
                os.kill(os.getpid(), error)
                time.sleep(5)
            else:
                raise error
        return solve(chunk, tol)

    oracle.ask, oracle.solve = counted, spoiled  # type: ignore[method-assign, assignment]


def wait_for_ranks(
    process: subprocess.Popen[Any], out: Path, sign: str = "checkpoints/state-*.ckpt"
) -> list[int]:
    """The processes of the ranks, in their order, once the run has come as far as ``sign``."""
    end = time.monotonic() + PATIENCE
    while not any(path.stat().st_size for path in out.glob(sign)):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if str(out) not in (folder / "cmdline").read_text():
                    continue
                surroundings = (folder / "environ").read_text().split("\0")
            except OSError:
                continue
            ranks = [one for one in surroundings if one.startswith("RANK=")]
            if ranks:
                found[int(ranks[0][5:])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
