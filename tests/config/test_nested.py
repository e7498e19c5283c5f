"""Components within components, and components that ask something of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Install
from test_components import command, imported
from test_recipe import problems

from bltoolbox.bilevel.roles import Sampler
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import find_misfits
from bltoolbox.config.describe import Undescribable, describe
from bltoolbox.config.recipe import Recipe, parse_recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.config.sections import Budget
from bltoolbox.errors import RecipeError
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.training.assemble import assemble

SUM = '''
"""A sum of regularizers."""
from bltoolbox.plugin import Component, LowerSolver, Regularizer, hookimpl, join, split

class Sum(Regularizer):
    """R = R_1 + R_2 + …

    Args:
        first: One part.
        second: Another part.
        more: Further parts.
    """
    def __init__(self, first: Regularizer, second: Regularizer | None = None, more: list[Regularizer] = []) -> None:
        parts = {"first": first, "second": second} | {f"more{k}": part for k, part in enumerate(more)}
        self.parts = {name: part for name, part in parts.items() if part is not None}
    def init_params(self, shape, generator):
        return join(**{name: part.init_params(shape, generator) for name, part in self.parts.items()})
    def energy(self, theta, x):
        return sum(part.energy(split(theta, name), x) for name, part in self.parts.items())

class Picky(Regularizer):
    """Args:
        count: Not 13.
    """
    def __init__(self, count: int = 1) -> None:
        if count == 13:
            raise ValueError("count 13 brings bad luck; use 12")
    def init_params(self, shape, generator): return {}
    def energy(self, theta, x): return x.flatten(1).sum(1) * 0

class Outer(LowerSolver):
    def __init__(self, inner: LowerSolver) -> None: ...
    def init(self, lower, x0, kept): raise NotImplementedError
    def step(self, lower, state): raise NotImplementedError

class Secret(LowerSolver):
    requires = {"regularizer": ("a_handshake",)}
    def init(self, lower, x0, kept): raise NotImplementedError
    def step(self, lower, state): raise NotImplementedError

class Shaking(Picky):
    def a_handshake(self): ...

@hookimpl
def blt_components():
    def known(kind, cls):
        return Component(kind, cls.__name__.lower(), f"{__name__}:{cls.__name__}", "For tests.")
    return [known("regularizer", Sum), known("regularizer", Picky), known("regularizer", Shaking),
            known("lower_solver", Outer), known("lower_solver", Secret)]
'''

REST = (
    "data: {name: dead-leaves, count: 4, size: 16}\nvalidation: {count: 1, checks: 1}\nbudget: {steps: 2}\n"
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nested") / "sum.py"
    path.write_text(SUM)
    return path


@pytest.fixture(scope="module")
def registry(file: Path) -> Registry:
    return load_registry([file])


def refused(text: str, registry: Registry) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(REST + text, "r.yaml", registry=registry)
    return [problem.message for problem in caught.value.problems]


def test_a_sum_of_regularizers_trains(registry: Registry) -> None:
    text = "regularizer:\n  name: sum\n  first: {name: tv, weight: 0.05}\n  second: tv\nsampler: {size: 2}\n"
    recipe = parse_recipe(REST + text, overrides=["regularizer.first.weight=0.1"], registry=registry)
    assert recipe.regularizer.options["first"].options["weight"] == 0.1
    result = assemble(recipe, registry).run()
    assert result.steps == 2
    assert set(result.model.theta) == {
        f"regularizer.{part}.{name}"
        for part in ("first", "second")
        for name in ("log_weight", "log_smoothing")
    }
    assert parse_recipe(recipe.to_yaml(), registry=registry) == recipe


def test_the_parts_of_a_sum_are_what_they_are_alone(registry: Registry) -> None:
    def built(block: str) -> Regularizer:
        recipe = parse_recipe(REST + f"regularizer: {block}\n", registry=registry)
        part: Regularizer = registry.build(recipe.regularizer)
        return part

    both = built("{name: sum, first: {name: tv, weight: 0.3}, more: [{name: tv, nu: 0.5}]}")
    parts = [built("{name: tv, weight: 0.3}"), built("{name: tv, nu: 0.5}")]
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator()
    alone = sum(part.energy(part.init_params((3, 8, 8), generator), x) for part in parts)
    together = both.energy(theta := both.init_params((3, 8, 8), generator), x)
    assert torch.allclose(together, torch.as_tensor(alone))
    assert set(theta) == {
        "first.log_weight",
        "first.log_smoothing",
        "more0.log_weight",
        "more0.log_smoothing",
    }


@pytest.mark.parametrize(
    ("block", "messages"),
    [
        ("{name: sum}", ["regularizer.first: missing; expected a regularizer, e.g. {name: …}"]),
        ("{name: sum, first: {weight: 1}}", ["regularizer.first: has no name; write {name: …}"]),
        ("{name: sum, first: tvv}", ["regularizer.first: 'tvv' is not a registered regularizer; did you mean 'tv'?"]),
        ("{name: sum, first: agd}", ["regularizer.first: 'agd' is not a registered regularizer; it is of kind"]),
        ("{name: sum, first: {name: tv, weight: 0}}", ["regularizer.first.weight: expected a number greater than 0"]),
        ("{name: sum, first: tv, second: {name: tv, wieght: 1}}", ["regularizer.second.wieght: regularizer 'tv' has"]),
        ("{name: sum, first: tv, more: tv}", ["regularizer.more: expected a list, each a regularizer"]),
        (
            "{name: sum, first: 3, more: [tv, {name: tv, nu: -1}]}",
            ["regularizer.first: expected a regularizer", "regularizer.more[1].nu: expected a number greater than 0"],
        ),
    ],
)  # fmt: skip
def test_mistakes_within_are_told_where_they_are(block: str, messages: list[str], registry: Registry) -> None:
    found = refused(f"regularizer: {block}\n", registry)
    assert len(found) == len(messages)
    for sentence, message in zip(found, messages, strict=True):
        assert message in sentence


def test_null_is_no_part(registry: Registry) -> None:
    recipe = parse_recipe(REST + "regularizer: {name: sum, first: tv, second: null}\n", registry=registry)
    assert recipe.regularizer.options["second"] is None
    assert parse_recipe(recipe.to_yaml(), registry=registry) == recipe


def test_what_the_constructor_of_a_part_refuses_names_the_part(registry: Registry) -> None:
    text = REST + "regularizer: {name: sum, first: {name: picky, count: 13}}\n"
    with pytest.raises(RecipeError, match="regularizer: sum: picky: count 13 brings bad luck; use 12"):
        assemble(parse_recipe(text, registry=registry), registry)


def test_a_part_may_not_have_an_object_as_default() -> None:
    class Odd(Regularizer):
        def __init__(self, part: Regularizer = 3) -> None: ...  # type: ignore[assignment]

    with pytest.raises(Undescribable, match="'part' of Odd has a default that violates its annotation"):
        describe(Odd)


def test_traits() -> None:
    traits = load_registry().get("lower_solver", "mm").signature().traits
    assert traits.requires == {
        "regularizer": ("analyse", "synthesise", "majorant"),
        "data_term": ("majorant",),
    }
    assert "handles_constraint" not in traits.flags
    assert "handles_constraint" in load_registry().get("lower_solver", "agd").signature().traits.flags
    foe = load_registry().get("regularizer", "foe").signature().traits
    assert {"analyse", "synthesise", "majorant", "lipschitz", "energy"} <= set(foe.offers)
    assert "check_nothing" not in foe.offers
    assert load_registry().get("sampler", "full").signature().traits.flags == ("full",)
    assert set(load_registry().get("upper_optimizer", "maid").signature().traits.flags) == {
        "full_batch",
        "handles_floor",
        "needs_bound",
    }


@pytest.mark.parametrize("requires", [{"regularizr": ("a",)}, {"regularizer": "analyse"}, ["analyse"]])
def test_odd_requirements_are_told_to_the_author(requires: Any) -> None:
    odd = type("Odd", (Sampler,), {"requires": requires})
    with pytest.raises(Undescribable, match="requires of Odd must map kinds to"):
        describe(odd)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "regularizer: sum\nlower_solver: mm\n".replace(": sum", ": {name: sum, first: tv}"),
            "lower_solver: 'mm' needs a regularizer with analyse, synthesise and majorant, "
            "which 'sum' does not have; use agd",
        ),
        (
            "regularizer: {name: sum, first: tv}\nlower_solver: {name: outer, inner: mm}\n",
            "lower_solver: 'mm' needs a regularizer with analyse, synthesise and majorant, which 'sum' does not have",
        ),
        (
            "regularizer: tv\nlower_solver: secret\n",
            "lower_solver: 'secret' needs a regularizer with a_handshake, which 'tv' does not have; use agd",
        ),
        (
            "regularizer: tv\nlower_solver: mm\nconstraint: box\n",
            "lower_solver: 'mm' cannot keep x in the constraint 'box'; use agd",
        ),
        (
            "regularizer: tv\nlower_solver: mm\nbaseline: picky\n",
            "lower_solver: 'mm' needs a regularizer with analyse, synthesise and majorant, which 'picky' does not have",
        ),
        (
            "regularizer: tv\nupper_optimizer: maid\n",
            "sampler: upper_optimizer 'maid' needs all data at each step, which sampler 'epoch' does not provide;"
            " use full",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence_with_an_alternative(
    text: str, message: str, registry: Registry
) -> None:
    (found,) = refused(text, registry)
    assert message in found
    assert "; use " in found


def test_every_alternative_that_is_named_fits(registry: Registry) -> None:
    (sentence,) = refused("regularizer: {name: sum, first: tv}\nlower_solver: mm\n", registry)
    names = sentence.rpartition("; use ")[2].replace(" or ", ", ").split(", ")
    for name in names:
        parse_recipe(
            REST + f"regularizer: {{name: sum, first: tv}}\nlower_solver: {name}\n", registry=registry
        )


def test_methods_of_no_role_may_be_agreed_on(registry: Registry) -> None:
    parse_recipe(REST + "regularizer: shaking\nlower_solver: secret\n", registry=registry)


def test_an_error_bound_needs_an_adjoint(install: Install) -> None:
    hook = "from bltoolbox.plugin import Component, hookimpl\n@hookimpl\ndef blt_components():\n    return "
    hook += "[Component('hypergradient', 'adjointless', 'toy_heavy:Toy', 'A toy.')]\n"
    heavy = "from bltoolbox.plugin import HypergradientEstimator\nclass Toy(HypergradientEstimator):\n"
    heavy += "    gives_adjoint = False\n    def estimate(self, ask): ...\n"
    install("toy", {"toy": "toy_light"}, {"toy_light": hook, "toy_heavy": heavy})
    text = REST + "regularizer: tv\nhypergradient: adjointless\nsampler: full\nupper_optimizer: maid\n"
    (found,) = refused(text.removeprefix(REST), load_registry())
    assert found.startswith(
        "hypergradient: upper_optimizer 'maid' needs an error bound, for which hypergradient 'adjointless' has no "
        "adjoint; use cg-ift"
    )


def test_misfits_and_other_problems_are_told_together_at_their_places() -> None:
    text = (
        REST
        + "regularizer: {name: tv, weight: 0}\nlower_solver: mm\nconstraint: box\nupper_optimizer: maid\n"
    )
    places = [line.split(": ")[0] for line in problems(text)]
    # The sampler is a default and has no place: what it does not fit with has one.
    assert places == ["r.yaml:4:33", "r.yaml:5:15", "r.yaml:7:18"]


def test_recipes_made_in_python_are_checked_when_assembled() -> None:
    recipe = Recipe(
        data=Block("data", "dead-leaves", {"count": 4, "size": 16}),
        regularizer=Block("regularizer", "tv"),
        upper_optimizer=Block("upper_optimizer", "maid"),
        budget=Budget(steps=1),
    )
    assert [one.section for one in find_misfits(vars(recipe), load_registry())] == ["sampler"]
    with pytest.raises(RecipeError, match="'maid' needs all data at each step"):
        assemble(recipe)


def test_a_misfit_is_found_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(REST + "regularizer: tv\nlower_solver: mm\nconstraint: box\n")
    warm = command("validate", str(path)).replace("assert not e.code", "assert e.code == 3")
    imported(warm)
    imported(warm)
    assert imported(warm) == set()
