"""Recipes, overrides and plugins as Python has them: mappings and modules instead of files and texts."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bltoolbox import Experiment, Model, assemble, load_recipe, resume, run
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import MissingError, RecipeError, UsageError
from bltoolbox.testing import smooth_images

RECIPE: dict[str, Any] = {
    "regularizer": {"name": "tv", "nu": 0.1},
    "noise": 0.1,
    "color": "gray",
    "device": "cpu",
    "sampler": {"name": "full"},
    "validation": {"count": 0},
    "upper_optimizer": {"name": "isgd", "step": 1e-3},
    "budget": {"steps": 2},
}
PLUGIN = '''
import torch
from bltoolbox.plugin import Component, Regularizer, hookimpl


class Ridge(Regularizer):
    """½e^θ‖x‖²."""

    def init_params(self, shape, generator):
        return {"log_weight": torch.zeros(1, dtype=torch.float64)}

    def energy(self, theta, x):
        return 0.5 * theta["log_weight"].exp() * x.square().flatten(1).sum(1)


@hookimpl
def blt_components():
    return [Component("regularizer", "my-ridge", f"{__name__}:Ridge", "For tests.")]
'''


def images() -> torch.Tensor:
    return smooth_images(3, (1, 8, 9))


def test_a_recipe_may_be_a_mapping() -> None:
    settings = RECIPE | {"data": {"name": "dead-leaves", "count": 4, "size": 16}}
    recipe = load_recipe(settings)
    assert recipe.regularizer.name == "tv" and recipe.to_dict()["budget"]["steps"] == 2
    assert settings["budget"] == {"steps": 2}, "what was given stays as it is"
    assert load_recipe(recipe.to_dict()) == recipe
    with pytest.raises(RecipeError, match="'tv' has no parameter 'sise'"):
        load_recipe(settings | {"regularizer": {"name": "tv", "sise": 3}})


def test_overrides_may_be_a_mapping() -> None:
    settings = RECIPE | {"data": {"name": "dead-leaves", "count": 4, "size": 16}}
    texts = ["budget.steps=7", "regularizer=foe", "regularizer.filters=3", "noise=25/255"]
    mapping = {
        "regularizer.filters": 3,
        "budget": {"steps": 7},
        "regularizer.name": "foe",
        "noise": 25 / 255,
    }
    assert load_recipe(settings, mapping) == load_recipe(settings, texts)
    variants = settings | {"variants": {"a": {"seed": 1}, "b": {"seed": 2}}}
    assert load_recipe(variants, {"variant": "b"}).seed == 2
    with pytest.raises(RecipeError, match="has no parameter 'sice'"):
        load_recipe(settings, {"sampler.sice": 3})


def test_run_takes_both_with_data() -> None:
    result = run(RECIPE, {"budget.steps": 1}, data=images())
    assert result.steps == 1
    experiment = assemble(RECIPE, data=images())
    assert isinstance(experiment, Experiment) and len(experiment.oracle.tasks) == 3


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "ridge.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return path


@pytest.fixture
def module(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("my_ridge_module")
    exec(plugin.read_text(encoding="utf-8"), made.__dict__)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_plugins_are_files_or_modules(plugin: Path, module: types.ModuleType, tmp_path: Path) -> None:
    settings = RECIPE | {"regularizer": "my-ridge"}
    with pytest.raises(RecipeError, match="'my-ridge' is not a registered regularizer"):
        run(settings, data=images())
    out = tmp_path / "run"
    result = run(settings, data=images(), plugins=[str(plugin)], out=out)
    again = run(settings, data=images(), plugins=[module])
    name = "regularizer.log_weight"
    assert torch.equal(result.theta[name], again.theta[name])
    with pytest.raises(RecipeError, match="'my-ridge' is not a registered regularizer"):
        Model.load(out)
    assert torch.equal(Model.load(out, "cpu", plugins=[module]).theta[name], result.theta[name])
    more = {"budget.steps": 3}
    with pytest.raises(RecipeError, match="'my-ridge' is not a registered regularizer"):
        resume(out, more, data=images())
    assert resume(out, more, data=images(), plugins=[plugin]).steps == 3


def test_a_plugin_that_is_broken_is_an_error(module: types.ModuleType, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(MissingError, match="nothing_of_this_name"):
        run(RECIPE, data=images(), plugins=[tmp_path / "broken.py"])
    del module.blt_components  # type: ignore[attr-defined]
    with pytest.raises(MissingError, match="defines no blt_components"):
        run(RECIPE, data=images(), plugins=[module])
    with pytest.raises(UsageError, match="does not exist"):
        run(RECIPE, data=images(), plugins=["none.py"])


def test_a_module_is_shown_with_its_name(module: types.ModuleType) -> None:
    registry = load_registry([module])
    assert registry.get("regularizer", "my-ridge").plugin.origin == (
        "module my_ridge_module (plugin 'my_ridge_module')"
    )
