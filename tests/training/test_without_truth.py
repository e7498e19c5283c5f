"""Recorded measurements without true images: nothing that needs them is measured, shown or assumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bltoolbox.cli import main
from bltoolbox.config.names import theta_name
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import RecipeError
from bltoolbox.reports.figures import restored
from bltoolbox.reports.html.pictures import read_scenes
from bltoolbox.reports.notebook import evaluation_html, result_html
from bltoolbox.restoration.model import read_theta
from bltoolbox.testing import smooth_images
from bltoolbox.training.assemble import assemble

#: A loss of measurements alone, and data of a class that never has true images.
PLUGIN = """
from bltoolbox.plugin import Component, Data, Upper, UpperLoss, dot, hookimpl
import torch

BLT_API = 2


@hookimpl
def blt_components():
    return [
        Component("upper_loss", "residual", __name__ + ":Residual", "||x - y||^2 of shifted measurements."),
        Component("data", "scans", __name__ + ":Scans", "Measurements alone."),
    ]


class Distance(Upper):
    convex, lipschitz, infimum = True, 2.0, 0.0

    def __init__(self, y):
        self.y = y

    def value(self, x):
        return dot((x - self.y).double(), (x - self.y).double())

    def gradient(self, x):
        return 2 * (x - self.y)

    def take(self, index):
        return Distance(self.y[index])


class Residual(UpperLoss):
    needs_truth = False

    def bind(self, sample, forward):
        assert sample.truth is None
        return Distance(sample.y.roll(1, -1))


class Scans(Data):
    def __len__(self):
        return 4

    def measured(self, ids):
        return torch.zeros(len(ids), 1, 12, 12)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    images = smooth_images(8, (1, 20, 22))
    noisy = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    np.save(folder / "low.npy", noisy.numpy())
    np.save(folder / "clean.npy", images.numpy())
    (folder / "losses.py").write_text(PLUGIN)
    (folder / "recipe.yaml").write_text(
        f"""
data: {{name: pairs, measured: {folder}/low.npy, count: 5}}
evaluation: {{name: pairs, measured: {folder}/low.npy, offset: 5}}
color: gray
regularizer: {{name: tikhonov}}
upper_loss: residual
sampler: {{size: 2}}
upper_optimizer: {{name: isgd, step: 1e-2, tol: 0.1}}
validation: {{count: 1, checks: 2, patience: 1}}
budget: {{steps: 4}}
device: cpu
"""
    )
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    out = folder / "run"
    with pytest.raises(SystemExit) as done:
        main(
            ["run", str(folder / "recipe.yaml"), "-o", str(out), "--plugin", str(folder / "losses.py"), "-q"]
        )
    assert done.value.code == 0
    return out


def call(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main([*words, "--plugin", str(folder / "losses.py")])
    said = capsys.readouterr()
    return int(done.value.code or 0), said.out, said.err


class TestRuns:
    def test_the_last_theta_is_kept(self, finished: Path) -> None:
        status = json.loads((finished / "status.json").read_text())
        assert status["finished"] and status["theta"] == "last" and status["steps"] == 4
        theta, last = (
            read_theta(finished / name)[0] for name in ("theta.safetensors", "checkpoints/last.safetensors")
        )
        assert all(torch.equal(theta[name], last[name]) for name in theta)
        first = read_theta(finished / theta_name(0))[0]
        assert not all(torch.equal(theta[name], first[name]) for name in theta)

    def test_no_figure_is_made_up(self, finished: Path) -> None:
        status = json.loads((finished / "status.json").read_text())
        figures = {key: value for key, value in status.items() if key.startswith(("psnr", "ssim", "nrmse"))}
        assert set(figures.values()) == {None}
        for line in (finished / "checks.jsonl").read_text().splitlines():
            check = json.loads(line)
            assert check["validation_psnr"] is None and check["best"] is False
        for line in (finished / "metrics.jsonl").read_text().splitlines():
            assert not any("psnr" in key for key in json.loads(line))

    def test_pictures_show_what_is_known(self, finished: Path) -> None:
        scenes = read_scenes(finished)
        assert len(scenes) == 3
        assert [one.key for one in scenes[0].variants] == ["measured", "learned"]
        assert all(not one.values for one in scenes[0].variants)
        assert (finished / "images" / "restored.png").is_file()
        assert "could not be written" not in (finished / "log.txt").read_text()

    def test_the_log_warns(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        registry = load_registry([folder / "losses.py"])
        recipe = recipe_from_dict(_settings(folder), registry=registry)
        assemble(recipe, registry)
        assert "PSNR of the held-out images cannot be measured without true images" in caplog.text
        assert "validation.metric: loss" in caplog.text

    def test_in_python(self, folder: Path) -> None:
        registry = load_registry([folder / "losses.py"])
        recipe = recipe_from_dict(_settings(folder), registry=registry)
        result = assemble(recipe, registry).run()
        evaluation = result.evaluation
        assert evaluation is not None and evaluation.metric is None and evaluation.metrics == ()
        assert (
            evaluation.mean() is None and evaluation.mean_before() is None and evaluation.mean("psnr") is None
        )
        assert repr(evaluation) == "Evaluation(3 images)"
        assert "PSNR" not in repr(result)
        assert all(image.x_true is None for image in evaluation.images)
        figure = restored(result)
        assert figure is not None and len(figure.axes) == 2 * 3
        assert "#5" in evaluation_html(evaluation) and "mean" not in evaluation_html(evaluation)
        assert "PSNR" not in result_html(result)


class TestChoosingByTheLoss:
    """With a loss that needs no truth, the metric may be that loss."""

    def settings(self, folder: Path, **sections: object) -> dict[str, object]:
        loss = {"name": "recorrupted", "sigma": 0.1}
        validation = {"count": 2, "checks": 2, "metric": "loss"}
        return _settings(folder, upper_loss=loss, validation=validation, **sections)

    def test_the_best_theta_is_kept(self, folder: Path) -> None:
        result = assemble(recipe_from_dict(self.settings(folder))).run()
        assert result.metric.name == "loss" and result.validation is not None
        assert result.evaluation is not None and [one.name for one in result.evaluation.metrics] == ["loss"]
        assert len(result.evaluation.after["loss"]) == 3
        assert all(image.x_true is None for image in result.evaluation.images)
        figures = result.as_dict()
        assert figures["loss_after"] == result.evaluation.mean() and "psnr_after" not in figures
        assert restored(result) is not None

    def test_a_baseline_is_tuned_by_it(self, folder: Path) -> None:
        result = assemble(recipe_from_dict(self.settings(folder, baseline={"name": "tv"}))).run()
        assert result.baseline is not None and result.baseline.mean("loss") is not None

    def test_a_loss_that_needs_truth_is_not_measured_without(self, folder: Path) -> None:
        """Trained with true images, and evaluated on data without."""
        pairs = {
            "name": "pairs",
            "measured": str(folder / "low.npy"),
            "clean": str(folder / "clean.npy"),
            "count": 5,
        }
        validation = {"count": 1, "metric": "loss", "evaluation": True}
        settings = _settings(folder, upper_loss="squared-error", data=pairs, validation=validation)
        result = assemble(recipe_from_dict(settings)).run()
        assert result.validation is not None
        assert result.evaluation is not None and result.evaluation.metrics == ()


class TestCommands:
    def test_summary(
        self, folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["run", str(folder / "recipe.yaml"), "-o", str(tmp_path / "run"), "budget.steps=1"]
        code, out, _ = call(words, folder, capsys)
        assert code == 0 and "status" in out and "PSNR" not in out and "nan" not in out.lower()

    @pytest.mark.parametrize("command", ["report", "compare", "watch"])
    def test_reading_the_run(
        self, command: str, folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        more = {
            "report": ["-o", str(tmp_path / "a.html")],
            "compare": ["-o", str(tmp_path / "a.png")],
            "watch": ["--once"],
        }
        with pytest.raises(SystemExit) as done:
            plugin = ["--plugin", str(folder / "losses.py")] if command != "watch" else []
            main([command, str(finished), *more[command], *plugin])
        said = capsys.readouterr()
        assert not done.value.code, said.err
        assert not re.search(r"\bnan\b", said.out + said.err, re.IGNORECASE)

    def test_a_sheet_of_images(
        self, folder: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, _, said = call(
            ["compare", str(finished), "--at", "1e9", "-o", str(tmp_path / "a.png")], folder, capsys
        )
        assert code == 0, said

    def test_evaluate_says_why_not(
        self, folder: Path, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, said = call(["evaluate", str(finished)], folder, capsys)
        assert code == 2 and not out and "true images of the evaluation data are not known" in said

    def test_evaluate_on_true_images(
        self, folder: Path, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pairs = (
            f"evaluation={{name: pairs, measured: {folder}/low.npy, clean: {folder}/clean.npy, offset: 5}}"
        )
        code, out, _ = call(["evaluate", str(finished), pairs, "--json"], folder, capsys)
        assert code == 0 and json.loads(out)["psnr"] > 10


def _settings(folder: Path, **sections: object) -> dict[str, object]:
    return {
        "data": {"name": "pairs", "measured": str(folder / "low.npy"), "count": 5},
        "evaluation": {"name": "pairs", "measured": str(folder / "low.npy"), "offset": 5},
        "color": "gray",
        "regularizer": {"name": "tikhonov"},
        "upper_loss": {"name": "residual"},
        "sampler": {"size": 2},
        "validation": {"count": 1, "checks": 2},
        "budget": {"steps": 2},
        "device": "cpu",
        **sections,
    }


class TestRefusals:
    def test_a_loss_that_needs_truth_at_assembly(self, folder: Path) -> None:
        registry = load_registry([folder / "losses.py"])
        recipe = recipe_from_dict(_settings(folder, upper_loss="squared-error"), registry=registry)
        with pytest.raises(RecipeError) as caught:
            assemble(recipe, registry)
        said = str(caught.value)
        assert "'squared-error' compares with true images, which data 'pairs' does not have; use " in said
        assert "residual" in said and "or give true images" in said

    def test_a_loss_that_needs_truth_at_validation(self, folder: Path) -> None:
        registry = load_registry([folder / "losses.py"])
        settings = _settings(folder, upper_loss="squared-error", data={"name": "scans"})
        with pytest.raises(
            RecipeError, match="'squared-error' compares with true images, which data 'scans'"
        ):
            recipe_from_dict(settings, registry=registry)
        recipe_from_dict(_settings(folder, data={"name": "scans"}), registry=registry)

    def test_a_baseline_is_tuned_on_truth(self, folder: Path) -> None:
        registry = load_registry([folder / "losses.py"])
        recipe = recipe_from_dict(_settings(folder, baseline={"name": "tv"}), registry=registry)
        with pytest.raises(
            RecipeError,
            match="baseline: a baseline is tuned by PSNR, which cannot be measured without true images",
        ):
            assemble(recipe, registry)
