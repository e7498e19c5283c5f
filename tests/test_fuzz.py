"""No recipe and no override, however mangled, ends in anything but a sentence and its exit code."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bltoolbox.errors import BltError
from bltoolbox.recipe import Recipe, parse_recipe
from bltoolbox.registry import load_registry

SEEDS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").rglob("*.yaml"))]
PIECES = [
    "name", "size", "foe", "tv", "{", "}", "[", "]", ":", ": ", ",", "\n", "\t", "- ", "&a ", "*a",
    "!!python/object:os.system ", "!", "|", ">", "%", "@", "`", '"', "'", "#", "---", "...", "<<: ", "? ", "null", "~",
    "true", ".nan", ".inf", "-1", "0", "1e999", "9" * 40, "0x", "012", "1/0", "25/255", "\x00", "\ufeff", "\u2028",
    "é", "𝔘", "../../etc/passwd", "os.system", "budget", "steps",
]  # fmt: skip
KEYS = [
    "sampler.size",
    "regularizer",
    "regularizer.name",
    "budget",
    "budget.steps",
    "seed",
    "data.path",
    "x",
    "",
    "a.b.c",
    ".",
    "=",
]
REGISTRY = load_registry()


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A shipped recipe with a few pieces cut out, doubled or put in."""
    text = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 40)))
        middle = draw(st.sampled_from(["", text[start:stop] * 2, *PIECES]))
        text = text[:start] + middle + text[stop:]
    return text


overrides = st.lists(
    st.builds(
        lambda key, value: f"{key}={value}",
        st.sampled_from(KEYS),
        st.sampled_from(PIECES) | st.text(max_size=12),
    ),
    max_size=3,
)


def outcome(text: str, given_overrides: list[str]) -> int:
    """The exit code that the command would have."""
    try:
        recipe = parse_recipe(text, "fuzz.yaml", given_overrides, REGISTRY)
    except BltError as error:
        said = str(error)
        assert said and "Traceback" not in said
        return error.exit_code
    assert isinstance(recipe, Recipe)
    assert parse_recipe(recipe.to_yaml(), registry=REGISTRY) == recipe
    return 0


@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(text=mangled(), given_overrides=overrides)
def test_mangled_recipes_end_in_sentences(text: str, given_overrides: list[str]) -> None:
    assert outcome(text, given_overrides) in (0, 2, 3, 4)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=300))
def test_any_text_ends_in_sentences(text: str) -> None:
    assert outcome(text, []) in (0, 2, 3, 4)


def test_the_real_command_never_shows_a_traceback(
    tmp_path: Path, blt: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    chance = random.Random(0)
    files = []
    for number in range(30):
        text = chance.choice(SEEDS)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            text = text[:place] + chance.choice(PIECES) + text[place + chance.randrange(20) :]
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        files.append(str(file))
    for file in files:
        done = blt("validate", file)
        assert done.returncode in (0, 2, 3, 4) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "data: " + "[" * 5000,
        "data: !!python/object/apply:os.system [touch owned]\n",
        "data: {name: array, path: x}\nregularizer: os.system\nbudget: {steps: 1}\n",
    ],
    ids=["billion laughs", "depth", "python tag", "import path"],
)
def test_attacks_are_refused_at_once(text: str) -> None:
    assert outcome(text, []) in (3, 4)
