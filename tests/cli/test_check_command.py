"""``blt check`` on components, plugins, files and recipes; where an error of a hypergradient is said to come from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import caller
from conftest import Install
from test_conformance_catches import BASES, HEAD, WRONG

from bltoolbox.config.recipe import parse_recipe
from bltoolbox.config.registry import load_registry
from bltoolbox.testing.recipe_check import RecipeCheck, check_recipe

Run = Callable[..., subprocess.CompletedProcess[str]]
Told = tuple[int, str, str]

SMALL = """\
data: {name: dead-leaves, count: 4, size: 16}
noise: 0.1
regularizer: {name: tv, nu: 0.1}
lower_solver: mm
sampler: {name: epoch, size: 2}
validation: {count: 1, checks: 1}
budget: {steps: 2}
"""

#: A regularizer that has its own gradient, Hessian and pairing, to be made wrong one at a time.
RIDGE = """
    def gradient(self, theta, x): return {gradient} * super().gradient(theta, x)
    def linearize(self, theta, x):
        hvp = super().linearize(theta, x)
        return lambda v: {hessian} * hvp(v)
    def pairing(self, theta, x, q): return {mixed} * super().pairing(theta, x, q)
"""


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    def call(*arguments: str) -> Told:
        done = caller("check", capfd)(*arguments)
        return done.returncode, done.stdout, done.stderr

    return call


def written(folder: Path, kind: str, body: str) -> Path:
    base, source = BASES[kind]
    file = folder / "mine.py"
    file.write_text(HEAD.format(kind=kind) + source + f"\nclass Mine({base}):\n    '''Mine.'''\n    {body}\n")
    return file


def test_overrides_mean_the_recipe_where_a_component_has_its_name(check: Callable[..., Told]) -> None:
    code, _, said = check("mri", "operator.acceleration=0")
    assert code == 3 and "operator.acceleration: expected a number of at least 1" in said
    code, out, _ = check("mri", "--json")
    assert code == 0 and [one["kind"] for one in json.loads(out)["components"][:1]] == ["operator"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(SMALL)
    return str(tmp_path / "small.yaml")


def test_a_component_that_conforms(check: Callable[..., Told]) -> None:
    code, out, err = check("sampler/full")
    assert code == 0
    assert out.startswith("✓ sampler/full  ")
    assert "1 of 1 components conform" in err


def test_several_targets_each_once(check: Callable[..., Told]) -> None:
    code, out, _ = check("full", "samplers", "sampler/nice")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == [
        f"sampler/{name}" for name in ("full", "epoch", "importance", "independent", "nice")
    ]


def test_json(check: Callable[..., Told]) -> None:
    code, out, err = check("full", "--json")
    found = json.loads(out)
    assert (code, err, found["passed"], found["broken"], found["recipes"]) == (0, "", True, [], [])
    assert {one["status"] for one in found["components"]} == {"passed", "skipped"}
    assert set(found["components"][0]) == {"kind", "name", "property", "status", "message", "seconds"}


def test_a_wrong_file_fails_with_a_sentence(check: Callable[..., Told], tmp_path: Path) -> None:
    kind, body, expected, sentence = WRONG["wrong adjoint"]
    file = written(tmp_path, kind, body)
    code, out, err = check("--plugin", str(file))
    assert code == 1
    assert out.splitlines()[0].startswith("✗ operator/mine  1 of ")
    assert expected in out
    assert sentence in out
    assert "0 of 1 components conform" in err
    code, out, _ = check("mine", "--json", "--plugin", str(file))
    failed = [one for one in json.loads(out)["components"] if one["status"] == "failed"]
    assert (code, [one["property"] for one in failed]) == (1, [expected])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["smapler"], 2, "did you mean 'sampler'"),
        (["sampler/fulll"], 2, "did you mean 'sampler/full'"),
        (["missing.yaml"], 2, "missing.yaml does not exist"),
        (["full", "sampler.size=2"], 2, "is an override for a recipe"),
        (["smoke", "sampler.size=many"], 3, "expected"),
    ],
)
def test_refusals(check: Callable[..., Told], arguments: list[str], code: int, message: str) -> None:
    found, out, err = check(*arguments)
    assert (found, out) == (code, "")
    assert message in err


def test_broken_plugins(install: Install, check: Callable[..., Told]) -> None:
    install("broken-dist", {"broken-point": "broken_module"}, {"broken_module": "import nothing_like_it"})
    for target in ("broken-dist", "broken-point"):
        code, _, err = check(target)
        assert code == 4
        assert "nothing_like_it" in err
    assert check("full")[0] == 0
    hook = HEAD.format(kind="sampler").replace(":Mine", ":Absent")
    install("lazy-dist", {"lazy": "lazy_module"}, {"lazy_module": hook})
    code, out, _ = check("lazy")
    assert code == 4
    assert "can be imported" in out


def test_a_recipe_that_is_right(check: Callable[..., Told], recipe: str) -> None:
    code, out, _ = check(recipe)
    assert code == 0
    assert "✗" not in out
    for word in ("regularizer.log_weight", "regularizer.log_smoothing", "random 1", "mixed derivative"):
        assert word in out
    assert "the hypergradient agrees with central differences" in out


def test_a_recipe_as_json_with_overrides(check: Callable[..., Told], recipe: str) -> None:
    code, out, err = check(recipe, "regularizer=tikhonov", "constraint=box", "lower_solver=agd", "--json")
    (found,) = json.loads(out)["recipes"]
    assert (code, err, found["passed"], found["source"]) == (0, "", True, None)
    assert max(row["error"] for row in found["rows"]) < 1e-3
    assert {link["place"] for link in found["links"]} == {"lower level", "linear system", "mixed derivative"}


def examined(file: Path | None, text: str, *overrides: str) -> RecipeCheck:
    registry = load_registry([file] if file else [])
    return check_recipe(parse_recipe(text, overrides=overrides, registry=registry), registry)


@pytest.mark.parametrize(
    ("factors", "source", "sentence"),
    [
        ({}, None, "agrees with central differences"),
        ({"gradient": 1.1}, "lower level", "check gradient() of Mine"),
        ({"hessian": 1.1}, "linear system", "check linearize() of Mine"),
        ({"hessian": -3.0}, "linear system", "check linearize() of Mine"),
        ({"mixed": 1.1}, "mixed derivative", "check pairing() of Mine"),
    ],
)
def test_errors_are_attributed_to_their_place(
    tmp_path: Path, factors: dict[str, float], source: str | None, sentence: str
) -> None:
    body = RIDGE.format(**{"gradient": 1.0, "hessian": 1.0, "mixed": 1.0} | factors)
    found = examined(
        written(tmp_path, "regularizer", body.strip()), SMALL, "regularizer=mine", "lower_solver=agd"
    )
    assert (found.source, found.passed) == (source, source is None), found
    assert sentence in found.verdict
    for link in found.links:
        assert link.ok or link.place == source or factors == {"hessian": -3.0}


def test_an_estimator_that_puts_right_things_together_wrongly(tmp_path: Path) -> None:
    _, body, _, _ = WRONG["hypergradient of the wrong sign"]
    overrides = ("hypergradient=mine", "regularizer=tikhonov")
    found = examined(written(tmp_path, "hypergradient", body), SMALL, *overrides)
    assert (found.source, found.passed) == ("estimator", False)
    assert "'mine' combines them wrongly" in found.verdict


def test_a_bias_is_followed_in_its_declared_limit() -> None:
    found = examined(None, SMALL, "hypergradient=f2sa")
    assert (found.passed, found.verified, found.source) == (True, True, None)
    assert "f2sa is biased by design, here by up to" in found.verdict
    assert "in the limit that it declares its error is" in found.verdict


def test_a_limit_that_a_recipe_cannot_follow_is_not_verified(check: Callable[..., Told], recipe: str) -> None:
    code, out, _ = check(recipe, "hypergradient=one-step")
    assert code == 0
    assert "? not verified: one-step is biased by design, here by up to" in out
    assert "one of the problem, which the recipe fixes" in out


BIASED = """exact = False
    {limit}
    def __init__(self, terms: int = 50) -> None: self.most = terms
    def estimate(self, ask):
        found = super().estimate(ask)
        return replace(found, gradient={{n: {factor} * z for n, z in found.gradient.items()}})"""
LIMIT = 'limit = BiasLimit({"terms": (10, 40, 160)})'


@pytest.mark.parametrize(
    ("limit", "factor", "expected", "sentence"),
    [
        (LIMIT, 1, (True, True, None), "in the limit that it declares its error is"),
        (LIMIT, 3, (False, True, "estimator"), "does not vanish in the limit that it declares"),
        ("", 3, (True, False, None), "not verified: mine is biased by design"),
    ],
    ids=["right", "three times too large", "no limit"],
)
def test_a_biased_estimator_is_right_wrong_or_not_verified(
    tmp_path: Path, limit: str, factor: int, expected: tuple[bool, bool, str | None], sentence: str
) -> None:
    file = written(tmp_path, "hypergradient", BIASED.format(limit=limit, factor=factor))
    overrides = ("hypergradient={name: mine, terms: 3}", "regularizer={name: tikhonov, weight: 1.0}")
    found = examined(file, SMALL, *overrides)
    assert (found.passed, found.verified, found.source) == expected, found.verdict
    assert sentence in found.verdict


def test_what_is_not_verified_is_shown(tmp_path: Path, check: Callable[..., Told]) -> None:
    file = written(tmp_path, "hypergradient", BIASED.format(limit="", factor=1))
    code, out, err = check("--plugin", str(file))
    assert code == 0
    assert "? hypergradient/mine" in out and ", 1 not verified" in out
    assert "its bias vanishes in the declared limit: not verified: no tolerance makes z exact" in out
    assert "1 of 1 components conform, 1 of them not verified" in err


def test_too_few_steps_are_the_linear_systems() -> None:
    found = examined(None, SMALL, "hypergradient={name: unrolled, steps: 2}")
    assert (found.source, found.passed) == ("linear system", False)
    assert "leaves a residual" in found.verdict


def test_without_a_minimiser_nothing_can_be_compared() -> None:
    # A ninth of the pixels, and a regularizer so weak that the others hardly matter.
    found = examined(
        None,
        SMALL,
        "operator={name: inpainting, missing: 0.9}",
        "regularizer={name: tv, weight: 1e-9, nu: 1e-3}",
    )
    assert (found.source, found.passed) == ("lower level", False), found
    assert found.rows == ()
    assert "set strong_convexity in the recipe" in found.verdict


def test_the_command_in_a_process_of_its_own(blt: Run, tmp_path: Path) -> None:
    kind, body, _, sentence = WRONG["E[v] ≠ 1"]
    file = written(tmp_path, kind, body)
    done: Any = blt("check", "--plugin", str(file))
    assert done.returncode == 1
    assert sentence in done.stdout
    assert "Traceback" not in done.stderr
