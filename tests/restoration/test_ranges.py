"""Images with another range of values than [0, 1]: counts, Hounsfield units."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import metrics as reference
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.regularizers.tikhonov import Tikhonov
from bltoolbox import Model, run
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.reports.figures import restored
from bltoolbox.reports.html.pictures import encode_png, read_scenes
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.evaluation import Evaluation, evaluate
from bltoolbox.restoration.metrics import METRICS, Range
from bltoolbox.restoration.model import encode, read_range, read_theta
from bltoolbox.restoration.roles import Data
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import Gain, smooth_images, variational

COUNTS: Range = (0.0, 4095.0)
HOUNSFIELD: Range = (-1000.0, 2000.0)
SHAPE = (1, 16, 18)


class Scaled(Data):
    """Images in [0, 1] and measurements that leave it, both mapped to a range."""

    def __init__(self, span: Range, count: int = 3) -> None:
        self.range = span
        self.images = smooth_images(count, SHAPE)
        noise = torch.randn(self.images.shape, generator=torch.Generator().manual_seed(0))
        self.noisy = self.images + 0.3 * noise

    def __len__(self) -> int:
        return len(self.images)

    def _mapped(self, images: Tensor) -> Tensor:
        low, high = self.range
        return low + (high - low) * images

    def clean(self, ids: Any) -> Tensor:
        return self._mapped(self.images[list(ids)])

    def measured(self, ids: Any) -> Tensor:
        return self._mapped(self.noisy[list(ids)])


def evaluated(span: Range, constraint: str = "none") -> tuple[Variational, Evaluation]:
    regularizer = Tikhonov()
    problem = replace(variational(Gain(), regularizer, constraint), range=span)  # type: ignore[arg-type]
    samples = Samples(Scaled(span), problem.operator, dtype=torch.float64)
    theta = join(regularizer=regularizer.init_params(SHAPE, torch.Generator()))
    found = evaluate(
        problem, theta, samples, AGD(), tol=1e-6, metrics=("psnr", "ssim", "nrmse"), keep=3, limit=5000
    )
    return problem, found


@pytest.mark.parametrize("span", [COUNTS, HOUNSFIELD])
@pytest.mark.parametrize("name", ["psnr", "ssim"])
def test_metrics_scale_by_the_range(span: Range, name: str) -> None:
    low, high = span
    rng = np.random.default_rng(0)
    x_true = rng.uniform(low, high, (20, 24))
    x = (x_true + rng.normal(0, 0.1 * (high - low), x_true.shape)).clip(low, high)
    if name == "psnr":
        expected = reference.peak_signal_noise_ratio(x_true, x, data_range=high - low)
    else:
        options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
        _, similarity = reference.structural_similarity(
            x_true, x, data_range=high - low, full=True, **options
        )
        expected = similarity[5:-5, 5:-5].mean()
    assert METRICS[name].of(x, x_true, span) == pytest.approx(expected, rel=1e-8)
    beyond = np.where(x >= high, high + 1e4, x)
    assert METRICS[name].of(beyond, x_true, span) == METRICS[name].of(x, x_true, span)  # clipped to the range


def test_a_scaled_problem_has_the_same_metrics_and_cost() -> None:
    """A quadratic problem commutes with multiplication, so that only the units differ."""
    (_, unit), (_, counts) = evaluated((0.0, 1.0)), evaluated(COUNTS)
    assert counts.range == COUNTS
    assert counts.iterations == unit.iterations
    for name in METRICS:
        assert counts.before[name] == pytest.approx(unit.before[name], rel=1e-6)
        assert counts.after[name] == pytest.approx(unit.after[name], rel=1e-6)


@pytest.mark.parametrize("span", [COUNTS, HOUNSFIELD])
def test_the_box_is_the_range(span: Range) -> None:
    low, high = span
    problem, found = evaluated(span, "box")
    assert problem.bounds == span
    for image in found.images:
        assert low <= float(image.x.min()) and float(image.x.max()) <= high
    samples = Samples(Scaled(span), problem.operator, dtype=torch.float64)
    y = samples.batch([0]).y
    theta = join(regularizer=problem.regularizer.init_params(SHAPE, torch.Generator()))
    lower = problem.at(theta, SHAPE).on(y)
    # The objective is separable up to a linear map, and its minimiser over the box satisfies x = P(x − ∇h(x)).
    x = found.images[0].x[None]
    assert torch.allclose(lower.project(x - lower.gradient(x)), x, atol=1e-4 * (high - low))
    assert bool(((x <= low) | (x >= high)).any()), (
        "the noise leaves the range, so the constraint must be active"
    )


@pytest.mark.parametrize("span", [(0.0, 1.0), COUNTS, HOUNSFIELD])
def test_pictures_show_the_range_from_black_to_white(span: Range) -> None:
    low, high = span
    ramp = torch.linspace(low, high, 256, dtype=torch.float64).view(1, 1, 256)
    shown = np.asarray(Image.open(io.BytesIO(encode_png(ramp, span))))
    assert np.array_equal(shown[0], np.arange(256))
    beyond = torch.tensor([[[low - 5.0, high + 5.0, float("nan")]]])
    assert np.asarray(Image.open(io.BytesIO(encode_png(beyond, span)))).tolist() == [[0, 255, 0]]


def test_a_model_of_another_range_is_not_evaluated() -> None:
    problem, _ = evaluated(COUNTS)
    samples = Samples(Scaled(HOUNSFIELD), problem.operator, dtype=torch.float64)
    theta = join(regularizer=problem.regularizer.init_params(SHAPE, torch.Generator()))
    with pytest.raises(BltError, match="from 0 to 4095, but these have values from -1000 to 2000"):
        evaluate(problem, theta, samples, AGD(), tol=1e-3)


def recorded(folder: Path, span: Range, **sections: Any) -> Recipe:
    data = Scaled(span, 6)
    np.save(folder / "clean.npy", data.clean(range(6)).numpy())
    np.save(folder / "low.npy", data.measured(range(6)).numpy())
    pairs = {
        "name": "pairs",
        "measured": str(folder / "low.npy"),
        "clean": str(folder / "clean.npy"),
        "range": list(span),
    }
    settings = {
        "data": pairs | {"count": 4},
        "evaluation": pairs | {"offset": 4},
        "regularizer": {"name": "tikhonov"},
        "constraint": "box",
        "sampler": {"size": 2},
        "upper_optimizer": {"name": "isgd", "step": 1e-9, "tol": 0.1 * (span[1] - span[0])},
        "validation": {"count": 1, "checks": 1},
        "budget": {"steps": 2},
        "device": "cpu",
        "dtype": "float64",
    }
    return recipe_from_dict(settings | sections)


@pytest.mark.parametrize("span", [COUNTS, HOUNSFIELD])
def test_a_run_keeps_the_range(span: Range, tmp_path: Path) -> None:
    result = run(recorded(tmp_path, span), out=tmp_path / "run")
    assert result.evaluation is not None and result.evaluation.range == span
    model = Model.load(tmp_path / "run", "cpu")
    assert model.range == span == model.problem.bounds
    y = torch.from_numpy(np.load(tmp_path / "low.npy"))[4:].double()
    x = model.solve(y)
    assert torch.equal(x[0], result.evaluation.images[0].x)  # the same tolerance, in units of the range
    truth = np.load(tmp_path / "clean.npy")[4, 0].astype(np.float64)
    expected = METRICS["psnr"].of(x[0, 0].numpy(), truth, span)
    assert result.evaluation.after["psnr"][0] == pytest.approx(expected, rel=1e-10)

    scene = read_scenes(tmp_path / "run")[0]
    learned = next(one for one in scene.variants if one.key == "learned")
    shown = np.asarray(Image.open(io.BytesIO(learned.png))).astype(np.float64)
    gray = (x[0, 0].numpy() - span[0]) / (span[1] - span[0])
    assert np.abs(shown / 255 - gray.clip(0, 1)).max() <= 0.5 / 255 + 1e-9
    figure = restored(result)
    assert figure is not None
    drawn = figure.axes[0].images[0].get_array()
    assert drawn is not None and drawn.min() >= 0 and drawn.max() <= 1

    with pytest.raises(BltError, match=r"pictures have values from 0 to 1; use Model.solve"):
        model.restore(np.zeros((32, 32), np.uint8))


def test_evaluation_in_another_range_is_refused(tmp_path: Path) -> None:
    recipe = recorded(tmp_path, COUNTS)
    other = {**recipe.to_dict()["evaluation"], "range": [0, 65535]}
    with pytest.raises(RecipeError, match="set the same range for both"):
        run(recipe_from_dict(recipe.to_dict() | {"evaluation": other}))


def test_an_initial_theta_of_another_range_is_refused(tmp_path: Path) -> None:
    run(recorded(tmp_path, COUNTS), out=tmp_path / "run")
    recipe = recorded(tmp_path, HOUNSFIELD, init=str(tmp_path / "run" / "theta.safetensors"))
    with pytest.raises(RecipeError, match="is for images with values from 0 to 4095, but the data have"):
        run(recipe)


class TestThetaFiles:
    def test_the_range_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        theta = {"regularizer.log_weight": torch.zeros(1)}
        path = tmp_path / "theta.safetensors"
        path.write_bytes(encode(theta, recorded(tmp_path, HOUNSFIELD), HOUNSFIELD))
        assert read_range(read_theta(path)[1], path) == HOUNSFIELD

    def test_files_without_one_mean_the_unit_interval(self) -> None:
        assert read_range({}, "old.safetensors") == (0.0, 1.0)

    @pytest.mark.parametrize(
        "text", ["", "[1, 0]", "[0]", "[0, 1, 2]", "[NaN, 1]", "[0, Infinity]", '"ab"', "{}", "1"]
    )
    def test_a_damaged_range_is_refused(self, text: str) -> None:
        with pytest.raises(BltError, match="range of values is damaged"):
            read_range({"range": text}, "a.safetensors")
