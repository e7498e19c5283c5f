"""The loss as a metric: measured as in training, and everything else of the measurements as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.upper_losses.recorrupted import Recorrupted
from blt_builtins.upper_losses.squared_error import SquaredError
from blt_builtins.upper_losses.whiteness import Whiteness
from bltoolbox import load_recipe, run
from bltoolbox.bilevel.records import Theta
from bltoolbox.errors import UsageError
from bltoolbox.plugin import Listener, UpperLoss
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import evaluate, solve_cold
from bltoolbox.restoration.image_upper import BoundOperator
from bltoolbox.restoration.metrics import LOSS, METRICS, measure, pick, pick_listed
from bltoolbox.restoration.results import Check
from bltoolbox.restoration.roles import Sample
from bltoolbox.restoration.variational import Variational
from bltoolbox.runs.history import RunHistory
from bltoolbox.testing import Images, smooth_images

SHAPE = (1, 14, 12)
THETA = {f"regularizer.{name}": torch.full((1,), -3.0).double() for name in ("log_weight", "log_smoothing")}
TOL, LIMIT = 1e-7, 500


def bench(loss: UpperLoss, **options: Any) -> tuple[Variational, Samples]:
    operator = Blur(size=3)
    problem = Variational(operator, TotalVariation(), LeastSquares(), loss, strong_convexity=0.1)
    images = Images(smooth_images(3, SHAPE))
    samples = Samples(images, operator, Gaussian(0.05), loss=loss, dtype=torch.float64, **options)
    return problem, samples


def restored(problem: Variational, sample: Sample) -> tuple[Tensor, Tensor]:
    lower = problem.at(THETA, SHAPE).on(sample.y, sample.context)
    return lower.start(), solve_cold(NewtonCG(), lower, TOL, LIMIT).x


def loss_of(problem: Variational, sample: Sample, x: Tensor) -> list[float]:
    lower = problem.at(THETA, SHAPE).on(sample.y, sample.context)
    return problem.upper_loss.bind(sample, BoundOperator(lower)).value(x).tolist()


@pytest.mark.parametrize("loss", [SquaredError(2.0), Whiteness()], ids=["squared-error", "whiteness"])
def test_a_loss_that_does_not_split_is_measured_on_what_is_restored(loss: UpperLoss) -> None:
    problem, samples = bench(loss)
    found = evaluate(problem, THETA, samples, NewtonCG(), tol=TOL, chunk=2, metrics=("loss", "psnr"))
    sample = samples.batch(range(3))
    start, x = restored(problem, sample)
    assert sample.truth is not None
    assert found.metric is LOSS
    assert found.before["loss"] == pytest.approx(loss_of(problem, sample, start))
    assert found.after["loss"] == pytest.approx(loss_of(problem, sample, x), rel=1e-5)
    assert found.after["psnr"] == pytest.approx(measure(pick(["psnr"]), x, sample.truth)["psnr"], rel=1e-6)


def test_a_loss_that_splits_is_measured_as_in_training_and_psnr_as_in_use() -> None:
    problem, samples = bench(Recorrupted(0.75))
    found = evaluate(problem, THETA, samples, NewtonCG(), tol=TOL, metrics=("loss", "psnr"), keep=1)
    split, whole = samples.as_in_training.batch(range(3)), samples.batch(range(3))
    start, x = restored(problem, split)
    assert found.before["loss"] == pytest.approx(loss_of(problem, split, start))
    assert found.after["loss"] == pytest.approx(loss_of(problem, split, x), rel=1e-6)
    start, x = restored(problem.restoring, whole)
    assert whole.truth is not None
    assert found.before["psnr"] == pytest.approx(measure(pick(["psnr"]), start, whole.truth)["psnr"])
    assert found.after["psnr"] == pytest.approx(measure(pick(["psnr"]), x, whole.truth)["psnr"], rel=1e-6)
    torch.testing.assert_close(found.images[0].x, x[0], rtol=0, atol=1e-5)
    alone = evaluate(problem, THETA, samples, NewtonCG(), tol=TOL, metrics=("loss",))
    assert alone.after["loss"] == found.after["loss"]
    assert alone.iterations < found.iterations, "nothing else is restored"


def test_training_samples_are_restored_as_they_are_trained_on() -> None:
    """A baseline is tuned on them."""
    problem, samples = bench(Recorrupted(0.75), training=True)
    found = evaluate(problem, THETA, samples, NewtonCG(), tol=TOL, metrics=("psnr",))
    sample = samples.batch(range(3))
    _, x = restored(problem, sample)
    assert sample.truth is not None
    assert found.after["psnr"] == pytest.approx(measure(pick(["psnr"]), x, sample.truth)["psnr"], rel=1e-6)


def test_the_loss_is_a_metric_of_problems_and_not_of_pictures() -> None:
    assert LOSS.name not in METRICS
    assert not LOSS.higher and not LOSS.needs_truth
    with pytest.raises(UsageError, match="there is no metric 'loss'; choose from psnr, ssim, nrmse"):
        pick_listed("psnr,loss")


class Checks(Listener):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float | None, Tensor]] = []

    def checked(self, check: Check, theta: Theta) -> None:
        self.seen.append((check.step, check.validation, torch.cat([one.flatten() for one in theta.values()])))


@pytest.mark.parametrize("loss", ["squared-error", "recorrupted", "whiteness"])
def test_a_run_keeps_the_theta_of_least_loss(loss: str, tmp_path: Path) -> None:
    checks = Checks()
    overrides = [
        f"upper_loss={loss}",
        "data={name: dead-leaves, count: 6, size: 16}",
        "evaluation={name: dead-leaves, count: 2, size: 16, seed: 5}",
        "baseline=null",
        "sampler={name: epoch, size: 2}",
        "validation={count: 2, checks: 3, metric: loss}",
        "upper_optimizer={name: isgd, step: 3, tol: 0.1}"
        if loss == "squared-error"
        else "upper_optimizer=isgd",
        "budget={steps: 3}",
    ]
    result = run(load_recipe("smoke", overrides), listeners=[checks], out=tmp_path)
    step, least, theta = min(checks.seen, key=lambda one: math.inf if one[1] is None else one[1])
    assert result.validation == least
    assert torch.equal(torch.cat([one.flatten() for one in result.theta.values()]), theta)
    assert result.chosen == ("last" if step == 3 else f"best (step {step})")
    status = json.loads((tmp_path / "status.json").read_text())
    assert [metric["name"] for metric in status["metrics"]] == ["loss", "psnr", "ssim", "nrmse"]
    assert status["loss_validation"] == least and status["psnr_after"] is not None
    assert RunHistory.read(tmp_path).metric.as_dict() == LOSS.as_dict()
    assert "Validation Loss" in (tmp_path / "report.html").read_text()
