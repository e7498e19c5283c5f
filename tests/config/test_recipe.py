"""Recipes: everything wrong with a file is said at once, at its place; a resolved recipe is a fixed point."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bltoolbox.config.block import Block
from bltoolbox.config.reading import RECIPE
from bltoolbox.config.recipe import Recipe, load_recipe, parse_recipe, recipe_from_dict, recipe_variants
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.config.sections import Budget, Validation
from bltoolbox.config.shipped_recipes import shipped_recipes
from bltoolbox.config.yaml_text import Spot, dump, dump_inline, parse, scalar
from bltoolbox.errors import MissingError, Problem, RecipeError, UsageError

SMALL = "data: dead-leaves\nregularizer: {name: foe, filters: 4}\nbudget: {steps: 2}\n"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml", overrides)
    assert caught.value.exit_code == 3
    return [str(problem) for problem in caught.value.problems]


def test_defaults_are_written_out() -> None:
    recipe = parse_recipe(SMALL)
    assert recipe.operator == Block("operator", "identity", {})
    assert recipe.sampler.name == "epoch"
    assert "size" in recipe.sampler.options
    assert recipe.regularizer.options["filters"] == 4
    assert "kernel_size" in recipe.regularizer.options
    assert recipe.budget == Budget(steps=2)
    assert recipe.validation == Validation(metric="psnr")
    assert recipe.noise == Block("noise", "gaussian", {"level": 25 / 255})
    assert recipe.evaluation is None


@pytest.mark.parametrize(
    "text",
    [
        SMALL,
        SMALL + "evaluation: {name: photos, names: [coffee]}\nbaseline: tv\nvalidation: {patience: 3}\n",
        SMALL + "init: '1e-6'\ndevice: 'on'\nnoise: 1e-7\nseed: 012\n",
        SMALL + "init: 'null'\ndevice: \"a: b, {c} # d\\n\"\n",
    ],
)
def test_a_resolved_recipe_is_a_fixed_point(text: str, registry: Registry) -> None:
    recipe = parse_recipe(text, registry=registry)
    again = parse_recipe(recipe.to_yaml(), registry=registry)
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert recipe_from_dict(recipe.to_dict(), registry=registry) == recipe


def test_text_name_and_folder_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# why\n" + SMALL + "init: theta.safetensors\n", encoding="utf-8-sig")
    recipe = load_recipe(path)
    assert recipe.text.startswith("# why\n")
    assert (recipe.name, recipe.folder) == ("mine", tmp_path)
    assert recipe.init == "theta.safetensors"
    assert parse_recipe(SMALL).folder is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E5", 1e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("5.", 5.0), ("012", 12), ("-3", -3),
        ("0x10", 16), ("0o17", 15), ("on", "on"), ("yes", "yes"), ("off", "off"), ("n", "n"), ("true", True),
        ("False", False), ("null", None), ("~", None), ("", None), (".inf", math.inf), ("-.INF", -math.inf),
        ("1_000", "1_000"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("25/255", "25/255"), ("e5", "e5"),
        ("9" * 5000, "9" * 5000), ("=", "="), ("<<", "<<"), (".", "."),
    ],
)  # fmt: skip
def test_scalars_of_yaml_1_2(text: str, value: Any) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_what_is_dumped_is_read_back(data: Any) -> None:
    for text in (dump(data), dump_inline(data)):
        document = parse(text, Spot("x"))
        assert not document.problems
        assert document.data == data
        assert type(document.data) is type(data)


@given(st.text(alphabet=st.sampled_from("ab1: -[]{}#&*!|>'\"%@`,?\n\t\\.~<=é\x00\x85"), max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    document = parse(text, Spot("x"))
    for problem in document.problems:
        assert problem.line >= 1
        assert problem.column >= 1


BAD = """\
seed: -1
data: {name: dead-leaves, cuont: 5, size: many}
lower_solver: {name: adg}
regularizer: {name: foe, kernel_size: 7.5}
sampler: {name: epoch, size: 8}
upper_optimzer: isgd
sampler: full
noise: 25/0
"""


def test_all_problems_of_a_file_at_once_each_at_its_place() -> None:
    assert problems(BAD) == [
        "r.yaml:1:1: budget: missing; expected a mapping of computations, steps, seconds",
        "r.yaml:1:7: seed: expected a whole number of at least 0, got -1",
        "r.yaml:2:27: data.cuont: data 'dead-leaves' has no parameter 'cuont'; did you mean 'count'?",
        "r.yaml:2:43: data.size: expected a whole number greater than 0, got 'many'",
        "r.yaml:3:22: lower_solver: 'adg' is not a registered lower_solver; did you mean 'agd'? "
        "(blt list lower_solver)",
        "r.yaml:4:39: regularizer.kernel_size: expected a whole number of at least 2 and of at most 63, got 7.5",
        "r.yaml:6:1: upper_optimzer: a recipe has no key 'upper_optimzer'; did you mean 'upper_optimizer'?",
        "r.yaml:7:1: sampler: duplicate key, first given in line 5",
        "r.yaml:8:8: noise: expected a number of at least 0 and of at most 1, got '25/0'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:1:1: the recipe is empty; it needs at least data, regularizer and budget"),
        ("# nothing\n---\n", "the recipe is empty; it needs at least data, regularizer and budget"),
        ("- a\n- b\n", "r.yaml:1:1: a recipe is a mapping of keys to values; it needs at least"),
        ("just words", "r.yaml:1:1: a recipe is a mapping of keys to values; it needs at least"),
        ("data:\n\tname: x\n", "r.yaml:2:1: a tab is not allowed here; YAML is indented with spaces"),
        ("data: {name: x\n", "r.yaml:2:1: not valid YAML: "),
        ("a: b: c\n", "r.yaml:1:5: not valid YAML: a ':' is not allowed here"),
        ("a: 'open\n", "not valid YAML: found unexpected end of stream"),
        ("a: \x07\n", "r.yaml:1:4: the character U+0007 is not allowed in YAML"),
        (SMALL + "---\nseed: 1\n", "r.yaml:4:1: a second document begins here"),
        (SMALL + "? [a, b]\n: 1\n", "r.yaml:4:3: a key must be plain text"),
        (SMALL + "seed: &s 1\n", "r.yaml:4:7: seed: anchors (&) and aliases (*) are not allowed"),
        (SMALL + "seed: *s\n", "r.yaml:4:7: seed: anchors (&) and aliases (*) are not allowed"),
        (SMALL + "seed: !!python/object:os.system x\n", "r.yaml:4:7: seed: tags (!) are not allowed"),
        (SMALL + "<<: {seed: 1}\n", "r.yaml:4:1: <<: a recipe has no key '<<'"),
        (SMALL + "init: " + "[" * 5000, "r.yaml:4:27: nested more than 20 levels deep"),
        (SMALL + "seed:\n", "r.yaml:4:6: seed: expected a whole number of at least 0, got nothing"),
        (SMALL + "operator: {}\nlower_solver: {name: 3}\n", "lower_solver.name: expected the name of a lower_solver"),
        (SMALL.replace("steps: 2", ""), "r.yaml:3:9: budget: set at least one of computations, steps and seconds"),
        (SMALL.replace("steps: 2", "steps: 0"), "budget.steps: expected a whole number greater than 0 or null, got 0"),
        (SMALL + "evaluation: {count: 3}\n", "r.yaml:4:13: evaluation: has no name; write {name: …} (blt list data)"),
        (SMALL + "evaluation: phtos\n", "evaluation: 'phtos' is not a registered data; did you mean 'photos'?"),
        (SMALL + "operator: {name: foe}\n", "'foe' is not a registered operator; it is of kind regularizer"),
        (SMALL + "color: grey\n", "color: expected one of 'rgb', 'gray', got 'grey'; did you mean 'gray'?"),
        (SMALL + "validation: {evaluation: true}\n", "validation.evaluation: there are no evaluation images"),
        (SMALL + "noise: .nan\n", "noise: expected a number of at least 0 and of at most 1, finite, got"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_clear_sentence(text: str, message: str) -> None:
    found = problems(text)
    assert len(found) == 1, found
    assert message in found[0]


def test_a_recipe_of_a_newer_format_is_refused_for_that_alone() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(SMALL + "version: 99\nnew_key: 1\n", "new.yaml")
    assert len(caught.value.problems) == 1
    assert "format 99, but this bltoolbox reads up to" in str(caught.value)


def test_structural_and_semantic_problems_are_reported_together() -> None:
    assert len(problems(SMALL + "seed: *s\nnoise: loud\nbudget: {}\n")) == 3


def test_files_that_cannot_be_recipes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml does not exist"):
        load_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        load_recipe(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"seed: 1\n# caf\xe9\n")
    with pytest.raises(RecipeError, match=r"latin\.yaml:2:6: the file is not UTF-8 text"):
        load_recipe(latin)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (RECIPE.most + 1))
    with pytest.raises(RecipeError, match="larger than 1000 kB"):
        load_recipe(large)


def test_shipped_recipes_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"denoise": tmp_path / "denoise.yaml", "paper/one": tmp_path / "paper" / "one.yaml"}
    monkeypatch.setattr("bltoolbox.config.shipped_recipes.shipped_recipes", lambda: shipped)
    for path in shipped.values():
        path.parent.mkdir(exist_ok=True)
        path.write_text(SMALL)
    monkeypatch.chdir(tmp_path / "paper")
    assert load_recipe("denoise").name == "denoise"
    assert load_recipe("paper/one").name == "one"
    with pytest.raises(UsageError, match="did you mean 'denoise'"):
        load_recipe("denoize.yaml")
    (tmp_path / "paper" / "denoise").write_text(SMALL + "seed: 5\n")
    assert load_recipe("denoise").seed == 5, "a file of that name comes first"


def test_every_shipped_recipe_is_valid(registry: Registry) -> None:
    choices = [
        (name, path, [f"variant={variant}"] if variant else [])
        for name, path in shipped_recipes().items()
        for variant in recipe_variants(path) or [None]
    ]
    for name, path, choice in choices:
        recipe = load_recipe(name, choice, registry)
        assert recipe == load_recipe(path, choice, registry)
        assert parse_recipe(recipe.to_yaml(), registry=registry) == recipe


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["seed=3"], {"seed": 3}),
        (["seed=3", "seed=4"], {"seed": 4}),
        (["noise=10/255"], {"noise": Block("noise", "gaussian", {"level": 10 / 255})}),
        (["noise.level=10/255"], {"noise": Block("noise", "gaussian", {"level": 10 / 255})}),
        (["noise=0.2", "noise.level=0.1"], {"noise": Block("noise", "gaussian", {"level": 0.1})}),
        (["noise=uniform", "noise=0.1"], {"noise": Block("noise", "gaussian", {"level": 0.1})}),
        (["noise=0.1", "noise=uniform"], {"noise": Block("noise", "uniform", {"width": 0.1})}),
        (
            ["noise=0.1", "noise={name: uniform, width: 1/2}"],
            {"noise": Block("noise", "uniform", {"width": 0.5})},
        ),
        (["budget={computations: 1e3}"], {"budget": Budget(computations=1000.0)}),
        (["budget.seconds=5"], {"budget": Budget(steps=2, seconds=5.0)}),
        (["budget.seconds=5", "budget={steps: 9}"], {"budget": Budget(steps=9, seconds=5.0)}),
        (["init="], {"init": None}),
        (["init=a=b"], {"init": "a=b"}),
        (["validation.count=0"], {"validation": Validation(count=0, metric="psnr")}),
    ],
)
def test_overrides(overrides: list[str], wanted: dict[str, Any], registry: Registry) -> None:
    recipe = parse_recipe(SMALL, overrides=overrides, registry=registry)
    assert {key: getattr(recipe, key) for key in wanted} == wanted


@pytest.mark.parametrize("switch", ["regularizer=tv", "regularizer.name=tv", "regularizer={name: tv}"])
def test_switching_a_component_drops_the_options_of_the_old_one(switch: str, registry: Registry) -> None:
    tv = parse_recipe(SMALL.replace("{name: foe, filters: 4}", "tv"), registry=registry)
    assert parse_recipe(SMALL, overrides=[switch], registry=registry) == tv
    for order in ([switch, "regularizer=foe"], ["regularizer=foe"]):
        again = parse_recipe(SMALL, overrides=order, registry=registry)
        assert again.regularizer.name == "foe"


def test_options_are_set_on_the_component_meant_in_any_order(registry: Registry) -> None:
    for overrides in (
        ["regularizer.filters=3", "regularizer.name=foe"],
        ["regularizer=foe", "regularizer.filters=3"],
    ):
        recipe = parse_recipe(SMALL.replace("foe, filters: 4", "tv"), overrides=overrides, registry=registry)
        assert recipe.regularizer.options["filters"] == 3
    short = parse_recipe(SMALL, overrides=["data.count=7"], registry=registry)
    assert (short.data.name, short.data.options["count"]) == ("dead-leaves", 7)
    default = parse_recipe(SMALL, overrides=["sampler.size=8"], registry=registry)
    assert (default.sampler.name, default.sampler.options["size"]) == ("epoch", 8)
    made = parse_recipe(SMALL, overrides=["evaluation.name=photos", "evaluation.size=64"], registry=registry)
    assert made.evaluation is not None
    assert made.evaluation.options["size"] == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampler.sise=8", "<override>:1:14: sampler.sise: sampler 'epoch' has no parameter 'sise'; did you mean"),
        ("budget={steps: x}", "<override>:1:16: budget.steps: expected a whole number greater than 0 or null, got 'x'"),
        ("sede=1", "<override>:1:6: sede: a recipe has no key 'sede'; did you mean 'seed'?"),
        ("seed", "<override>:1:1: 'seed' is not an override; write key=value, e.g. sampler.size=8"),
        ("=3", "<override>:1:1: '=3' is not an override; write key=value"),
        ("data..count=3", "<override>:1:1: 'data..count=3' is not an override; write key=value"),
        ("budget={steps: 2", "<override>:1:17: not valid YAML"),
        ("lower_solver=adg", "<override>:1:14: lower_solver: 'adg' is not a registered lower_solver; did you mean"),
        ("noise.x=1", "<override>:1:9: noise.x: noise 'gaussian' has no parameter 'x' (it has level)"),
        ("noise=[1]", "<override>:1:7: noise: expected a number or a noise, e.g. {name: …} (blt list noise) or null"),
        ("noise=2", "noise: expected a number of at least 0 and of at most 1, got 2; images are in [0, 1], did you"),
    ],
)  # fmt: skip
def test_bad_overrides(override: str, message: str) -> None:
    found = problems(SMALL, override)
    assert len(found) == 1, found
    assert message in found[0]


def test_problems_of_overrides_are_numbered() -> None:
    found = problems(SMALL, "seed=1", "noise=loud", "chunk=0")
    assert [line.partition(" ")[0] for line in found] == ["<override>:2:7:", "<override>:3:7:"]


def test_python_use(registry: Registry) -> None:
    settings = {
        "data": Block("data", "dead-leaves", {"count": 3}),
        "regularizer": "tv",
        "budget": Budget(steps=1),
        "noise": 0.1,
    }
    recipe = recipe_from_dict(settings, registry=registry)
    assert isinstance(recipe, Recipe)
    assert recipe.data.options["count"] == 3
    assert recipe == parse_recipe(recipe.to_yaml(), registry=registry)
    with pytest.raises(RecipeError, match="noise: 'loud' is not a registered noise"):
        recipe_from_dict(settings | {"noise": "loud"}, registry=registry)
    with pytest.raises(ValueError, match="at least one"):
        Budget()


def test_problems_found_later_have_a_place(registry: Registry) -> None:
    recipe = parse_recipe(SMALL, "r.yaml", ["sampler.size=8"], registry)
    assert recipe.problem_at("regularizer.filters", "too many") == Problem(
        "regularizer.filters: too many", "r.yaml", 2, 35
    )
    assert recipe.problem_at("sampler.size", "too large").file == "<override>"
    assert recipe.problem_at("operator.nothing", "odd").line == 1
    assert recipe_from_dict(recipe.to_dict(), registry=registry).problem_at("seed", "odd").file == "<recipe>"


def test_a_component_that_cannot_be_imported_is_no_fault_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = load_registry()

    def refuse(self: Any) -> None:
        raise MissingError("needs a package that is not there")

    monkeypatch.setattr("bltoolbox.config.registry.Registered.signature", refuse)
    with pytest.raises(MissingError, match=r"r\.yaml:1:7: data: needs a package that is not there"):
        parse_recipe(SMALL, "r.yaml", registry=registry)
    with pytest.raises(RecipeError):
        parse_recipe(SMALL + "seed: x\n", "r.yaml", registry=registry)
