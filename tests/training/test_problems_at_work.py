"""A problem without images through everything that a run passes: recipe, run directory, resume, ranks, commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Call, caller
from processes import run_on

from bltoolbox import Model, load_recipe, resume, run
from bltoolbox.config.recipe import Recipe, parse_recipe, recipe_from_dict
from bltoolbox.errors import BltError, NumericalError, RecipeError, UsageError
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.model import load_trained
from bltoolbox.restoration.theta_file import read_theta
from bltoolbox.restoration.trained import Trained
from bltoolbox.training.assemble import assemble

OPTIONS = {
    "tasks": 6,
    "validation_tasks": 3,
    "test_tasks": 4,
    "features": 6,
    "width": 2,
    "support": 5,
    "query": 6,
}


def few_shot(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "problem": {"name": "few-shot", "blocks": 2} | OPTIONS,
        "dtype": "float64",
        "sampler": {"name": "epoch", "size": 3},
        "lower_solver": "lbfgs",
        "upper_optimizer": {"name": "iadam", "step": 3e-2, "tol": 1e-3},
        "validation": {"checks": 3, "evaluation": True},
        "checkpoint": {"every": 0, "keep_finished": True},
        "budget": {"steps": 6},
        "chunk": 2,
    }
    return recipe_from_dict(settings | changes)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("problem") / "run"
    run(few_shot(), out=out)
    return out


@pytest.fixture
def blt(capfd: pytest.CaptureFixture[str]) -> Call:
    return caller("", capfd)


class TestRecipes:
    RIDGE = "problem: ridge\nbudget: {steps: 1}\n"

    @pytest.mark.parametrize(
        "section",
        [
            "data: dead-leaves",
            "evaluation: photos",
            "operator: blur",
            "noise: 0.1",
            "data_term: huber",
            "regularizer: tv",
            "upper_loss: ssim",
            "baseline: tv",
            "constraint: box",
            "strong_convexity: 0.1",
            "color: gray",
            "freeze: [regularizer]",
            "workers: 2",
        ],
    )
    def test_a_foreign_section_is_refused_in_a_sentence_that_names_both(self, section: str) -> None:
        key = section.partition(":")[0]
        with pytest.raises(RecipeError) as refused:
            parse_recipe(f"{self.RIDGE}{section}\n")
        (problem,) = refused.value.problems
        assert problem.line == 3
        for part in (f"{key}: a section of problem 'variational'", "problem 'ridge' does not have"):
            assert part in problem.message

    def test_held_out_images_are_foreign_too_but_other_checks_are_not(self) -> None:
        with pytest.raises(
            RecipeError, match=r"validation\.count: .*'variational'.*'ridge' has its own tasks"
        ):
            parse_recipe(f"{self.RIDGE}validation: {{count: 3}}\n")
        found = parse_recipe(f"{self.RIDGE}validation: {{checks: 3}}\n")
        assert (found.validation.checks, found.validation.metric) == (3, "mse")

    @pytest.mark.parametrize(
        ("problem", "metric", "sentence"),
        [
            ("ridge", "psnr", "no metric 'psnr'; choose from mse, r2, loss"),
            ("logistic-regression", "acuracy", "did you mean 'accuracy'"),
        ],
    )
    def test_metrics_are_those_of_the_problem(self, problem: str, metric: str, sentence: str) -> None:
        with pytest.raises(RecipeError, match=sentence):
            parse_recipe(f"problem: {problem}\nbudget: {{steps: 1}}\nvalidation: {{metric: {metric}}}\n")

    def test_the_resolved_recipe_has_no_image_sections_and_loads_to_the_same(self) -> None:
        found = few_shot()
        again = parse_recipe(found.to_yaml())
        assert again == found and not found.of_images
        assert not {"data", "noise", "operator", "regularizer", "color"} & set(found.to_dict())
        assert repr(found).startswith("Recipe('recipe': few-shot, lbfgs")

    def test_the_default_problem_may_be_written_out(self) -> None:
        text = "data: dead-leaves\nregularizer: tv\nbudget: {steps: 1}\n"
        assert parse_recipe(text) == parse_recipe(f"problem: variational\n{text}")
        assert parse_recipe(text).validation.metric == "psnr"

    def test_data_from_python_are_refused(self) -> None:
        with pytest.raises(RecipeError, match="data: a section of problem 'variational'"):
            run(few_shot(), data=torch.zeros(2, 1, 8, 8))


class TestRuns:
    def test_records_name_tasks_and_the_metrics_of_the_problem(self, finished: Path) -> None:
        status = json.loads((finished / "status.json").read_text())
        assert [metric["name"] for metric in status["metrics"]] == ["mse", "r2"]
        assert status["mse_after"] < status["mse_initial"] and status["r2_after"] > status["r2_initial"]
        assert "6 training tasks" in (finished / "log.txt").read_text()
        checks = lines(finished / "checks.jsonl")
        assert all(check["metric"]["name"] == "mse" and not check["metric"]["higher"] for check in checks)
        best = min(check["validation_mse"] for check in checks)
        assert status["mse_validation"] == pytest.approx(best)
        assert not list((finished / "images").glob("evaluation*"))

    def test_the_report_has_curves_and_no_pictures(self, finished: Path) -> None:
        page = (finished / "report.html").read_text(encoding="utf-8")
        assert "validation tasks" in page and "few-shot" in page and "mean over 4 evaluation tasks" in page
        data = json.loads(
            page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
        )
        (one,) = data["runs"]
        assert one["scenes"] == [] and one["learned"]["filters"] == [] and one["learned"]["maps"] == []
        assert "cannot be shown" not in page and "Measured" not in page

    def test_theta_loads_and_is_not_a_model_of_images(self, finished: Path, tmp_path: Path) -> None:
        trained = load_trained(finished)
        assert (
            type(trained) is Trained and trained.size == 13 and "13 parameters of few-shot" in trained.learned
        )
        trained.save(tmp_path / "copy.safetensors")
        copied, metadata = read_theta(tmp_path / "copy.safetensors")
        assert all(torch.equal(copied[name], value) for name, value in trained.theta.items())
        assert set(metadata) == {"bltoolbox", "recipe"}
        with pytest.raises(UsageError, match="problem 'few-shot', which has no images"):
            Model.load(finished)

    def test_a_run_begins_where_another_ended(self, finished: Path) -> None:
        trained, result = load_trained(finished), run(few_shot(init=str(finished), budget={"steps": 1}))
        at_start = run(few_shot(budget={"steps": 1}))
        assert result.initial is not None and at_start.initial is not None
        assert result.initial.mean() < at_start.initial.mean()
        with pytest.raises(RecipeError, match=r"init: the θ of .* cannot be used"):
            run(few_shot(init=str(finished), problem={"name": "few-shot", "width": 3}))
        assert trained.find_flaw(trained.theta, None) is None

    def test_a_theta_out_of_range_is_found(self) -> None:
        experiment = assemble(few_shot())
        assert experiment.find_flaw(experiment.theta) is None
        far = experiment.theta["log_weight"].new_tensor(1e4)
        flaw = experiment.find_flaw(experiment.theta | {"log_weight": far})
        assert flaw == "the energy of the first task is not finite there, so θ is out of range"
        with pytest.raises(NumericalError, match=r"the step leads to .*; use a smaller step"):
            experiment.require_usable(experiment.theta | {"log_weight": far}, "the step leads to such a θ")

    def test_resume_is_exact(self, finished: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        run(few_shot(budget={"steps": 3}), out=out)
        resume(out, ["budget.steps=6"])
        for name in ("theta.safetensors", "checkpoints/last.safetensors"):
            one, other = (read_theta(folder / name)[0] for folder in (out, finished))
            assert all(torch.equal(value, other[key]) for key, value in one.items())
        # The checks are spread over the budget, and only their entries differ.
        apart = {"validation_mse", "evaluation_mse", "evaluation_iterations"}
        kept = [
            [
                {key: value for key, value in line.items() if key not in apart}
                for line in lines(folder / "metrics.jsonl")
            ]
            for folder in (out, finished)
        ]
        assert kept[0] == kept[1]

    def test_other_tasks_are_not_resumed(self, tmp_path: Path) -> None:
        import numpy as np

        for name, values in (("x", np.random.default_rng(0).normal(size=(40, 3))), ("y", np.arange(40) % 2)):
            np.save(tmp_path / f"{name}.npy", values)
        data = {"inputs": str(tmp_path / "x.npy"), "targets": str(tmp_path / "y.npy")}
        problem = {"name": "logistic-regression", "data": data}
        one = few_shot(problem=problem, sampler="full", budget={"steps": 1})
        run(one, out=tmp_path / "run")
        np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(40, 3)))
        with pytest.raises(BltError, match=r"the training tasks are not those .*: their data have changed"):
            resume(tmp_path / "run", ["budget.steps=2"])

    def test_stochastic_methods_resume_exactly_too(self, tmp_path: Path) -> None:
        settings = {"hypergradient": "saba", "upper_optimizer": {"name": "isgd", "step": 1e-3, "tol": 1e-2}}
        whole = run(few_shot(**settings))
        run(few_shot(budget={"steps": 3}, **settings), out=tmp_path / "run")
        again = resume(tmp_path / "run", ["budget.steps=6"])
        assert all(torch.equal(value, again.last[key]) for key, value in whole.last.items())

    def test_two_ranks_equal_one(
        self, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ReportWriter, "finished", lambda self, result: None)
        run_on(tmp_path, 2, few_shot(), tmp_path / "two")
        one, two = (read_theta(folder / "theta.safetensors")[0] for folder in (finished, tmp_path / "two"))
        assert all(torch.allclose(value, two[key], rtol=1e-12, atol=1e-14) for key, value in one.items())
        alone, both = (lines(folder / "metrics.jsonl") for folder in (finished, tmp_path / "two"))
        assert [line["computations"] for line in alone] == [line["computations"] for line in both]
        first, second = (json.loads((f / "status.json").read_text()) for f in (finished, tmp_path / "two"))
        assert second["mse_after"] == pytest.approx(first["mse_after"], rel=1e-9)


class TestCommands:
    def test_evaluate_measures_the_test_tasks(self, finished: Path, blt: Call) -> None:
        found = json.loads(blt("evaluate", str(finished), "--json").stdout)
        status = json.loads((finished / "status.json").read_text())
        assert found["mse"] == pytest.approx(status["mse_after"], rel=1e-6)
        assert [task["task"] for task in found["tasks"]] == [f"task {k + 1}" for k in range(4)]
        assert "r2" in found and "images" not in found
        more = json.loads(
            blt("evaluate", str(finished), "problem.test_tasks=7", "--metric", "loss", "--json").stdout
        )
        assert len(more["tasks"]) == 7 and set(more) >= {"loss", "loss_before"}
        assert "task 4" in blt("evaluate", str(finished)).stdout

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--metric", "psnr"), "there is no metric 'psnr'; choose from mse, r2, loss"),
            (("problem=ridge",), "the problem cannot be overridden: θ was trained for 'few-shot'"),
            (("problem.width=3",), "θ does not fit these options"),
            (("problem.test_tasks=0",), "has no evaluation tasks"),
        ],
    )
    def test_evaluate_refuses_in_a_sentence(
        self, finished: Path, blt: Call, arguments: tuple[str, ...], sentence: str
    ) -> None:
        done = blt("evaluate", str(finished), *arguments)
        assert done.returncode == 2 and sentence in done.stderr

    def test_apply_refuses_in_a_sentence(self, finished: Path, blt: Call, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(b"")
        done = blt("apply", str(finished), str(tmp_path / "a.png"))
        assert done.returncode == 2
        assert (
            "problem 'few-shot', which has no images to restore; measure it with blt evaluate" in done.stderr
        )

    def test_report_compare_and_watch(self, finished: Path, blt: Call, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        done = blt("report", str(finished), "-o", str(page))
        assert done.returncode == 0, done.stderr
        assert "cannot be shown" not in done.stderr
        done = blt("compare", str(finished), "-o", str(tmp_path / "figure.png"))
        assert done.returncode == 0 and "MSE" in done.stdout, done.stderr
        done = blt("compare", str(finished), "-o", str(tmp_path / "other.png"), "--at", "100")
        assert done.returncode == 2 and "problem 'few-shot' has no images to show; omit --at" in done.stderr
        done = blt("watch", str(finished))
        assert done.returncode == 0 and "MSE" in done.stdout

    def test_summary_names_tasks(self, blt: Call, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_text(few_shot(budget={"steps": 1}).to_yaml())
        done = blt("run", str(tmp_path / "r.yaml"), "-q", "-o", str(tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        assert "MSE on the evaluation tasks" in done.stdout and "start" in done.stdout
        assert "13 parameters of few-shot" in done.stdout and "measured" not in done.stdout

    def test_sweep_and_check(self, blt: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("r.yaml").write_text(few_shot(budget={"steps": 1}).to_yaml())
        done = blt("sweep", "r.yaml", "problem.width=1", "-o", "cells", "--json")
        assert done.returncode == 0, done.stderr
        (theta,) = Path("cells").glob("*/theta.safetensors")
        assert read_theta(theta)[0]["representation"].shape == (6, 1)
        done = blt("check", "r.yaml")
        assert done.returncode == 0 and "agrees with central differences" in done.stdout


ML = sorted((Path(__file__).parents[2] / "recipes" / "ml").glob("*.yaml"))


@pytest.mark.parametrize("path", ML, ids=lambda path: path.stem)
def test_the_shipped_recipes_learn(path: Path) -> None:
    """A few steps already improve what is learned from."""
    result = run(load_recipe(path, ["budget={steps: 8}", "validation.checks=1", "device=cpu"]))
    losses = [record["loss"] for record in result.history]
    assert sum(losses[-3:]) < sum(losses[:3])
