"""An operator that differs from sample to sample: masks and transfer functions as context, end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import relative_error
from processes import on_ranks
from torch import Tensor

from bltoolbox import Model, resume, run
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Counter
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.distributed.ranks import Ranks
from bltoolbox.errors import BltError
from bltoolbox.reports.writer import ReportWriter
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.model import read_theta
from bltoolbox.testing import smooth_images
from bltoolbox.training.assemble import assemble

OPERATOR = '''
"""A x = mask ⊙ Re F⁻¹(H F x), with a mask and a transfer function H of each sample."""

import torch
from bltoolbox.plugin import Component, Operator, hookimpl

BLT_API = 2


@hookimpl
def blt_components():
    return [Component("operator", "scanner", __name__ + ":Scanner", "A mask and a blur of each sample.")]


class Scanner(Operator):
    def apply(self, x, theta, context):
        return torch.fft.ifft2(context["transfer"] * torch.fft.fft2(x)).real * context["mask"]

    def adjoint(self, y, theta, context):
        return torch.fft.ifft2(context["transfer"].conj() * torch.fft.fft2(y * context["mask"])).real

    def spectrum(self, theta, shape, context):
        return 0.0, context["transfer"].abs().square().flatten(1).amax(1)
'''
COUNT, SHAPE = 8, (1, 12, 14)


def transfers() -> np.ndarray:
    """The transfer functions of Gaussians of different widths, shifted, so that they are not real."""
    found = []
    for i in range(COUNT):
        frequencies = np.meshgrid(*(np.fft.fftfreq(side) for side in SHAPE[1:]), indexing="ij")
        size = (0.3 + 0.3 * i) * (frequencies[0] ** 2 + frequencies[1] ** 2) * 10
        kernel = np.fft.ifft2(np.exp(-size)).real
        found.append(np.fft.fft2(np.roll(kernel, i % 3, axis=1)))
    return np.stack(found)[:, None]


@pytest.fixture
def folder(tmp_path: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    install("scanner", {"scanner": "scanner_plugin"}, {"scanner_plugin": OPERATOR})
    monkeypatch.setattr(ReportWriter, "finished", lambda self, result: None)
    rng = np.random.default_rng(0)
    images, masks = smooth_images(COUNT, SHAPE).double().numpy(), rng.random((COUNT, *SHAPE)) < 0.8
    blurred = np.fft.ifft2(transfers() * np.fft.fft2(images)).real
    np.save(tmp_path / "clean.npy", images)
    np.save(tmp_path / "low.npy", (blurred + 0.02 * rng.normal(size=images.shape)) * masks)
    np.save(tmp_path / "masks.npy", masks.astype(np.uint8))
    np.save(tmp_path / "transfers.npy", transfers())
    return tmp_path


def recipe(folder: Path, **sections: Any) -> Recipe:
    pairs = {
        "name": "pairs",
        "measured": str(folder / "low.npy"),
        "clean": str(folder / "clean.npy"),
        "context": [
            {"key": "mask", "path": str(folder / "masks.npy")},
            {"key": "transfer", "path": str(folder / "transfers.npy")},
        ],
    }
    settings = {
        "data": pairs | {"count": 6},
        "evaluation": pairs | {"offset": 6},
        "operator": "scanner",
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "strong_convexity": 0.05,
        "lower_solver": "mm",
        "sampler": {"size": 3},
        "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 1e-2},
        "validation": {"count": 1, "checks": 2},
        "checkpoint": {"every": 0, "keep_finished": True},
        "budget": {"steps": 3},
        "dtype": "float64",
        "device": "cpu",
    }
    return recipe_from_dict(settings | sections)


def parts(folder: Path, *ids: int) -> tuple[Tensor, dict[str, Tensor]]:
    y, masks, transfer = (np.load(folder / f"{name}.npy") for name in ("low", "masks", "transfers"))
    rows = {"mask": torch.from_numpy(masks)[list(ids)], "transfer": torch.from_numpy(transfer)[list(ids)]}
    return torch.from_numpy(y.astype(np.float32)).double()[list(ids)], rows


def assert_minimiser(lower: Lower, x: Tensor, distance: float) -> None:
    """∇h of a strongly convex function bounds the distance to its minimiser."""
    assert bool((lower.residual(x) / lower.mu <= distance).all())


@pytest.mark.parametrize("solver", ["mm", "agd"])
def test_chunks_do_not_matter(folder: Path, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[int] = []
    take = ImageLower.take

    def counted(self: ImageLower, index: Tensor) -> ImageLower:
        divided.append(len(index))
        return take(self, index)

    alone = run(recipe(folder, lower_solver=solver, chunk=1))
    monkeypatch.setattr(ImageLower, "take", counted)
    together = run(recipe(folder, lower_solver=solver, chunk=8))
    assert any(0 < count < 3 for count in divided), "samples must have left at different times"
    assert relative_error(together.theta, alone.theta) < 1e-10
    assert alone.evaluation is not None and together.evaluation is not None
    assert together.evaluation.after["psnr"] == pytest.approx(alone.evaluation.after["psnr"], rel=1e-10)
    assert together.cost.lower_iterations == alone.cost.lower_iterations


def test_each_sample_has_its_own_operator(folder: Path) -> None:
    experiment = assemble(recipe(folder, sampler={"name": "full"}))
    lower, _ = experiment.oracle.tasks.at(experiment.theta, Counter()).on([3, 0])
    x = torch.randn(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, rows = parts(folder, 3, 0)
    expected = torch.fft.ifft2(rows["transfer"] * torch.fft.fft2(x)).real * rows["mask"]
    assert isinstance(lower, ImageLower)
    assert torch.allclose(lower.forward(x), expected, atol=1e-12)
    assert torch.allclose(lower.take(torch.tensor([1])).forward(x[1:]), expected[1:], atol=1e-12)
    most = rows["transfer"].abs().square().flatten(1).amax(1)
    assert torch.allclose(lower.lipschitz, most + experiment_prior(experiment) + 0.05)


def experiment_prior(experiment: Any) -> Tensor:
    bound = experiment.problem.at(experiment.theta, SHAPE).prior_lipschitz
    assert bound is not None
    return torch.as_tensor(bound)


def test_resume_is_exact(folder: Path, tmp_path: Path) -> None:
    run(recipe(folder), out=tmp_path / "whole")
    run(recipe(folder, budget={"steps": 1}, validation={"count": 1, "checks": 1}), out=tmp_path / "half")
    resume(tmp_path / "half", ["budget.steps=3"])
    one, other = (
        read_theta(tmp_path / name / "checkpoints/last.safetensors")[0] for name in ("whole", "half")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_ranks(folder: Path, tmp_path: Path) -> None:
    alone = run(recipe(folder), out=tmp_path / "alone")

    def work(ranks: Ranks) -> list[float]:
        found = run(recipe(folder), out=tmp_path / "two", ranks=ranks).evaluation
        assert found is not None
        return found.after["psnr"]

    assert alone.evaluation is not None
    for values in on_ranks(tmp_path, 2, work):
        assert values == pytest.approx(alone.evaluation.after["psnr"], rel=1e-9)
    one, other = (read_theta(tmp_path / name / "theta.safetensors")[0] for name in ("alone", "two"))
    assert relative_error(other, one) < 1e-12


class TestModels:
    @pytest.fixture
    def model(self, folder: Path, tmp_path: Path) -> Model:
        run(recipe(folder, budget={"steps": 1}), out=tmp_path / "run")
        return Model.load(tmp_path / "run", "cpu")

    def test_measurements_are_solved_with_their_context(self, folder: Path, model: Model) -> None:
        y, rows = parts(folder, 2, 5, 7)
        x = model.solve(y, 1e-6, context=rows)
        theta = {name: value.double() for name, value in model.theta.items()}
        assert_minimiser(
            model.problem.at(theta, SHAPE).on(y, rows | {"mask": rows["mask"].double()}), x, 2e-6
        )
        single = model.solve(y[1], 1e-6, context={name: row[1].numpy() for name, row in rows.items()})
        assert torch.allclose(single, x[1], atol=4e-6)

    def test_the_evaluation_of_the_run_again(self, folder: Path, model: Model, tmp_path: Path) -> None:
        result = run(recipe(folder, budget={"steps": 1}))
        assert result.evaluation is not None
        y, rows = parts(folder, 6, 7)
        x = model.solve(y, context=rows)
        for image, found in zip(result.evaluation.images, x, strict=True):
            assert torch.allclose(found, image.x, atol=1e-10)

    def test_what_is_missing_or_wrong(self, folder: Path, model: Model) -> None:
        y, rows = parts(folder, 2, 5)
        with pytest.raises(BltError, match=r"the operator needs context: '(mask|transfer)'"):
            model.solve(y)
        with pytest.raises(BltError, match="context 'mask' has 1 rows for 2 measurements"):
            model.solve(y, context=rows | {"mask": rows["mask"][:1]})
        with pytest.raises(
            BltError, match=r"of each measurement, so it cannot restore pictures; use Model.solve"
        ):
            model.restore(np.zeros((12, 14), np.uint8))
