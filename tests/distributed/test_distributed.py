"""One run on several processes: the same result as on one, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BLT
from helpers import relative_error
from processes import (
    PATIENCE,
    Processes,
    alive,
    assert_same,
    on_ranks,
    resume_on,
    run_on,
    spoil,
    wait_for_ranks,
)

from bltoolbox import resume, run
from bltoolbox.bilevel.device import pick_device
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, Cost
from bltoolbox.bilevel.share import assign, divide
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.distributed.launch import Launcher, Place
from bltoolbox.distributed.ranks import ALONE, RankFailed, RankLost, Ranks
from bltoolbox.distributed.signals import Interrupted, handled
from bltoolbox.errors import BltError, MissingError, NumericalError, UsageError
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.model import read_theta
from bltoolbox.runs import files
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import run_in
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.run_dir import RunDirectory

METHODS: dict[str, dict[str, object]] = {
    "isgd": {"upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1}, "sampler": {"size": 4}},
    "maid": {
        "upper_optimizer": {"name": "maid", "step": 1e-2, "tol": 0.05},
        "sampler": {"name": "full"},
        # Quicker at each new θ.
        "color": "gray",
    },
    "iadam": {
        "upper_optimizer": {"name": "iadam", "step": 1e-2, "tol": 0.1},
        "sampler": {"name": "nice", "size": 3},
    },
}


def recipe(method: str, steps: int = 20, every: float = 60.0, **changes: object) -> Recipe:
    settings = {
        "data": {"name": "dead-leaves", "count": 8, "size": 12},
        "evaluation": {"name": "dead-leaves", "count": 5, "size": 12, "seed": 7},
        "dtype": "float64",
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "lower_solver": "mm",
        "validation": {"count": 2, "checks": 4},
        "checkpoint": {"every": every, "keep_finished": True},
        "certificates": {"every": 3},
        "chunk": 4,
        "budget": {"steps": steps},
    }
    return recipe_from_dict(settings | METHODS[method] | changes)


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs, and have tests of their own."""
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)
    monkeypatch.setattr(ReportWriter, "finished", lambda self, result: None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_close(one: Path, other: Path, *, apart: Sequence[str] = ()) -> None:
    """θ to 1e-12, every log to rounding, the ledger exactly."""
    for name in ("theta.safetensors", "checkpoints/last.safetensors", "checkpoints/best.safetensors"):
        assert relative_error(read_theta(other / name)[0], read_theta(one / name)[0]) < 1e-12
    for name in ("metrics.jsonl", "checks.jsonl"):
        mine, theirs = lines(one / name), lines(other / name)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs, strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - set(apart):
                if isinstance(a[key], float):
                    assert b[key] == pytest.approx(a[key], rel=1e-8, abs=1e-12), key
                else:
                    assert b[key] == a[key], key
    status = [json.loads((path / "status.json").read_text()) for path in (one, other)]
    for key in ("psnr_after", "psnr_initial", "psnr_before", "psnr_validation"):
        assert status[1][key] == pytest.approx(status[0][key], abs=1e-9)
    assert status[0]["evaluation_iterations"] == status[1]["evaluation_iterations"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The same runs on one process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)
        patch.setattr(ReportWriter, "finished", lambda self, result: None)
        for method in METHODS:
            run(recipe(method), out=folder / method)
    return {method: folder / method for method in METHODS}


class TestShares:
    @pytest.mark.parametrize("size", [2, 3, 5, 64])
    def test_everyone_gets_as_much_and_as_few_samples_travel_as_can_be(self, size: int) -> None:
        chance = random.Random(size)
        for count in (0, 1, size - 1, size, 3 * size + 1, 200):
            ids = chance.sample(range(1000), count)
            workers = assign(ids, size)
            shares = torch.bincount(workers, minlength=size)
            assert shares.max() - shares.min() <= 1
            present = torch.bincount(torch.tensor(ids, dtype=torch.long) % size, minlength=size)
            needed = int((present - shares).clamp_min(0).sum())
            assert int((workers != torch.tensor(ids, dtype=torch.long) % size).sum()) == needed
            assert torch.equal(workers, assign(ids, size))

    @pytest.mark.parametrize("m", [1, 7, 12, 100])
    def test_nothing_travels_for_a_full_batch(self, m: int) -> None:
        for size in (2, 3, 8):
            places = []
            for rank in range(size):
                ranks = Ranks()
                ranks.rank, ranks.size = rank, size
                share = divide(range(m), ranks)
                assert not share.travels and not share.lent and not share.guests
                places += share.positions
            assert sorted(places) == list(range(m))


class TestTheSameResult:
    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("method", ["isgd", "maid"])
    def test_on_any_number_of_ranks(
        self, method: str, size: int, alone: Mapping[str, Path], tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        run_on(tmp_path, size, recipe(method), out)
        assert_close(alone[method], out)
        assert json.loads((out / "env.json").read_text())["ranks"] == size

    def test_measurements_are_split_alike_and_their_loss_is_the_same(self, tmp_path: Path) -> None:
        changes = {"upper_loss": "recorrupted", "validation": {"count": 3, "checks": 2, "metric": "loss"}}

        def work(ranks: Ranks) -> list[Any]:
            found = run(recipe("isgd", 3, **changes), ranks=ranks)
            assert found.evaluation is not None
            theta = torch.cat([value.flatten() for value in found.theta.values()])
            return [theta.tolist(), found.validation, found.evaluation.after]

        expected = work(ALONE)
        for found in on_ranks(tmp_path, 2, work):
            assert found[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
            assert found[1] == pytest.approx(expected[1], rel=1e-9)
            assert list(found[2]) == ["loss", "psnr", "ssim", "nrmse"]
            for name, values in found[2].items():
                assert values == pytest.approx(expected[2][name], rel=1e-8)

    def test_rank_0_has_the_images_that_are_drawn(self, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> list[Any]:
            found = run(recipe("isgd", 1), ranks=ranks).evaluation
            assert found is not None
            shown = [
                one.x_true.sum().item() + one.start.sum().item() + one.x.sum().item() for one in found.images
            ]
            return [shown, found.after["psnr"], found.labels]

        expected, (first, *others) = work(ALONE), on_ranks(tmp_path, 3, work)
        assert first[0] == pytest.approx(expected[0], rel=1e-9) and len(first[0]) == 4
        for one in (first, *others):
            assert one[1] == pytest.approx(expected[1], abs=1e-9) and one[2] == expected[2]

    def test_with_a_sampler_that_mixes_warm_and_cold_samples(
        self, alone: Mapping[str, Path], tmp_path: Path
    ) -> None:
        """A chunk with one warm sample takes a product for its cold ones as well, so that count depends on chunks."""
        run_on(tmp_path, 2, recipe("iadam"), tmp_path / "run")
        assert_close(alone["iadam"], tmp_path / "run", apart=["hessian_products"])

    def test_where_the_batch_is_smaller_than_the_number_of_ranks(self, tmp_path: Path) -> None:
        small = recipe("isgd", 6, sampler={"size": 2})
        run(small, out=tmp_path / "alone")
        run_on(tmp_path, 3, small, tmp_path / "run")
        assert_close(tmp_path / "alone", tmp_path / "run")

    def test_with_empty_batches(self, tmp_path: Path) -> None:
        sparse = recipe("isgd", 8, sampler={"name": "independent", "size": 1})
        run(sparse, out=tmp_path / "alone")
        run_on(tmp_path, 2, sparse, tmp_path / "run")
        assert_close(tmp_path / "alone", tmp_path / "run", apart=["hessian_products"])
        assert 0 in [line["batch"] for line in lines(tmp_path / "run" / "metrics.jsonl")]

    def test_trial_solutions_of_guests_become_warm_starts_at_home(self, tmp_path: Path) -> None:
        ids = [0, 2, 4, 3]  # three live on rank 0 of two, one on rank 1

        def work(ranks: Ranks) -> list[Any]:
            oracle = assemble(recipe("isgd"), ranks=ranks).oracle
            theta = assemble(recipe("isgd")).theta
            batch = oracle.on(Batch(ids, [2.0] * len(ids)))
            batch.hypergradient(theta, Accuracy(0.1), Accuracy(0.1))
            moved = {name: one + 0.01 for name, one in theta.items()}
            value = batch.value(moved, Accuracy(0.01))
            again = batch.value(moved, Accuracy(0.01), towards=value)
            half = batch.value(moved, Accuracy(1e3), towards=value, fraction=0.5)
            batch.accept(value)
            held = {
                i: oracle.solutions.lend([i], torch.empty(0, 3, 12, 12, dtype=torch.float64)) for i in ids
            }
            rows = {i: lent.rows.flatten().tolist() for i, lent in held.items() if oracle.solutions.owns(i)}
            return [value.value, value.lower, value.upper, rows, again.iterations, half.value]

        (expected,) = [work(ALONE)]
        found = on_ranks(tmp_path, 2, work)
        assert found[0][:3] == found[1][:3] == pytest.approx(expected[:3], rel=1e-12)
        assert found[0][4] == found[1][4] == expected[4] == 0, "guests start where home says"
        assert found[0][5] == found[1][5] == pytest.approx(expected[5], rel=1e-12) != expected[0]
        assert set(found[0][3]) == {"0", "2", "4"} and set(found[1][3]) == {"3"}
        for part in found:
            for i, row in part[3].items():
                assert row == pytest.approx(expected[3][int(i)], abs=1e-12)

    def test_only_rank_0_writes_but_for_its_own_part_of_checkpoints(self, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> list[str]:
            written: list[str] = []
            plain = files.write_bytes

            def write(path: Path, content: bytes, within: Path | None = None) -> None:
                written.append(path.name)
                plain(path, content, within)

            for module in ("runs.files", "training.checkpoint", "training.run_dir"):
                sys.modules[f"bltoolbox.{module}"].write_bytes = write  # type: ignore[attr-defined]
            heard = Recorder()
            run(recipe("isgd", 3, every=0.0), out=tmp_path / "run", ranks=ranks, listeners=[heard])
            return [*written, *heard.events]

        first, second = on_ranks(tmp_path, 2, work)
        assert "theta.safetensors" in first and "finished" in first
        assert second and all("-1of2.ckpt" in name for name in second)


class Recorder(Listener):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def started(self, experiment: Experiment) -> None:
        self.events.append("started")

    def finished(self, result: object) -> None:
        self.events.append("finished")


class TestFailures:
    @pytest.mark.parametrize("policy", ["stop", "shrink-step", "skip-batch"])
    def test_what_fails_numerically_on_one_rank_is_recovered_from_by_all(
        self, policy: str, tmp_path: Path
    ) -> None:
        one, calls = recipe("isgd", 8, on_divergence=policy), [2, 3, 4, 7]

        def work(ranks: Ranks, out: Path) -> None:
            experiment = assemble(one, ranks=ranks)
            batch, _ = experiment.sampler.next({"m": 6, "seed": 0, "epoch": 0, "position": 4})
            spoil(experiment, NumericalError("no sample like this"), batch.ids[0], calls)
            run_in(RunDirectory(out, ranks=ranks), experiment)

        if policy == "stop":
            with pytest.raises(NumericalError, match="step 2: no sample like this"):
                work(ALONE, tmp_path / "alone")
            ends = Processes(tmp_path, 3, lambda ranks: work(ranks, tmp_path / "run")).wait()
            assert ends == [["NumericalError", "step 2: no sample like this"]] * 3
            assert "failed: step 2" in (tmp_path / "run" / "status.json").read_text()
            return
        work(ALONE, tmp_path / "alone")
        on_ranks(tmp_path, 3, lambda ranks: work(ranks, tmp_path / "run"))
        assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["recoveries"] >= 1
        # What the other ranks had solved when one failed is charged, and alone it was never begun.
        ledger = list(Cost().as_dict())
        assert_close(tmp_path / "alone", tmp_path / "run", apart=ledger)
        alone, together = (lines(tmp_path / name / "metrics.jsonl")[-1] for name in ("alone", "run"))
        assert together["computations"] >= alone["computations"]
        assert together["hypergradients"] == alone["hypergradients"] == 8 + together["recoveries"]

    def test_any_other_error_on_one_rank_ends_all_with_its_words(self, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> None:
            experiment = assemble(recipe("maid", 4), ranks=ranks)
            spoil(experiment, MissingError("the disk with image 5 is gone"))
            run_in(RunDirectory(tmp_path / "run", ranks=ranks), experiment)

        ends = Processes(tmp_path, 2, work).wait()
        assert ends == [
            ["RankFailed", "rank 1: the disk with image 5 is gone"],
            ["MissingError", "the disk with image 5 is gone"],
        ]
        assert "rank 1: the disk" in (tmp_path / "run" / "status.json").read_text()
        resume_on(tmp_path, 2, tmp_path / "run")

    def test_what_fails_on_rank_0_between_two_calls_ends_all(self, tmp_path: Path) -> None:
        class Full(Listener):
            def stepped(self, record: object, seconds: float, fraction: float) -> None:
                raise RuntimeError("no room for another line")

        def work(ranks: Ranks) -> None:
            run(recipe("isgd", 4), out=tmp_path / "run", ranks=ranks, listeners=[Full()])

        ends = Processes(tmp_path, 3, work).wait()
        assert ends[0] == ["RuntimeError", "no room for another line"]
        assert ends[1:] == [["RankFailed", "rank 0: RuntimeError: no room for another line"]] * 2

    def test_a_directory_that_rank_0_refuses_is_refused_by_all(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious").write_text("mine")

        def work(ranks: Ranks) -> None:
            experiment = assemble(recipe("isgd", 2), ranks=ranks)
            ranks.each("directory", lambda: RunDirectory(tmp_path / "run", ranks=ranks) and None)
            run_in(RunDirectory(tmp_path / "run", ranks=ranks), experiment)

        ends = Processes(tmp_path, 2, work).wait()
        assert ends[0][0] == "UsageError" and ends[1][0] == "RankFailed" and "not empty" in ends[1][1]

    def test_ranks_that_are_asked_about_different_θ_are_out_of_step(self, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> None:
            oracle = assemble(recipe("maid"), ranks=ranks).oracle
            theta = {k: v + 1e-15 * ranks.rank for k, v in assemble(recipe("maid")).theta.items()}
            oracle.on(Batch(range(6), [1.0] * 6)).value(theta, Accuracy(0.1))

        ends = Processes(tmp_path, 2, work).wait()
        assert all(kind == "RankFailed" and "out of step" in said for kind, said in ends)

    def test_rank_0_s_clock_decides_when_the_budget_is_spent(self, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> int:
            if ranks.rank:
                plain = time.perf_counter
                time.perf_counter = lambda: 1e6 + 10 * plain()
            return run(recipe("isgd", budget={"seconds": 1.0}), ranks=ranks).steps

        first, second = on_ranks(tmp_path, 2, work)
        assert first == second > 0


class TestInterruptions:
    @pytest.mark.parametrize(("method", "number"), [("isgd", signal.SIGINT), ("maid", signal.SIGTERM)])
    def test_a_signal_to_one_rank_stops_all_at_the_same_call(
        self, method: str, number: signal.Signals, tmp_path: Path
    ) -> None:
        one, whole, stopped = recipe(method, 8), tmp_path / "whole", tmp_path / "stopped"

        def work(ranks: Ranks) -> None:
            experiment = assemble(one, ranks=ranks)
            spoil(experiment, int(number), calls=range(6, 9))
            run_in(RunDirectory(stopped, ranks=ranks), experiment)

        assert Processes(tmp_path, 2, work).wait() == [["Interrupted", number.name]] * 2
        assert json.loads((stopped / "status.json").read_text())["status"] == "interrupted"
        resume_on(tmp_path, 2, stopped)
        run_on(tmp_path, 2, one, whole)
        assert_same(whole, stopped)

    @pytest.mark.parametrize(
        ("method", "sizes"), [("isgd", (2, 3)), ("maid", (2, 3)), ("maid", (3, 1)), ("maid", (1, 2))]
    )
    def test_it_goes_on_on_another_number_of_ranks(
        self, method: str, sizes: tuple[int, int], alone: Mapping[str, Path], tmp_path: Path
    ) -> None:
        """MAID is stopped between two values of a line search, whose solutions lie with different ranks."""
        out = tmp_path / "run"

        def work(ranks: Ranks) -> None:
            experiment = assemble(recipe(method), ranks=ranks)
            spoil(experiment, int(signal.SIGTERM), calls=range(9, 12))
            run_in(RunDirectory(out, ranks=ranks), experiment)

        before, after = sizes
        if before == 1:
            with handled(), pytest.raises(Interrupted):
                work(ALONE)
        else:
            assert Processes(tmp_path, before, work).wait()[0][0] == "Interrupted"
        if after == 1:
            resume(out)
        else:
            resume_on(tmp_path, after, out)
        assert_close(alone[method], out, apart=["hessian_products"])

    @pytest.mark.parametrize("method", ["isgd", "maid"])
    def test_a_rank_killed_again_and_again_leaves_no_trace(self, method: str, tmp_path: Path) -> None:
        one, whole, killed = recipe(method, 8, every=0.0), tmp_path / "whole", tmp_path / "killed"
        run_on(tmp_path, 2, recipe(method, 8), whole)
        chance = random.Random(method)
        for _ in range(3):
            before = manifests(killed)

            def work(ranks: Ranks, known: bool = bool(before)) -> None:
                if known:
                    resume(killed, ranks=ranks)
                else:
                    run(one, out=killed, ranks=ranks)

            group = Processes(tmp_path, 2, work)
            victim = chance.randrange(2)
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and len(set(manifests(killed)) - set(before)) < 2:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.05))
            group.children[victim].kill()
            ends = group.wait()
            assert ends[victim][0] == "killed" and ends[1 - victim][0] in ("RankLost", "fine")
        if not json.loads((killed / "status.json").read_text()).get("finished"):
            resume_on(tmp_path, 2, killed)
        assert_same(whole, killed)


def manifests(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "checkpoints").glob("state-*.ckpt")) if path.exists() else []


class TestCommands:
    def test_a_killed_rank_is_named_and_the_run_can_be_taken_up(self, tmp_path: Path) -> None:
        file, whole, killed = tmp_path / "recipe.yaml", tmp_path / "whole", tmp_path / "killed"
        file.write_text(recipe("isgd", 30, every=0.0).to_yaml())
        process = subprocess.Popen(
            [*BLT, "run", str(file), "-o", str(killed), "--nproc", "2"], stderr=subprocess.PIPE, text=True
        )
        victim = wait_for_ranks(process, killed)[1]
        os.kill(victim, signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert f"rank 1 (process {victim}) was killed by SIGKILL" in said
        assert f"blt resume {killed} --nproc 2" in said and "Traceback" not in said
        again = subprocess.run(
            [*BLT, "resume", str(killed), "--nproc", "2", "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["steps"] == 30
        run_on(tmp_path, 2, recipe("isgd", 30), whole)
        assert_same(whole, killed)

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_to_the_command_stops_all_with_a_checkpoint(
        self, number: signal.Signals, code: int, tmp_path: Path
    ) -> None:
        file, out = tmp_path / "recipe.yaml", tmp_path / "run"
        file.write_text(recipe("isgd", 10_000).to_yaml())
        process = subprocess.Popen(
            [*BLT, "run", str(file), "-o", str(out), "--nproc", "2"], stderr=subprocess.PIPE, text=True
        )
        ranks = wait_for_ranks(process, out, "metrics.jsonl")
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == code
        directory, started, *rest = said.strip().splitlines()
        assert f"run directory: {out}" in directory and "started: recipe on cpu" in started
        assert rest == [f"interrupted; continue from the last checkpoint with: blt resume {out} --nproc 2"], (
            "the second rank is silent"
        )
        assert manifests(out) and not any(alive(pid) for pid in ranks)

    def test_ranks_do_not_outlive_the_command_but_write_a_checkpoint(self, tmp_path: Path) -> None:
        file, out = tmp_path / "recipe.yaml", tmp_path / "run"
        file.write_text(recipe("isgd", 10_000).to_yaml())
        process = subprocess.Popen(
            [*BLT, "run", str(file), "-o", str(out), "--nproc", "2"], stderr=subprocess.DEVNULL
        )
        ranks = wait_for_ranks(process, out, "metrics.jsonl")
        process.kill()
        process.wait()
        end = time.monotonic() + PATIENCE
        while any(alive(pid) for pid in ranks) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(alive(pid) for pid in ranks)
        assert json.loads((out / "status.json").read_text())["status"] == "interrupted" and manifests(out)

    def test_a_recipe_that_is_wrong_is_refused_once(self, tmp_path: Path) -> None:
        file = tmp_path / "recipe.yaml"
        file.write_text(recipe("isgd").to_yaml())
        for override, code, said in (("seed=-1", 3, "seed: expected"), ("sampler.size=50", 3, "larger than")):
            done = subprocess.run(
                [*BLT, "run", str(file), override, "-o", str(tmp_path / "run"), "--nproc", "2"],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            assert done.returncode == code and done.stderr.count(said) == 1, done.stderr
        assert not (tmp_path / "run").exists()


class TestPlaces:
    def test_are_told_by_the_environment(self) -> None:
        assert Place.here({}) == Place()
        found = Place.here(
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
        )
        assert found == Place(5, 8, 1, 2)

    @pytest.mark.parametrize("name", ["SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
    def test_the_number_on_a_machine_may_come_from_the_batch_system(self, name: str) -> None:
        environment = {"RANK": "5", "WORLD_SIZE": "8", name: "3"}
        assert Place.here(environment).local == 3
        assert Place.here(environment | {"LOCAL_RANK": "1"}).local == 1
        assert Place.here({name: "3", "SLURM_NTASKS": "8"}) == Place(), "a job is not a group of ranks"
        with pytest.raises(UsageError, match=f"{name}=-1 is not one of"):
            Place.here(environment | {name: "-1"})

    @pytest.mark.parametrize(
        "environment", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}]
    )
    def test_are_refused_when_they_make_no_sense(self, environment: dict[str, str]) -> None:
        with pytest.raises(UsageError, match="RANK"):
            Place.here(environment)

    @pytest.mark.parametrize(
        ("quota", "expected"),
        [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("9900000 100000", 8), ("", 8)],
    )
    def test_a_container_may_use_less_than_there_is(
        self, quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from bltoolbox.distributed import launch

        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(launch, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
        assert launch.processors() == expected

    def test_processors_are_divided_unless_the_user_has_decided(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("bltoolbox.distributed.launch.processors", lambda: 9)
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert Launcher([], 4)._environment(2, "x", 7)["OMP_NUM_THREADS"] == "2"
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        assert Launcher([], 4)._environment(2, "x", 7)["OMP_NUM_THREADS"] == "5"

    def test_each_rank_has_a_device_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        ranks = Ranks()
        ranks.rank, ranks.size, ranks.local = 3, 4, 1
        assert pick_device("auto", ranks) == pick_device("cuda", ranks) == torch.device("cuda:1")
        assert pick_device("cpu", ranks) == torch.device("cpu")
        with pytest.raises(MissingError, match="each rank gets its own"):
            pick_device("cuda:0", ranks)
        ranks.local = 3
        assert pick_device("cuda", ranks) == torch.device("cuda:1"), "more ranks than devices share them"
        assert pick_device("cuda:0") == torch.device("cuda:0")


def test_errors_of_ranks_are_errors_of_the_toolbox() -> None:
    assert issubclass(RankFailed, BltError) and issubclass(RankLost, BltError)
    assert RankFailed("rank 1: no", 4).exit_code == 4
    assert isinstance(assemble(recipe("isgd")).oracle, BilevelOracle)
