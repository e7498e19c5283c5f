"""Problems other than images: closed forms, hypergradients, and every method on each of them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blt_builtins.problems.data_cleaning import DataCleaning
from blt_builtins.problems.few_shot import FewShot
from blt_builtins.problems.logistic_regression import LogisticRegression
from blt_builtins.problems.ridge import Ridge
from blt_builtins.problems.softmax_regression import SoftmaxRegression
from blt_builtins.problems.tables import Files, Generated
from bltoolbox import run
from bltoolbox.bilevel.records import Counter
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import RecipeError
from bltoolbox.restoration.evaluation import metrics_of
from bltoolbox.testing.recipe_check import check_recipe

REGISTRY = load_registry()
PROBLEMS = [one.name for one in REGISTRY.components("problem") if one.name != "variational"]
LIKE = torch.zeros((), dtype=torch.float64)


def tiny(name: str, **changes: Any) -> Recipe:
    """The options with which a problem is checked, for two steps."""
    options = REGISTRY.get("problem", name).load().example(Path())
    settings: dict[str, Any] = {
        "problem": {"name": name, **options},
        "dtype": "float64",
        "sampler": "full",
        "lower_solver": "lbfgs",
        "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 1e-3},
        "validation": {"checks": 1},
        "budget": {"steps": 2},
    }
    return recipe_from_dict(settings | changes, registry=REGISTRY)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_hypergradient_agrees_with_central_differences(name: str) -> None:
    found = check_recipe(tiny(name), REGISTRY)
    assert found.passed, found.verdict
    assert found.rows and max(row.error for row in found.rows) < 1e-5


@pytest.mark.parametrize("optimizer", [one.name for one in REGISTRY.components("upper_optimizer")])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_optimizer_runs(name: str, optimizer: str) -> None:
    result = run(tiny(name, upper_optimizer=optimizer))
    assert result.steps >= 1
    assert all(torch.isfinite(value).all() for value in result.theta.values())
    assert result.evaluation is not None and math.isfinite(result.evaluation.mean() or math.nan)
    assert {metric.name for metric in result.evaluation.metrics} == set(result.model.problem.metrics)
    assert not result.evaluation.images and not result.evaluation.of_images


@pytest.mark.parametrize("estimator", [one.name for one in REGISTRY.components("hypergradient")])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_hypergradient_runs_or_is_refused_by_name(name: str, estimator: str) -> None:
    needs = REGISTRY.get("hypergradient", estimator).signature().traits.requires
    if "regularizer" in needs:
        with pytest.raises(
            RecipeError, match=f"{estimator}.* needs a .*which problem '{name}' does not have"
        ):
            tiny(name, hypergradient=estimator)
        return
    result = run(tiny(name, hypergradient=estimator, sampler={"name": "nice", "size": 1}))
    assert result.steps == 2
    assert all(torch.isfinite(value).all() for value in result.theta.values())


@pytest.mark.parametrize("solver", [one.name for one in REGISTRY.components("lower_solver")])
def test_every_lower_solver_finds_the_same_minimiser_or_is_refused(solver: str) -> None:
    if "regularizer" in REGISTRY.get("lower_solver", solver).signature().traits.requires:
        with pytest.raises(RecipeError, match=f"'{solver}' needs a .*which problem 'softmax-regression'"):
            tiny("softmax-regression", lower_solver=solver)
        return
    precise = {"upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 1e-7}}
    found, expected = (
        run(tiny("softmax-regression", lower_solver=name, **precise)).theta["log_weight"]
        for name in (solver, "lbfgs")
    )
    assert torch.allclose(found, expected, atol=1e-6)


def fold(problem: Ridge, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of a fold, by hand: those it is fitted to, and its own."""
    rows = problem.split.training
    own = rows.tensor_split(problem.folds)[number]
    others = rows[~torch.isin(rows, own)]
    table = problem.table
    return table.features[others], table.targets[others], table.features[own], table.targets[own]


class TestRidge:
    def test_solution_loss_and_metrics_are_those_of_the_normal_equations(self) -> None:
        problem = Ridge(Generated(examples=53, features=6, relevant=3), folds=4, blocks=3)
        tasks = problem.tasks("training", LIKE)
        assert tasks is not None and len(tasks) == 4 and tasks.shape == (6,)
        theta = {"log_weight": torch.linspace(-2, 1, 6, dtype=torch.float64)}
        at = tasks.at(theta, Counter())
        lower, upper = at.on([0, 1, 2, 3])
        for number in range(4):
            a, b, c, d = fold(problem, number)
            x = torch.linalg.solve(a.T @ a / len(a) + theta["log_weight"].exp().diag(), a.T @ b / len(a))
            stacked = x.expand(4, 6)
            assert float(lower.gradient(stacked)[number].norm()) < 1e-12
            error = c @ x - d
            assert float(upper.value(stacked)[number]) == pytest.approx(float(0.5 * error.square().mean()))
            found = at.measure(["mse", "r2"], [number], x.unsqueeze(0))
            assert found["mse"][0] == pytest.approx(float(error.square().mean()))
            assert found["r2"][0] == pytest.approx(1 - float(error.square().mean() / d.var(correction=0)))

    def test_rows_of_training_validation_and_test_are_disjoint(self) -> None:
        problem = Ridge(Generated(examples=50), validation=0.2, test=0.3)
        parts = [problem.split.training, problem.split.validation, problem.split.test]
        assert [len(part) for part in parts] == [25, 10, 15]
        assert sorted(torch.cat(parts).tolist()) == list(range(50))
        held = problem.tasks("evaluation", LIKE)
        assert held is not None and len(held) == 1 and held.label(0) == "test"
        assert torch.equal(held.judged.targets[0], problem.table.targets[problem.split.test])
        assert Ridge(Generated(examples=50), validation=0.0).tasks("validation", LIKE) is None

    def test_a_ridge_for_each_feature_switches_irrelevant_features_off(self) -> None:
        data = {"examples": 200, "features": 8, "relevant": 2, "noise": 0.5}
        problem = {"name": "ridge", "data": data, "test": 0.5}
        settings = {"upper_optimizer": {"name": "iadam", "step": 0.3, "tol": 1e-3}, "budget": {"steps": 40}}
        weights = run(tiny("ridge", problem=problem, **settings)).last["log_weight"]
        assert float(weights[:2].max()) < float(weights[2:].min())

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"folds": 200}, "folds is 200, but there are only 100 training examples"),
            ({"blocks": 50}, "blocks is 50, but a task has only 20 examples"),
            ({"validation": 0.5, "test": 0.5}, "leave none of the 400 examples for training"),
            ({"data": {"relevant": 50}}, "relevant is 50, but there are only 40 features"),
            ({"data": {"examples": 2**40}}, "BLT_MAX_GENERATED"),
        ],
    )
    def test_options_that_cannot_be_met_are_refused(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(RecipeError, match=sentence):
            run(tiny("ridge", problem={"name": "ridge", **options}))


class TestFiles:
    def table(self, folder: Path, targets: np.ndarray) -> Files:
        np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(len(targets), 3)))
        np.save(folder / "y.npy", targets)
        return Files(folder / "x.npy", folder / "y.npy")

    def test_a_table_of_ones_own(self, tmp_path: Path) -> None:
        self.table(tmp_path, np.arange(60) % 2)
        data = {"inputs": str(tmp_path / "x.npy"), "targets": str(tmp_path / "y.npy")}
        result = run(tiny("logistic-regression", problem={"name": "logistic-regression", "data": data}))
        assert result.theta["log_weight"].shape == (3,)
        found = LogisticRegression(self.table(tmp_path, np.arange(60) % 2)).table.targets
        assert found.unique().tolist() == [-1.0, 1.0]
        assert SoftmaxRegression(self.table(tmp_path, np.arange(60) % 5)).columns == 5

    @pytest.mark.parametrize(
        ("targets", "sentence"),
        [
            (np.arange(60) % 3, "3 classes, not two; use softmax-regression"),
            (np.arange(60) / 7, "the numbers of classes"),
            (np.where(np.arange(60) < 59, 0, 1e13), "the numbers of classes"),
            (np.zeros((60, 2)), r"got \(60, 3\) and \(60, 2\)"),
            (np.full(60, np.nan), "NaN or infinite"),
            (np.where(np.arange(60) < 59, 0, 1e160), "numbers up to 1e\\+160, whose squares overflow"),
        ],
    )
    def test_what_is_not_a_table_of_two_classes_is_refused(
        self, tmp_path: Path, targets: np.ndarray, sentence: str
    ) -> None:
        with pytest.raises(ValueError, match=sentence):
            LogisticRegression(self.table(tmp_path, targets))

    def test_features_whose_squares_overflow_are_refused(self, tmp_path: Path) -> None:
        files = self.table(tmp_path, np.arange(60) % 2)
        features = np.load(files.inputs)
        features[3, 1] = 1e200
        np.save(files.inputs, features)
        with pytest.raises(ValueError, match="scale the columns"):
            Ridge(files)


class TestClasses:
    def test_accuracy_counts_right_classes_and_guesses(self) -> None:
        problem = SoftmaxRegression(folds=2)
        tasks = problem.tasks("evaluation", LIKE)
        assert tasks is not None
        x = torch.randn(1, *tasks.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        at = tasks.at(problem.init_params(torch.Generator()), Counter())
        right = (tasks.judged.features[0] @ x[0]).argmax(1) == tasks.judged.targets[0]
        assert at.measure(["accuracy"], [0], x)["accuracy"][0] == pytest.approx(
            100 * float(right.double().mean())
        )
        assert at.measure(["accuracy"], [0], torch.zeros_like(x))["accuracy"][0] == pytest.approx(25)

    def test_two_classes_are_a_softmax_of_opposite_scores(self) -> None:
        data = Generated(examples=40, features=4, relevant=2)
        two = LogisticRegression(data).tasks("training", LIKE)
        assert two is not None
        lower, _ = two.at({"log_weight": torch.zeros(4, dtype=torch.float64)}, Counter()).on([0])
        x = torch.linspace(-1, 1, 4, dtype=torch.float64)
        a, b = lower.examples.features[0], lower.examples.targets[0]
        scores = torch.stack([a @ x / 2, -a @ x / 2], 1)
        loss = torch.nn.functional.cross_entropy(scores, (b < 0).long())
        expected = loss + 0.5 * x.square().sum()
        assert float(lower.energy(x.unsqueeze(0))) == pytest.approx(float(expected))


class TestDataCleaning:
    def test_wrong_labels_lose_weight(self) -> None:
        options = {
            "data": {"examples": 300, "features": 4, "relevant": 4, "classes": 3, "noise": 0.1},
            "clean": 0.3,
            "test": 0.2,
        }
        settings = {"upper_optimizer": {"name": "iadam", "step": 0.5, "tol": 1e-2}, "budget": {"steps": 15}}
        result = run(tiny("data-cleaning", problem={"name": "data-cleaning", **options}, **settings))
        problem = result.model.problem
        assert isinstance(problem, DataCleaning)
        wrong = problem.table.targets[problem.fitted] != problem.noisy.targets[problem.fitted]
        assert 0.2 < float(wrong.double().mean()) < 0.6
        logits = result.last["logits"]
        assert float(logits[wrong].median()) < -1 < 0 < float(logits[~wrong].median())

    def test_labels_that_count_are_right(self) -> None:
        problem = DataCleaning(corrupted=1.0)
        for split in ("training", "validation", "evaluation"):
            tasks = problem.tasks(split, LIKE)
            assert tasks is not None
            assert torch.equal(tasks.judged.targets[0], problem.table.targets[problem.rows[split]])
            assert not bool((tasks.fitted.targets[0] == problem.table.targets[problem.fitted]).any())


class TestFewShot:
    def test_the_true_representation_beats_a_random_one_and_the_loss_is_that_of_the_fitted_heads(
        self,
    ) -> None:
        problem = FewShot(tasks=6, features=10, width=2, support=5, noise=0.01)
        tasks = problem.tasks("training", LIKE)
        assert tasks is not None
        strength = torch.tensor(-9.0, dtype=torch.float64)
        losses = {}
        for name, w in {
            "true": problem.truth,
            "random": problem.init_params(torch.Generator())["representation"],
        }.items():
            at = tasks.at({"representation": w, "log_weight": strength}, Counter())
            lower, upper = at.on(range(6))
            a, b = lower.examples.features @ w, lower.examples.targets
            ridge = strength.exp() * torch.eye(2, dtype=torch.float64)
            x = torch.linalg.solve(a.mT @ a / 5 + ridge, (a.mT @ b.unsqueeze(-1) / 5)).squeeze(-1)
            assert float(lower.gradient(x).norm()) < 1e-12
            losses[name] = float(upper.value(x).mean())
        assert losses["true"] < 1e-2 * losses["random"]

    def test_a_task_does_not_depend_on_how_many_there_are(self) -> None:
        few, many = (FewShot(tasks=count).tasks("training", LIKE) for count in (2, 5))
        assert few is not None and many is not None
        assert torch.equal(few.fitted.features, many.fitted.features[:2])
        assert few.label(1) == "task 2" and few.digest() != many.digest()


def test_random_search_keeps_the_best_of_its_draws_and_counts_their_cost() -> None:
    search = {"name": "random-search", "radius": 3, "tol": 1e-6}
    result = run(tiny("ridge", upper_optimizer=search, budget={"steps": 12}))
    losses = [record["loss"] for record in result.history]
    trials = [record["trial"] for record in result.history]
    assert losses[1:] == [min(losses[0], *trials[1 : k + 1]) for k in range(1, 12)]
    start = torch.full((4,), -2.0, dtype=torch.float64)
    assert float((result.last["log_weight"] - start).abs().max()) <= 3
    computations = [record["computations"] for record in result.history]
    assert all(before < after for before, after in pairwise(computations))


@pytest.mark.parametrize("name", PROBLEMS)
def test_float32_and_float64_see_the_same_tasks(name: str) -> None:
    problem = REGISTRY.build(tiny(name).problem)
    theta = problem.init_params(torch.Generator().manual_seed(0))
    values = []
    for dtype in (torch.float32, torch.float64):
        tasks = problem.tasks("training", torch.zeros((), dtype=dtype))
        lower, upper = tasks.at({key: one.to(dtype) for key, one in theta.items()}, Counter()).on([0])
        values.append((upper.value(lower.start() + 0.5), lower.energy(lower.start() + 0.5).double()))
    assert torch.allclose(values[0][0], values[1][0], rtol=1e-5)
    assert torch.allclose(values[0][1], values[1][1], rtol=1e-5)
    assert "loss" in metrics_of(problem)
