"""Whole runs from Python: what is kept, what is written, what is reproducible, and restoring with the result."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from figures import drawn
from helpers import flat, normal
from skimage.metrics import peak_signal_noise_ratio
from torch import Tensor

from bltoolbox import Model, load_recipe, run, solve
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.lower_loop import solve as solve_lower
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.evaluation import Evaluation, evaluate_tasks
from bltoolbox.restoration.metrics import METRICS, measure
from bltoolbox.restoration.model import read_theta
from bltoolbox.restoration.results import Check, RunResult
from bltoolbox.runs.history import RunHistory
from bltoolbox.testing import smooth_images
from bltoolbox.training.assemble import assemble

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "data": {"name": "dead-leaves", "count": 8, "size": 16},
    "evaluation": {"name": "dead-leaves", "count": 3, "size": 20, "seed": 5},
    "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
    "lower_solver": "mm",
    "sampler": {"name": "epoch", "size": 3},
    "upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1},
    "validation": {"count": 2, "checks": 4},
    "budget": {"steps": 4},
}
#: Steps far too long from a good start.
WORSENING = {"regularizer": {"name": "tv"}, "upper_optimizer": {"name": "isgd", "step": 1.0, "tol": 0.1}}


def recipe(**changes: Any) -> Recipe:
    return recipe_from_dict(SETTINGS | changes)


class Checks(Listener):
    """Remembers what was checked."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, Tensor]] = []

    def checked(self, check: Check, theta: Theta) -> None:
        assert check.validation is not None
        self.seen.append((check.step, check.validation, flat(theta)))


class TestChoice:
    @pytest.mark.parametrize("changes", [{}, WORSENING])
    def test_the_best_theta_on_the_held_out_images_is_kept(self, changes: dict[str, Any]) -> None:
        checks = Checks()
        result = run(recipe(**changes), listeners=[checks])
        step, value, theta = max(checks.seen, key=lambda one: one[1])
        assert [one[0] for one in checks.seen] == [0, 1, 2, 3, 4]
        assert torch.equal(flat(result.theta), theta) and result.validation == value
        assert result.chosen == ("last" if step == 4 else f"best (step {step})")
        assert torch.equal(flat(result.last), checks.seen[-1][2]), "the last θ is kept as well"
        assert (step < 4) == bool(changes), "the two cases are meant to end differently"

    @pytest.mark.parametrize("name", ["ssim", "nrmse"])
    def test_another_metric_decides_by_its_direction(self, name: str, tmp_path: Path) -> None:
        checks = Checks()
        chosen = {"count": 2, "checks": 4, "metric": name}
        result = run(recipe(**WORSENING, validation=chosen), listeners=[checks], out=tmp_path)
        better = max if METRICS[name].higher else min
        step, value, theta = better(checks.seen, key=lambda one: one[1])
        worst = (min if METRICS[name].higher else max)(checks.seen, key=lambda one: one[1])
        assert step < 4 and worst[0] != step, "the direction counts"
        assert torch.equal(flat(result.theta), theta) and result.validation == value
        lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
        assert [line[f"validation_{name}"] for line in lines] == [one[1] for one in checks.seen]
        assert all(line["metric"] == METRICS[name].as_dict() for line in lines)
        status = json.loads((tmp_path / "status.json").read_text())
        assert status["metrics"][0]["name"] == name and status[f"{name}_validation"] == value
        assert {metric["name"] for metric in status["metrics"]} == set(METRICS)
        assert all(status[f"{other}_after"] is not None for other in METRICS)
        history = RunHistory.read(tmp_path)
        assert history.metric.name == name and history.validated(history.metric) == value
        assert METRICS[name].label in (tmp_path / "report.html").read_text()

    @pytest.mark.parametrize(
        ("name", "size", "sentence"),
        [("psrn", 16, "did you mean 'psnr'"), ("ssim", 10, "SSIM needs images of at least 11×11 pixels")],
    )
    def test_a_metric_that_cannot_decide_is_refused(self, name: str, size: int, sentence: str) -> None:
        data = {"name": "dead-leaves", "count": 8, "size": size}
        with pytest.raises(RecipeError, match=f"validation.metric: .*{sentence}"):
            assemble(recipe(data=data, validation={"count": 2, "metric": name}))

    def test_without_held_out_images_the_last_is_kept(self) -> None:
        result = run(recipe(validation={"count": 0}))
        assert result.chosen == "last" and result.validation is None
        assert torch.equal(flat(result.theta), flat(result.last))

    @pytest.mark.parametrize("patience", [1, 2])
    def test_early_stopping_waits_for_as_many_checks_as_said(self, patience: int) -> None:
        checks = Checks()
        settings = WORSENING | {
            "validation": {"count": 2, "checks": 8, "patience": patience},
            "budget": {"steps": 8},
        }
        result = run(recipe(**settings), listeners=[checks])
        assert result.status.startswith("stopped early")
        best = max(range(len(checks.seen)), key=lambda i: checks.seen[i][1])
        assert len(checks.seen) - 1 - best == patience
        assert result.steps < 8

    def test_there_are_as_many_checks_as_asked_for_and_one_at_the_start(self) -> None:
        checks = Checks()
        settings = {"validation": {"count": 1, "checks": 22}, "budget": {"steps": 44}}
        run(recipe(**settings, regularizer={"name": "tv"}, evaluation=None), listeners=[checks])
        assert len(checks.seen) == 23

    def test_the_evaluation_images_are_looked_at_when_asked_but_decide_nothing(self, tmp_path: Path) -> None:
        asked = {"count": 2, "checks": 4, "evaluation": True}
        plain, watched = run(recipe()), run(recipe(validation=asked), out=tmp_path)
        assert torch.equal(flat(plain.theta), flat(watched.theta)) and plain.chosen == watched.chosen
        lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert (
            lines[0]["computations"] == 0 and watched.initial is not None and watched.evaluation is not None
        )
        assert lines[0]["evaluation_psnr"] == pytest.approx(watched.initial.mean(), abs=1e-9)
        best = max(lines, key=lambda line: line["validation_psnr"])
        assert best["evaluation_psnr"] == pytest.approx(watched.evaluation.mean(), abs=1e-9)
        assert watched.history[-1]["evaluation_psnr"] == lines[-1]["evaluation_psnr"]
        assert len(list((tmp_path / "thetas").iterdir())) == 5
        kept = Model.load(tmp_path / "thetas" / f"{best['step']:06d}.safetensors")
        assert torch.equal(flat(kept.theta), flat(watched.theta))

    def test_checks_take_no_training_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def slow(*args: Any, **options: Any) -> Evaluation:
            time.sleep(0.3)
            return evaluate_tasks(*args, **options)

        monkeypatch.setattr("bltoolbox.training.experiment.evaluate_tasks", slow)
        began = time.perf_counter()
        result = run(recipe(evaluation=None))
        assert time.perf_counter() - began - result.seconds > 5 * 0.3


class TestBudget:
    def test_steps(self) -> None:
        assert run(recipe(budget={"steps": 3}, evaluation=None)).steps == 3

    def test_computations_are_exceeded_by_one_oracle_call_at_most(self) -> None:
        result = run(recipe(budget={"computations": 80}, evaluation=None))
        spent = [0, *(record["computations"] for record in result.history)]
        assert spent[-2] < 80 <= spent[-1] == result.cost.computations

    def test_evaluation_is_no_part_of_the_computations(self) -> None:
        with_images, without = run(recipe()), run(recipe(evaluation=None))
        assert with_images.cost.computations == without.cost.computations
        assert without.evaluation is None and without.as_dict()["psnr_after"] is None


class TestInitialTheta:
    def test_a_run_starts_from_a_saved_theta(self, tmp_path: Path) -> None:
        first = run(recipe(evaluation=None))
        first.model.save(tmp_path / "first.safetensors")
        checks = Checks()
        second = recipe(
            init=str(tmp_path / "first.safetensors"), seed=1, budget={"steps": 1}, evaluation=None
        )
        run(second, listeners=[checks])
        assert torch.equal(checks.seen[0][2], flat(first.theta))

    @pytest.mark.parametrize("other", [{"filters": 3}, {"kernel_size": 4}, {"smoothing": "per-filter"}])
    def test_a_theta_of_another_shape_is_refused(self, other: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "theta.safetensors"
        assemble(recipe()).model(assemble(recipe()).theta).save(path)
        changed = SETTINGS["regularizer"] | other
        with pytest.raises(RecipeError, match=r"init: .*theta\.safetensors cannot be used: it has"):
            run(recipe(init=str(path), regularizer=changed), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    path = tmp_path_factory.mktemp("run") / "one"
    with drawn():
        return path, run(recipe(), out=path)


class TestRunDirectory:
    def test_it_holds_everything(self, finished: tuple[Path, RunResult]) -> None:
        path, result = finished
        names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert names >= {
            "recipe.yaml",
            "resolved.yaml",
            "metrics.jsonl",
            "timings.jsonl",
            "status.json",
            "env.json",
            "log.txt",
            "theta.safetensors",
            "checkpoints/best.safetensors",
            "checkpoints/last.safetensors",
            "images/restored.png",
            "images/curves.png",
            "images/filters.png",
        }
        assert result.run_dir == path
        assert not [name for name in names if "/." in f"/{name}"], "no half-written files are left"

    def test_the_resolved_recipe_reproduces_the_recipe(self, finished: tuple[Path, RunResult]) -> None:
        path, _ = finished
        assert load_recipe(path / "resolved.yaml") == recipe()
        assert yaml.safe_load((path / "resolved.yaml").read_text())["regularizer"]["boundary"]

    def test_metrics_have_one_line_a_step_and_a_monotone_cost(self, finished: tuple[Path, RunResult]) -> None:
        path, result = finished
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert lines == result.history
        spent = [line["computations"] for line in lines]
        assert spent == sorted(spent) and spent[0] > 0
        assert all(
            {"loss", "step_size", "tol", "gradient_norm", "validation_psnr"} <= set(line) for line in lines
        )
        timings = [json.loads(line) for line in (path / "timings.jsonl").read_text().splitlines()]
        assert [line["step"] for line in timings] == [1, 2, 3, 4]

    def test_status_is_the_summary(self, finished: tuple[Path, RunResult]) -> None:
        path, result = finished
        status = json.loads((path / "status.json").read_text())
        expected = result.as_dict()
        assert {key: status[key] for key in expected} == expected

    def test_a_directory_that_is_not_empty_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(BltError, match="not empty"):
            run(recipe(), out=tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("method", ["isgd", "maid"])
def test_same_seed_same_bits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: [])
    changes: dict[str, Any] = {"budget": {"steps": 3}, "evaluation": None}
    if method == "maid":
        changes |= {"upper_optimizer": {"name": "maid", "tol": 0.1}, "sampler": "full"}
    results = [
        run(recipe(seed=seed, **changes), out=tmp_path / name)
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    for part in ("theta", "last"):
        first, again, other = (flat(getattr(result, part)) for result in results)
        assert torch.equal(first, again) and not torch.equal(first, other)
    first, again, other = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in "abc")
    assert first == again != other


class TestRestoring:
    def test_a_run_directory_a_file_and_the_result_restore_alike(
        self, finished: tuple[Path, RunResult]
    ) -> None:
        path, result = finished
        y = smooth_images(1, (3, 18, 22))[0] + 0.1 * normal(3, 18, 22, dtype=torch.float32)
        restored = result.solve(y)
        for source in (path, path / "theta.safetensors", str(path), Model.load(path), result.model):
            assert torch.equal(solve(y, source), restored)

    def test_any_shape_and_kind_of_image(self, finished: tuple[Path, RunResult]) -> None:
        model = Model.load(finished[0])
        batch = smooth_images(3, (3, 13, 21)) + 0.1 * normal(3, 3, 13, 21, dtype=torch.float32)
        x = model.solve(batch)
        assert x.shape == batch.shape and x.dtype == torch.float32
        for i in range(3):
            torch.testing.assert_close(model.solve(batch[i]), x[i], rtol=0, atol=1e-6)
        arrays = [batch.numpy(), batch.double().numpy(), np.flip(batch.numpy()[::-1].copy(), 0)]
        arrays[0].setflags(write=False)
        for array in arrays:
            found = model.solve(array)
            assert found.numpy().dtype == array.dtype
            torch.testing.assert_close(found.float(), x, rtol=0, atol=1e-6)

    def test_the_result_minimises_the_energy(self, finished: tuple[Path, RunResult]) -> None:
        model = Model.load(finished[0])
        y = smooth_images(2, (3, 13, 21)) + 0.1 * normal(2, 3, 13, 21, dtype=torch.float32)
        x = model.solve(y, tol=1e-3)
        lower = model.problem.at(model.theta, (3, 13, 21)).on(y)
        assert (lower.residual(x) <= 1.1e-3).all()

    @pytest.mark.parametrize("shape", [(16, 16), (1, 1, 3, 16, 16), (3, 2, 16)])
    def test_what_is_no_image_is_refused(
        self, finished: tuple[Path, RunResult], shape: tuple[int, ...]
    ) -> None:
        with pytest.raises(BltError):
            Model.load(finished[0]).solve(torch.zeros(shape))

    def test_a_file_without_theta_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "theta.safetensors").write_bytes(b"not a file of tensors")
        with pytest.raises(BltError, match="not a readable"):
            read_theta(tmp_path)
        with pytest.raises(BltError, match="no such"):
            read_theta(tmp_path / "nowhere")


class TestEvaluation:
    def test_it_equals_solving_by_hand_from_a_cold_start(self, finished: tuple[Path, RunResult]) -> None:
        _, result = finished
        experiment = assemble(recipe())
        samples = experiment.problem.samples["evaluation"]
        assert result.evaluation is not None
        for i in range(3):
            sample = samples.batch([i])
            x_true, y = sample.truth, sample.y
            assert x_true is not None
            lower = experiment.problem.at(result.theta, samples.shape).on(y)
            x = solve_lower(experiment.oracle.solver, lower, y, 1e-4, limit=2000).x
            by_hand = measure([METRICS["psnr"]], x, x_true)["psnr"][0]
            # Both are within the evaluation tolerance 1e-2 of the same minimiser.
            assert result.evaluation.after["psnr"][i] == pytest.approx(by_hand, abs=0.02)
            assert result.evaluation.before["psnr"][i] == pytest.approx(
                measure([METRICS["psnr"]], y, x_true)["psnr"][0], abs=1e-5
            )
        assert result.evaluation.mean() == pytest.approx(sum(result.evaluation.after["psnr"]) / 3)

    def test_psnr_is_that_of_scikit_image_after_clipping(self) -> None:
        x_true, x = smooth_images(4), smooth_images(4) + 0.3 * normal(4, 3, 12, 14, dtype=torch.float32)
        for value, a, b in zip(
            measure([METRICS["psnr"]], x, x_true)["psnr"], x_true.numpy(), x.clamp(0, 1).numpy(), strict=True
        ):
            expected = peak_signal_noise_ratio(a.astype(np.float64), b.astype(np.float64), data_range=1)
            assert value == pytest.approx(expected, abs=1e-6)


def test_training_improves_the_held_out_images(finished: tuple[Path, RunResult]) -> None:
    _, result = finished
    losses: list[Mapping[str, Any]] = result.history
    first, last = losses[0]["validation_psnr"], losses[-1]["validation_psnr"]
    assert last > first
