"""The JSON Schema says of recipes what the validator says, and documents every component."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from test_components import Run
from test_recipe import BAD, SMALL
from test_signatures import SIGNATURE

from bltoolbox.config import schema as schema_module
from bltoolbox.config.describe import describe
from bltoolbox.config.recipe import Recipe, parse_recipe, recipe_from_dict, recipe_variants
from bltoolbox.config.registry import load_registry
from bltoolbox.config.schema import SCHEMA_FILE, dump_schema, recipe_schema
from bltoolbox.config.shipped_recipes import shipped_recipes
from bltoolbox.config.signatures import Parameter, Type
from bltoolbox.config.validation import Checker
from bltoolbox.config.yaml_text import Spot, parse
from bltoolbox.errors import RecipeError

REGISTRY = load_registry()
SCHEMA, TROUBLES = recipe_schema(REGISTRY)
VALIDATOR = Draft202012Validator(SCHEMA)


def data(text: str) -> Any:
    document = parse(text, Spot("x"))
    assert not document.problems
    return document.data


def accepted_by_validator(text: str) -> bool:
    try:
        parse_recipe(text, registry=REGISTRY)
    except RecipeError:
        return False
    return True


def test_it_is_a_schema_and_covers_everything() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert TROUBLES == []
    assert json.loads(dump_schema(SCHEMA)) == SCHEMA
    for registered in REGISTRY.components():
        definition = SCHEMA["$defs"][f"{registered.kind}.{registered.name}"]
        assert registered.component.summary in definition["description"]
        for parameter in registered.signature().parameters:
            told = definition["properties"][parameter.name]
            assert told["description"] == parameter.doc
            assert parameter.required or told["default"] == parameter.default
    for parameter in describe(Recipe).parameters:
        assert SCHEMA["properties"][parameter.name]["description"] == parameter.doc


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_recipe_is_accepted_as_written_and_as_resolved(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert [error.message for error in VALIDATOR.iter_errors(data(text))] == []
    for variant in recipe_variants(name) or [None]:
        choice = [f"variant={variant}"] if variant else []
        resolved = parse_recipe(text, overrides=choice, registry=REGISTRY).to_yaml()
        assert [error.message for error in VALIDATOR.iter_errors(data(resolved))] == []
    assert f"# yaml-language-server: $schema={SCHEMA_FILE}\n" in text


GOOD = [
    SMALL,
    SMALL + "noise: 1/10\nsampler: {size: 8}\noperator: identity\nbaseline: tv\nevaluation: null\n",
    SMALL + "noise: {level: 25/255}\n",
    SMALL + "noise: {name: poisson, peak: 1e4}\ndata_term: poisson\nconstraint: nonnegative\n",
    SMALL + "noise: 0\nchunk: 1e2\nstrong_convexity: 1/3\n",
    SMALL + "sampler: {}\nvalidation: {patience: 3}\n",
    SMALL.replace("steps: 2", "steps: null, computations: 1e5"),
]

MISTAKES = [
    SMALL + "sede: 1\n",
    SMALL + "seed: -1\n",
    SMALL + "seed: 1.5\n",
    SMALL + "seed: true\n",
    SMALL + "seed: '1'\n",
    SMALL + "seed:\n",
    SMALL + "noise: loud\n",
    SMALL + "noise: -1/2\n",
    SMALL + "noise: 1/0\n",
    SMALL + "noise: 1/0.0e5\n",
    SMALL + "noise: 1.2.3/4\n",
    SMALL + "noise: -1\n",
    SMALL + "noise: 25\n",
    SMALL + "noise: true\n",
    SMALL + "noise: [0.1]\n",
    SMALL + "noise: {name: 0.1}\n",
    SMALL + "noise: {name: gaussian, level: -1}\n",
    SMALL + "operator: 0.1\n",
    SMALL + "color: grey\n",
    SMALL + "sampler: epcoh\n",
    SMALL + "sampler: agd\n",
    SMALL + "sampler: 3\n",
    SMALL + "sampler: [epoch]\n",
    SMALL + "sampler: {size: 0}\n",
    SMALL + "sampler: {name: full, size: 8}\n",
    SMALL + "sampler: {name: 3}\n",
    SMALL + "evaluation: {count: 3}\n",
    SMALL + "evaluation: array\n",
    SMALL + "evaluation: {name: array}\n",
    SMALL + "validation: {count: -1}\n",
    SMALL + "validation: 3\n",
    SMALL + "init: 3\n",
    SMALL.replace("filters: 4", "filtres: 4"),
    SMALL.replace("filters: 4", "filters: 4.5"),
    SMALL.replace("data: dead-leaves\n", ""),
    SMALL.replace("budget: {steps: 2}", ""),
    SMALL.replace("{steps: 2}", "{}"),
    SMALL.replace("{steps: 2}", "{steps: null}"),
    SMALL.replace("{steps: 2}", "{steps: 0}"),
    SMALL.replace("{steps: 2}", "2"),
]


@pytest.mark.parametrize("text", GOOD)
def test_good_recipes_are_accepted_by_both(text: str) -> None:
    assert accepted_by_validator(text)
    assert [error.message for error in VALIDATOR.iter_errors(data(text))] == []


@pytest.mark.parametrize("text", MISTAKES)
def test_bad_recipes_are_refused_by_both(text: str) -> None:
    assert not accepted_by_validator(text)
    assert not VALIDATOR.is_valid(data(text))


def test_a_mistake_is_marked_where_it_is() -> None:
    text = SMALL.replace("filters: 4", "filters: 4, kernel_size: 7.5")
    (error,) = VALIDATOR.iter_errors(data(text))
    while error.context:
        error = error.context[0]
    assert list(error.absolute_path) == ["regularizer", "kernel_size"]
    assert not VALIDATOR.is_valid(parse(BAD, Spot("x")).data)


def values(type: Type) -> st.SearchStrategy[Any]:
    """Values near those that a type takes: some right, some out of bounds, some of another type."""
    near = [bound for key, bound in type.bounds.items() if key in ("gt", "ge", "lt", "le")]
    numbers = [number + shift for number in [0, 3, *near] for shift in (-1, 0, 1, 0.5)]
    odd: st.SearchStrategy[Any] = st.sampled_from([None, True, "x", "", 1.5, -3, [], {}, [1], "1/2", "7"])
    if type.name == "union":
        return st.one_of(*(values(option) for option in type.items))
    if type.name in ("int", "float"):
        return st.sampled_from(numbers) | odd
    if type.name == "choice":
        return st.sampled_from(type.choices) | odd
    if type.name in ("list", "tuple"):
        return st.lists(values(type.items[0]), max_size=4) | odd
    if type.name == "fixed":
        return st.tuples(*map(values, type.items)).map(list) | odd
    if type.name == "settings":
        return (
            st.fixed_dictionaries({}, optional={one.name: values(one.type) for one in type.parameters}) | odd
        )
    if type.name == "component":
        return components(type.role or "") | odd
    return {"bool": st.booleans(), "null": st.none()}.get(type.name, st.text(max_size=3)) | odd


@cache
def components(kind: str) -> st.SearchStrategy[Any]:
    """Blocks of a kind; deferred, since components may contain components of their own kind."""
    return st.deferred(lambda: st.one_of(*map(blocks, REGISTRY.components(kind))))


def blocks(registered: Any) -> st.SearchStrategy[Any]:
    known = {parameter.name: values(parameter.type) for parameter in registered.signature().parameters}
    options = st.fixed_dictionaries({"name": st.just(registered.name)}, optional=known)
    extra = st.sampled_from([{}, {}, {}, {"unknown": 1}])
    return st.just(registered.name) | st.builds(lambda one, two: one | two, options, extra)


def out_of_bounds_as_fraction(value: Any) -> bool:
    """A fraction anywhere: whether its value is within bounds only the validator can tell."""
    if isinstance(value, dict):
        return any(map(out_of_bounds_as_fraction, value.values()))
    if isinstance(value, list):
        return any(map(out_of_bounds_as_fraction, value))
    return isinstance(value, str) and "/" in value


def agree(verdict: bool, schema: Draft202012Validator, value: Any) -> None:
    if verdict or not out_of_bounds_as_fraction(value):
        assert schema.is_valid(value) == verdict, value


#: Without the problem, which decides whether the sections for images are required or refused.
SETTINGS = {one.name: one for one in describe(Recipe).parameters if one.name != "problem"}
VALUES = {name: values(one.type) for name, one in SETTINGS.items()}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=3, unique=True), st.data())
def test_schema_and_validator_agree_on_variations_of_a_recipe(names: list[str], draw: st.DataObject) -> None:
    recipe = data(SMALL) | {name: draw.draw(VALUES[name]) for name in names}
    checker = Checker(REGISTRY)
    found = checker.parameters(tuple(SETTINGS.values()), recipe, (), "a recipe")
    verdict = not checker.issues and any(item is not None for item in found["budget"].values())
    agree(verdict, VALIDATOR, recipe)
    if verdict:  # and, unless components do not fit together, the whole way
        try:
            recipe_from_dict(recipe, registry=REGISTRY)
        except RecipeError as error:
            assert any(f"; {word} " in str(error) for word in ("use", "choose", "add", "give", "remove"))


PROBLEM = {"problem": "ridge", "budget": {"steps": 2}}
IMAGES = {"data": "dead-leaves", "regularizer": "tv", "budget": {"steps": 2}}


@pytest.mark.parametrize(
    ("recipe", "verdict"),
    [
        (PROBLEM, True),
        ({"budget": {"steps": 2}}, False),
        (PROBLEM | {"problem": {"name": "few-shot", "tasks": 3}}, True),
        (PROBLEM | {"problem": {"name": "few-shot", "tasks": 0}}, False),
        (PROBLEM | {"data": "dead-leaves"}, False),
        (PROBLEM | {"noise": 0.1}, False),
        (PROBLEM | {"color": "gray"}, False),
        (PROBLEM | {"problem": "variational"}, False),
        (IMAGES, True),
        (IMAGES | {"problem": "variational"}, True),
        (IMAGES | {"problem": {"name": "variational"}}, True),
        (IMAGES | {"problem": "ridge"}, False),
    ],
)
def test_they_agree_on_problems(recipe: dict[str, Any], verdict: bool) -> None:
    assert VALIDATOR.is_valid(recipe) == verdict
    if verdict:
        recipe_from_dict(recipe, registry=REGISTRY)
    else:
        with pytest.raises(RecipeError):
            recipe_from_dict(recipe, registry=REGISTRY)


@pytest.mark.parametrize("parameter", SIGNATURE.parameters, ids=lambda parameter: parameter.name)
def test_they_agree_on_every_annotation_there_is(parameter: Parameter) -> None:
    schema = schema_module._parameter(parameter)
    Draft202012Validator.check_schema(schema)
    json.dumps(schema, allow_nan=False)
    validator = Draft202012Validator(schema | {"$defs": SCHEMA["$defs"]})

    @settings(max_examples=40)
    @given(values(parameter.type))
    def check(value: Any) -> None:
        checker = Checker(REGISTRY)
        checker.value(parameter.type, value, (parameter.name,))
        agree(not checker.issues, validator, value)

    check()


def test_what_cannot_be_json_is_left_out() -> None:
    (top,) = (parameter for parameter in SIGNATURE.parameters if parameter.default == math.inf)
    assert "default" not in schema_module._parameter(top)


def test_the_command(blt: Run, tmp_path: Path) -> None:
    done = blt("schema", "-o", f"sub/{SCHEMA_FILE}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"sub/{SCHEMA_FILE}\n"), done.stderr
    assert json.loads((tmp_path / "sub" / SCHEMA_FILE).read_text(encoding="utf-8")) == SCHEMA
    assert json.loads(blt("schema").stdout) == SCHEMA
    text = blt("schema", "--help").stdout
    assert f"# yaml-language-server: $schema={SCHEMA_FILE}" in text
    assert f"blt cp denoise && blt schema -o {SCHEMA_FILE}" in text


def test_recipes_and_cp(blt: Run, tmp_path: Path) -> None:
    found = {one["name"]: one for one in json.loads(blt("recipes", "--json").stdout)}
    assert set(found) == set(shipped_recipes())
    assert found["smoke"]["summary"].startswith("A run of a few seconds")
    assert Path(found["smoke"]["path"]) == ROOT / "recipes" / "smoke.yaml"
    lines = blt("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert all(line.endswith(one["summary"]) for line, one in zip(lines, found.values(), strict=True))
    folders = ["/" in name for name in found]
    assert folders == sorted(folders), "recipes to start with come before those in folders"
    assert all(one["summary"].endswith(".") for one in found.values()), "a summary is a whole sentence"
    original = (ROOT / "recipes" / "smoke.yaml").read_bytes()
    (tmp_path / "folder").mkdir()
    for dest, wanted in (
        ("", "smoke.yaml"),
        ("folder", "folder/smoke.yaml"),
        ("new/", "new/smoke.yaml"),
        ("a b/c.yaml",) * 2,
    ):
        done = blt("cp", "smoke", *filter(None, [dest]), cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{wanted}\n"), done.stderr
        assert "blt schema -o" in done.stderr
        assert (tmp_path / wanted).read_bytes() == original
    (tmp_path / "smoke.yaml").write_text("mine")
    done = blt("cp", "smoke", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "smoke.yaml exists; choose another name, or replace it with --force" in done.stderr
    assert (tmp_path / "smoke.yaml").read_text() == "mine"
    assert blt("cp", "smoke", "--force", cwd=tmp_path).returncode == 0
    assert (tmp_path / "smoke.yaml").read_bytes() == original
    wrong = blt("cp", "smoek", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'smoke'?" in wrong.stderr
    assert blt("cp", "smoke", "smoke.yaml/under", cwd=tmp_path).returncode == 2
