"""The solver of everything that is not a step of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from bltoolbox import Model, run
from bltoolbox.bilevel.kept import MOST
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.errors import RecipeError
from bltoolbox.training.assemble import assemble


def recipe(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 4, "size": 16},
        "evaluation": {"name": "dead-leaves", "count": 1, "size": 16, "seed": 5},
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "sampler": {"name": "epoch", "size": 2},
        "upper_optimizer": {"name": "isgd", "tol": 1.0},
        "validation": {"count": 1, "checks": 1},
        "budget": {"steps": 2},
    }
    return recipe_from_dict(settings | changes)


def test_it_is_the_solver_of_training_unless_another_is_named() -> None:
    experiment = assemble(recipe())
    assert experiment.evaluation_solver is experiment.oracle.solver
    experiment = assemble(recipe(evaluation_solver="newton-cg"))
    assert isinstance(experiment.evaluation_solver, NewtonCG) and isinstance(experiment.oracle.solver, AGD)


@pytest.mark.parametrize(("constraint", "expected"), [("none", LBFGS), ("nonnegative", AGD)])
def test_one_that_does_not_converge_is_replaced(
    constraint: str, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientDescent, "converges", False)
    experiment = assemble(recipe(lower_solver="gd", constraint=constraint))
    assert isinstance(experiment.oracle.solver, GradientDescent)
    assert isinstance(experiment.evaluation_solver, expected)


def test_evaluations_checks_and_models_use_it_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"newton": 0, "agd": 0}

    def counting(name: str, cls: type) -> None:
        original = cls.init

        def init(self: Any, lower: Any, x0: Any, kept: Any) -> Any:
            used[name] += 1
            return original(self, lower, x0, kept)

        monkeypatch.setattr(cls, "init", init)

    counting("newton", NewtonCG)
    counting("agd", AGD)
    result = run(recipe(evaluation_solver="newton-cg"), out=tmp_path / "run")
    assert used["agd"] == 2, "one lower-level solve in each of two steps"
    assert used["newton"] >= 4, "two checks, and evaluations of the first and the last θ"
    model = Model.load(tmp_path / "run")
    assert isinstance(model.solver, NewtonCG) and isinstance(result.model.solver, NewtonCG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation_solver": "mm", "regularizer": "icnn"}, "'mm' needs a regularizer with"),
        (
            {"evaluation_solver": "lbfgs", "constraint": "box"},
            "'lbfgs' cannot keep x in the constraint 'box'",
        ),
        ({"evaluation_solver": "mm", "baseline": "crr"}, "'mm' needs a regularizer with"),
    ],
)
def test_one_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match="evaluation_solver") as caught:
        recipe(**changes)
    assert message in str(caught.value)


def test_a_baseline_need_not_fit_the_solver_of_training() -> None:
    assert recipe(lower_solver="mm", evaluation_solver="agd", baseline="crr").evaluation_solver is not None
    with pytest.raises(RecipeError, match="'mm' needs a regularizer with"):
        recipe(lower_solver="mm", baseline="crr")


def test_what_components_keep_is_logged_and_refused_above_a_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level("INFO", logger="bltoolbox"):
        assemble(recipe())
    assert (
        "hypergradient 'cg-ift' keeps 3072 bytes (adjoint) of each of 3 samples, 9216 bytes in all"
        in caplog.text
    )
    assert MOST > 10**9
    monkeypatch.setattr("bltoolbox.training.assemble.MOST", 9000)
    with pytest.raises(
        RecipeError, match="in all, above the limit of 9000 bytes; use fewer or smaller images"
    ):
        assemble(recipe())
