"""Sweeps as jobs of a cluster, with submitit's own processes and with a real Slurm; searches with Optuna."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import Call, caller

from bltoolbox.config.registry import load_registry
from bltoolbox.runs.history import RunHistory
from bltoolbox.training.sweep.grid import parse_grid
from bltoolbox.training.sweep.plan import Planned, State, Sweep, plan
from bltoolbox.training.sweep.resources import Resources

_SMALL = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "device=cpu",
    "baseline=null",
    "evaluation=null",
]
UNBOUNDED = [*_SMALL, "sampler.size=2", "validation={count: 2, checks: 2}"]
QUICK = [*UNBOUNDED, "budget={steps: 4}"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Calls ``blt sweep …`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller("sweep", capfd)


class Silent:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, cells: Sequence[Planned]) -> None:
        pass

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def swept(path: Path, *overrides: str) -> Sweep:
    registry = load_registry()
    return Sweep(path, plan("smoke", parse_grid([*UNBOUNDED, *overrides]), registry), registry)


# Clusters


def test_one_job_per_cell_and_nothing_twice(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    from bltoolbox.training.sweep.cluster import ClusterJobs, Queue

    sweep = swept(tmp_path / "sweep", "budget={steps: 4}", "upper_optimizer.step=1e-3,1e38")
    with sweep.opened():
        jobs = ClusterJobs(sweep, Queue(tmp_path / "sweep" / "slurm", Resources(), "local"), (), Silent())
        jobs.submit()
        assert jobs.follow() is None
    good, bad = sweep.cells
    assert good.state is State.FINISHED and RunHistory.read(good.path).finished
    assert bad.state is State.FAILED and bad.reason
    assert set(json.loads((tmp_path / "sweep" / "jobs.json").read_text())) == {good.name, bad.name}
    again = swept(tmp_path / "sweep", "budget={steps: 4}", "upper_optimizer.step=1e-3,1e38")
    assert [cell.state for cell in again.cells] == [State.FINISHED, State.WAITING]


def test_a_job_that_is_stopped_is_queued_again_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    from bltoolbox.training.sweep.cluster import ClusterJobs, Queue

    sweep = swept(tmp_path / "sweep", "budget={steps: 100}")
    (cell,) = sweep.cells
    queue = Queue(tmp_path / "sweep" / "slurm", Resources(), "local")
    with sweep.opened():
        jobs = ClusterJobs(sweep, queue, (), Silent())
        jobs.submit()
        log = cell.path / "metrics.jsonl"
        wait_for(lambda: log.exists() and log.stat().st_size > 0)
        (job,) = queue.jobs.values()
        (task,) = children(job._process.pid)
        os.kill(task, signal.SIGUSR2)  # as Slurm does before a time limit
        jobs.follow()
    assert cell.state is State.FINISHED and RunHistory.read(cell.path).step_count == 100
    commands = [line for line in cell.log.read_text().splitlines() if "  $ blt " in line]
    assert ["$ blt run" in commands[0], "$ blt resume" in commands[-1], len(commands)] == [True, True, 2]


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def slurm_there() -> bool:
    if not all(shutil.which(name) for name in ("sbatch", "squeue", "srun", "sinfo")):
        return False
    return subprocess.run(["sinfo"], capture_output=True, check=False, timeout=20).returncode == 0


def test_a_real_slurm(here: Call, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="the extra slurm is not installed")
    if not slurm_there():
        pytest.skip("there is no Slurm that answers")
    command = ["smoke", *QUICK, "seed=0,1", "-o", str(tmp_path / "sweep"), "--on", "slurm"]
    done = here(*command, "--time", "5", "--json")
    assert done.returncode == 0, done.stderr
    assert [cell["status"] for cell in json.loads(done.stdout)["cells"]] == ["finished", "finished"]
    assert "on Slurm as job" in done.stderr


def test_options_of_slurm_need_slurm(here: Call) -> None:
    done = here("smoke", "seed=0,1", "--gpus", "1")
    assert done.returncode == 2 and "are for --on slurm" in done.stderr


def test_emit_writes_a_script_and_submits_nothing(here: Call, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    done = here(
        *("smoke", *QUICK, "seed=0,1", "-o", str(out), "--on", "slurm", "--emit", "--time", "1:00:00"),
    )
    assert done.returncode == 0 and done.stdout.strip() == str(out / "array.sh"), done.stderr
    text = (out / "array.sh").read_text()
    assert "#SBATCH --array=0-1" in text and "#SBATCH --time=60" in text
    assert subprocess.run(["bash", "-n", str(out / "array.sh")], check=False).returncode == 0
    assert not (out / "jobs.json").exists() and (out / "sweep.json").exists()


# Searches


@pytest.mark.filterwarnings("ignore")
def test_a_search_prunes_and_continues(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    from bltoolbox.training.sweep.search import SearchJobs, Study, deciding_metric, recorded_cells
    from bltoolbox.training.sweep.space import parse_space

    space = parse_space([*QUICK, "upper_optimizer.step=log:1e-5..1e-2"])
    registry = load_registry()
    metric, seed = deciding_metric("smoke", space.corners()[0], registry)

    def searched(count: int) -> SearchJobs:
        earlier = recorded_cells(tmp_path / "search", space)
        planned = plan("smoke", space.grid, registry, earlier or space.corners())
        if not earlier:
            planned.cells.clear()
        sweep = Sweep(tmp_path / "search", planned, registry)
        with sweep.opened():
            study = Study(sweep, metric, seed)
            jobs = SearchJobs(sweep, 1, (), Silent(), study, space, count, metric)
            assert jobs.run() is None
        return jobs

    first = searched(2)
    assert [cell.state for cell in first.sweep.cells] == [State.FINISHED] * 2 and first.study.ended == 2
    values = [trial.value for trial in first.study.study.trials]
    assert values == [RunHistory.read(cell.path).validated(metric) for cell in first.sweep.cells]
    again = searched(3)
    assert again.study.ended == 3 and len(again.sweep.cells) == 3
    assert [cell.name for cell in again.sweep.cells[:2]] == [cell.name for cell in first.sweep.cells]
    lines = (tmp_path / "search" / "trials.log").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines), "lines of JSON, no pickles"


@pytest.mark.filterwarnings("ignore")
def test_a_cell_that_falls_behind_is_stopped(tmp_path: Path) -> None:
    """The checks of earlier trials are set so high that the next cell is below their median."""
    optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")
    from bltoolbox.training.sweep.search import _STARTUP, SearchJobs, Study, deciding_metric
    from bltoolbox.training.sweep.space import parse_space

    space = parse_space([*UNBOUNDED, "budget={steps: 400}", "upper_optimizer.step=log:1e-5..1e-3"])
    registry = load_registry()
    metric, seed = deciding_metric("smoke", space.corners()[0], registry)
    planned = plan("smoke", space.grid, registry, space.corners())
    planned.cells.clear()
    sweep = Sweep(tmp_path / "search", planned, registry)
    with sweep.opened():
        study = Study(sweep, metric, seed)
        for _ in range(_STARTUP):
            trial = study.study.ask()
            space.ask(trial)
            for check in range(20):
                trial.report(99.0, check)
            study.study.tell(trial, 99.0)
        assert SearchJobs(sweep, 1, (), Silent(), study, space, _STARTUP + 1, metric).run() is None
    (cell,) = sweep.cells
    assert cell.state is State.PRUNED and not RunHistory.read(cell.path).finished
    assert study.study.trials[-1].state is optuna.trial.TrialState.PRUNED


def test_a_search_needs_held_out_images(here: Call, tmp_path: Path) -> None:
    words = [
        "smoke",
        *_SMALL,
        "budget={steps: 4}",
        "validation={count: 0}",
        "sampler.size=1..2",
        "--search",
        "2",
    ]
    done = here(*words, "-o", str(tmp_path / "search"))
    assert done.returncode == 2 and "has none; set validation.count" in done.stderr, done.stderr
    assert not (tmp_path / "search").exists()
