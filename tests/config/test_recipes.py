"""Every recipe that is shipped: valid, documented, and able to run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bltoolbox import load_recipe, run
from bltoolbox.config.recipe import Recipe, recipe_variants
from bltoolbox.config.shipped_recipes import shipped_recipes
from bltoolbox.errors import RecipeError

# The images are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
NAMES = [path.relative_to(RECIPES).with_suffix("").as_posix() for path in FILES]
every_recipe = pytest.mark.parametrize("path", FILES, ids=NAMES)
#: Every recipe with what chooses each of its variants.
CHOICES = [
    pytest.param(path, choice, id=" ".join([name, *choice]))
    for path, name in zip(FILES, NAMES, strict=True)
    for choice in [[f"variant={variant}"] for variant in recipe_variants(path)] or [[]]
]
every_variant = pytest.mark.parametrize(("path", "choice"), CHOICES)


def small(path: Path, choice: list[str]) -> Recipe:
    """The recipe with a few small generated images, for two steps."""
    overrides = [
        *choice,
        "data={name: dead-leaves, count: 4, size: 24}",
        "validation={count: 1, checks: 1}",
        "budget={steps: 2}",
        "device=cpu",
    ]
    recipe = load_recipe(path, choice)
    if not recipe.of_images:
        return load_recipe(path, [*choice, "validation.checks=1", "budget={steps: 2}", "device=cpu"])
    if recipe.evaluation is not None:
        overrides.append("evaluation={name: dead-leaves, count: 1, size: 24, seed: 1}")
    if recipe.operator.name == "ct":  # it is for images of one size, and accurate solutions take long
        overrides += ["operator.size=24", "iteration_limit=200"]
    if "size" in recipe.sampler.options:
        overrides.append("sampler.size=2")
    return load_recipe(path, overrides)


def test_there_are_recipes_and_each_is_shipped_under_its_name() -> None:
    assert {"denoise", "denoise-maid", "smoke"} <= {path.stem for path in FILES}
    assert {path.resolve() for path in shipped_recipes().values()} >= {path.resolve() for path in FILES}


@every_recipe
def test_it_is_valid_and_says_how_to_run_it(path: Path) -> None:
    for variant in recipe_variants(path) or [None]:
        load_recipe(path, [f"variant={variant}"] if variant else [])
    name = path.relative_to(RECIPES).with_suffix("").as_posix()
    comments = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"blt run {name}" in line or f"blt run recipes/{name}" in line for line in comments)


def test_the_first_recipe_takes_any_regularizer_and_a_box() -> None:
    """The first commands of the README and the tutorial replace its regularizer by one that has only an energy."""
    for change in ("regularizer=icnn", "constraint=box"):
        load_recipe("denoise", [change])
        with pytest.raises(RecipeError):
            load_recipe("denoise", [change, "lower_solver=mm"])


@every_variant
def test_it_runs(path: Path, choice: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A reference is tuned by dozens of solves; how well does not matter here.
    for name, value in {"_IMAGES": 1, "_MOVES": 0, "_SWEEPS": 1, "_WIDTH": 1.0}.items():
        monkeypatch.setattr(f"bltoolbox.training.baseline.{name}", value)
    recipe = small(path, choice)
    result = run(recipe)
    assert 1 <= result.steps <= 2
    assert result.cost.computations > 0
    assert all(math.isfinite(record["loss"]) for record in result.history)
    assert all(torch.isfinite(value).all() for value in result.theta.values())
    assert (result.baseline is not None) == (recipe.baseline is not None)
    if result.evaluation is not None:
        assert math.isfinite(result.evaluation.mean())
