"""Learned weights of the data term: one for all, one per class, a map; and θ that belongs to images of one size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import normal, small_tv
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.data_terms.weight_map import WeightMap
from blt_builtins.lower_solvers.agd import AGD
from bltoolbox import Model, load_recipe, run
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.roles import DataTerm
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.tiles import Restorer
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import Gain, smooth_images, variational
from bltoolbox.testing.conformance import check_component, select
from bltoolbox.testing.recipe_check import check_recipe
from bltoolbox.training.assemble import assemble

SHAPE = (1, 8, 10)
TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "color=gray",
    "regularizer={name: foe, filters: 3, kernel_size: 3, nu: 0.05}",
    "lower_solver=mm",
    "sampler={name: epoch, size: 3}",
    "upper_optimizer={name: isgd, step: 0.01}",
    "budget={steps: 2}",
    "device=cpu",
    "checkpoint.every=0",
]
WEIGHTS = {
    "scalar": "name: least-squares, learned: true",
    "classes": "name: least-squares, learned: true, classes: 2",
    "grid": "name: weight-map, grid: 3",
    "pixels": "name: weight-map, grid: null, smoothness: 0.3",
}


@pytest.fixture
def with_classes(tmp_path: Path) -> str:
    """Six images of two classes as an override."""
    np.save(tmp_path / "images.npy", smooth_images(6, (1, 16, 16))[:, 0].numpy())
    np.save(tmp_path / "classes.npy", np.array([0, 1, 1, 0, 1, 0]))
    return f"data={{name: array, path: {tmp_path}/images.npy, classes: {tmp_path}/classes.npy}}"


def problem(term: DataTerm) -> Variational:
    return replace(variational(Gain(), small_tv()), data_term=term)


def restored(
    term: DataTerm, data_theta: dict[str, Tensor], y: Tensor, classes: Sequence[int] | None = None
) -> Tensor:
    prior = small_tv().init_params(SHAPE, keyed_generator("theta"))
    context = {} if classes is None else {"class": torch.tensor(classes)}
    lower = problem(term).at(join(regularizer=prior, data_term=data_theta), SHAPE).on(y, context)
    return solve_cold(AGD(), lower, 1e-9, 20_000).x


def measurements(count: int = 3) -> Tensor:
    return smooth_images(count, SHAPE).double() + 0.1 * normal(count, *SHAPE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("least-squares", {"learned": True}),
        ("weight-map", {"grid": None}),
        ("weight-map", {"grid": 2, "smoothness": 1.0}),
    ],
)
def test_conforms(name: str, options: dict[str, object]) -> None:
    registry = load_registry()
    (component,) = select(registry, f"data_term/{name}")
    outcomes = check_component(component, registry, options)
    assert [one for one in outcomes if one.status == "failed"] == []


@pytest.mark.parametrize("kind", WEIGHTS)
def test_hypergradient_against_finite_differences(kind: str, with_classes: str) -> None:
    words = [*TINY, f"data_term={{{WEIGHTS[kind]}}}"]
    recipe = load_recipe("smoke", [*words, with_classes] if kind == "classes" else words)
    found = check_recipe(recipe, load_registry(), samples=3)
    assert found.passed, found.verdict
    (row,) = [row for row in found.rows if row.direction == "data_term.log_weights"]
    assert abs(row.differences) > 1e-6


def test_the_weight_of_its_class() -> None:
    """A sample of class c is restored as by a single weight of that class, whoever shares the batch."""
    y, log_weights = measurements(), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    classes = [2, 0, 1]
    together = restored(
        LeastSquares(learned=True, classes=3), {"log_weights": log_weights}, y, classes=classes
    )
    for i, number in enumerate(classes):
        alone = restored(LeastSquares(learned=True), {"log_weights": log_weights[[number]]}, y[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-8)


def test_bounds_per_sample() -> None:
    term = LeastSquares(learned=True, classes=2)
    theta = {"log_weights": torch.tensor([0.0, 3.0], dtype=torch.float64)}
    prior = small_tv().init_params(SHAPE, keyed_generator("theta"))
    at = problem(term).at(join(regularizer=prior, data_term=theta), SHAPE)
    lower = at.on(measurements(2), {"class": torch.tensor([1, 0])})
    torch.testing.assert_close(lower.mu, theta["log_weights"].flip(0).exp())
    torch.testing.assert_close(lower.lipschitz[0] - lower.lipschitz[1], theta["log_weights"].exp().diff()[0])


def test_a_map_on_a_grid_is_one_per_pixel_interpolated() -> None:
    w, y = normal(3, 3, seed=3), measurements()
    fine = torch.nn.functional.interpolate(w[None, None], SHAPE[1:], mode="bilinear", align_corners=True)
    coarse = restored(WeightMap(grid=3), {"log_weights": w}, y)
    torch.testing.assert_close(coarse, restored(WeightMap(grid=None), {"log_weights": fine[0, 0]}, y))
    flat = restored(WeightMap(grid=3), {"log_weights": torch.full_like(w, 0.7)}, y)
    one = restored(LeastSquares(learned=True), {"log_weights": torch.tensor([0.7]).double()}, y)
    torch.testing.assert_close(flat, one)


def test_less_weight_where_there_is_more_noise() -> None:
    truth = smooth_images(4, SHAPE).double()
    y = truth + torch.linspace(0.02, 0.4, SHAPE[2], dtype=torch.float64) * normal(4, *SHAPE, seed=9)
    w = torch.tensor([[1.0, -1], [1, -1]], dtype=torch.float64)
    errors = [
        (restored(WeightMap(grid=2), {"log_weights": one}, y) - truth).square().sum() for one in (w, -w)
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data_term={name: least-squares, classes: 2}"], "set learned: true"),
        (["data_term={name: least-squares, learned: true, classes: 2}"], "do not give the class"),
        (["freeze=[operator]"], "operator 'identity' has no parameters"),
        (["freeze=[regularizer]"], "nothing is left to learn"),
        (
            ["data_term={name: weight-map, smoothness: 1}", "validation={count: 2, patience: 2}"],
            "cannot stop by patience",
        ),
        (
            ["data_term={name: weight-map, grid: null}", "evaluation={name: photos, size: 32}"],
            "learned for images of 16×16 pixels, not of 32×32",
        ),
    ],
)
def test_refused_before_a_run(words: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        run(load_recipe("smoke", [*TINY, *words]))


def test_classes_beyond_the_last_one(with_classes: str, tmp_path: Path) -> None:
    np.save(tmp_path / "classes.npy", np.full(6, 2))
    with pytest.raises(RecipeError, match=r"classes from 2 to 2, but there are weights for 2"):
        run(load_recipe("smoke", [*TINY, with_classes, f"data_term={{{WEIGHTS['classes']}}}"]))
    np.save(tmp_path / "classes.npy", np.zeros(5))
    with pytest.raises(RecipeError, match="classes are 6 whole numbers"):
        run(load_recipe("smoke", [*TINY, with_classes]))


def test_a_model_with_classes_asks_for_them(with_classes: str) -> None:
    recipe = load_recipe("smoke", [*TINY, with_classes, f"data_term={{{WEIGHTS['classes']}}}"])
    model = run(recipe).model
    y = torch.rand(2, 1, 16, 16, generator=keyed_generator("y"))
    with pytest.raises(BltError, match="do not give the class"):
        model.solve(y)
    x = model.solve(y, context={"class": torch.tensor([0, 1])})
    assert x.shape == y.shape
    assert model.learned == "32 parameters of foe and 2 of least-squares"


def test_classes_of_recorded_data(tmp_path: Path) -> None:
    """Two scanners, one of them noisy: its measurements are trusted less."""
    truth = smooth_images(8, (1, 16, 16))
    classes = torch.arange(8) % 2
    y = truth + torch.where(classes.view(-1, 1, 1, 1) == 1, 0.3, 0.02) * normal(8, 1, 16, 16).float()
    for name, rows in {"x": truth[:, 0], "y": y[:, 0], "classes": classes}.items():
        np.save(tmp_path / f"{name}.npy", rows.numpy())
    data = (
        f"data={{name: pairs, measured: {tmp_path}/y.npy, clean: {tmp_path}/x.npy,"
        f" context: [{{key: class, path: {tmp_path}/classes.npy}}]}}"
    )
    words = [*TINY, data, "noise=null", f"data_term={{{WEIGHTS['classes']}}}"]
    words += ["upper_optimizer={name: iadam, step: 0.3}", "budget={steps: 6}"]
    weights = run(load_recipe("smoke", words)).theta["data_term.log_weights"]
    assert float(weights[0] - weights[1]) > 0.5


def test_frozen_parameters_stay() -> None:
    recipe = load_recipe("smoke", [*TINY, "data_term={name: weight-map}", "freeze=[regularizer]"])
    result = run(recipe)
    start = assemble(recipe).theta
    for name, value in result.theta.items():
        assert torch.equal(value, start[name]) == name.startswith("regularizer"), name
    assert result.model.learned == "64 parameters of weight-map"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a weight for each pixel."""
    folder = tmp_path_factory.mktemp("run")
    run(load_recipe("smoke", [*TINY, f"data_term={{{WEIGHTS['pixels']}}}"]), out=folder / "run")
    return folder / "run"


class TestImagesOfOneSize:
    """θ with an entry for each pixel."""

    def test_its_file_says_which(self, folder: Path) -> None:
        model = Model.load(folder, "cpu")
        assert model.shape == (1, 16, 16) and model.channels == 1
        with safe_open(folder / "theta.safetensors", framework="pt") as file:
            assert json.loads(file.metadata()["shape"]) == [1, 16, 16]

    def test_other_sizes_are_refused(self, folder: Path) -> None:
        model = Model.load(folder, "cpu")
        assert model.solve(torch.zeros(1, 16, 16)).shape == (1, 16, 16)
        sentence = (
            "the data term was learned for images of 16×16 pixels, not of 16×20; use images of that size"
        )
        with pytest.raises(BltError, match=sentence):
            model.solve(torch.zeros(1, 16, 20))
        with pytest.raises(BltError, match=r"16×16 pixels, not of 20×16"):
            model.restore(np.zeros((20, 16)))

    def test_it_is_not_cut_into_tiles(self, folder: Path) -> None:
        restorer = Restorer(Model.load(folder, "cpu"), tile=8)
        _, report = restorer.run(np.zeros((16, 16, 1)))
        assert report.tiles == 1

    @pytest.mark.parametrize(
        "shape", ["[1, 16]", "[1, 16, -16]", "[1, 16, 1.5]", "17", "[", "[1, 99999, 99999]"]
    )
    def test_a_damaged_shape(self, folder: Path, tmp_path: Path, shape: str) -> None:
        with safe_open(folder / "theta.safetensors", framework="pt") as file:
            metadata = file.metadata() | {"shape": shape}
        save_file(load_file(folder / "theta.safetensors"), tmp_path / "theta.safetensors", metadata)
        with pytest.raises(BltError, match=r"image shape is damaged|is refused"):
            Model.load(tmp_path / "theta.safetensors", "cpu")
