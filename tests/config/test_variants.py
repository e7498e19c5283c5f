"""Several settings of one experiment in one recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import caller

from bltoolbox.config.recipe import load_recipe, parse_recipe, recipe_variants
from bltoolbox.errors import RecipeError
from bltoolbox.runs.settings import labels
from bltoolbox.training.sweep.grid import parse_grid, with_variants

TEXT = """\
data: {name: dead-leaves, count: 6, size: 16}
regularizer: tv
sampler: {name: epoch, size: 2}
upper_optimizer: {name: isgd, step: 1e-2}
budget: {steps: 1}
variants:
  short: {upper_optimizer.step: 1e-4}
  all: {sampler: full, upper_optimizer: {name: maid, trials: 7}}
"""


def variant(name: str, *overrides: str, text: str = TEXT) -> dict:
    return parse_recipe(text, overrides=[f"variant={name}", *overrides]).to_dict()


def problems(*overrides: str, text: str = TEXT) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides=overrides)
    return str(caught.value)


def test_a_variant_replaces_sections_and_options() -> None:
    short, whole = variant("short"), variant("all")
    assert short["upper_optimizer"]["name"] == "isgd" and short["upper_optimizer"]["step"] == 1e-4
    assert whole["sampler"] == {"name": "full"} and whole["upper_optimizer"]["trials"] == 7
    assert (short["variant"], whole["variant"]) == ("short", "all")


def test_overrides_come_after_it() -> None:
    assert variant("short", "upper_optimizer.step=3")["upper_optimizer"]["step"] == 3


def test_a_resolved_recipe_keeps_the_name_and_loads_again() -> None:
    recipe = parse_recipe(TEXT, overrides=["variant=all"])
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_one_must_be_chosen() -> None:
    assert "choose one of short, all by variant=NAME, or run all of them with blt sweep" in problems()
    assert "there is no variant 'shrt'; did you mean 'short'?" in problems("variant=shrt")


def test_a_mistake_in_a_variant_is_reported_where_it_stands() -> None:
    wrong = TEXT.replace("trials: 7", "trails: 7")
    line = wrong.splitlines()[7]
    assert f"<recipe>:8:{line.index('trails') + 1}" in problems("variant=all", text=wrong)
    assert "did you mean 'trials'?" in problems("variant=all", text=wrong)


@pytest.mark.parametrize("section", ["variants: 3", "variants: {}", "variants: {a: 3}", "variants: [a, b]"])
def test_what_is_not_a_mapping_of_settings_is_refused(section: str) -> None:
    text = TEXT[: TEXT.index("variants")] + section
    assert "variants: expected names with settings" in problems("variant=a", text=text)


@pytest.mark.parametrize(
    "name", ["1", "'1'", "true", "1e3", "''", "' a '", "'[x]'", "'a: b'", '"a\\nb"', '"\\e[31m"']
)
def test_a_name_that_cannot_be_chosen_is_refused(name: str) -> None:
    text = f"variant: '1'\n{TEXT}  {name}: {{seed: 1}}\n"
    for overrides in ([], ["variant=short"]):
        told = problems(*overrides, text=text)
        assert "is not a name that variant=NAME can choose" in told and told.isprintable()


def test_a_variant_has_no_variants() -> None:
    text = TEXT.replace("upper_optimizer.step: 1e-4", "variant: all")
    assert "a variant sets keys of a recipe, not 'variant'" in problems("variant=short", text=text)


def test_a_sweep_runs_all_of_them_unless_it_names_some(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TEXT)
    assert recipe_variants(path) == ["short", "all"]
    grid = with_variants(parse_grid(["seed=0,1"]), recipe_variants(path))
    assert [cell.settings for cell in grid.cells()] == [
        {"variant": name, "seed": seed} for name in ("short", "all") for seed in ("0", "1")
    ]
    chosen = parse_grid(["variant=all", "seed=0,1"])
    assert with_variants(chosen, recipe_variants(path)) == chosen
    assert with_variants(chosen, []) == chosen


def test_labels_are_their_names_and_what_else_differs() -> None:
    recipes = [variant("short"), variant("all"), variant("all", "upper_optimizer.trials=3")]
    assert labels(recipes) == ["short", "all, upper_optimizer.trials=7", "all, upper_optimizer.trials=3"]


def test_validate_checks_every_variant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TEXT.replace("trials: 7", "trails: 7"))
    result = caller("validate", capfd)(str(path), "--json")
    assert result.returncode == 3
    assert [(one["variant"], one["valid"]) for one in json.loads(result.stdout)] == [
        ("short", True),
        ("all", False),
    ]
    assert load_recipe(path, ["variant=short"]).variant == "short"
