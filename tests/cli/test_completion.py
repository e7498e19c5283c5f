"""Tab: kinds, components, recipes, keys and values, without torch, in the shells' own protocol."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from conftest import BLT
from test_components import FILE, imported

from bltoolbox.cli.completion import (
    complete_component,
    complete_kind,
    complete_recipe,
    complete_shipped,
    rejoin,
)
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import load_registry
from bltoolbox.config.shipped_recipes import shipped_recipes


def context(**parameters: Any) -> typer.Context:
    return cast(typer.Context, SimpleNamespace(params=parameters))


def words(found: list[tuple[str, str]]) -> list[str]:
    return [word for word, _ in found]


@pytest.fixture(autouse=True)
def _remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Signatures in the cache, as after a first ``blt validate``; an empty folder to look for files in."""
    monkeypatch.chdir(tmp_path)
    if not (cache / "schema.json").exists():
        subprocess.run([*BLT, "schema", "-o", str(cache / "schema.json")], check=True, capture_output=True)


def run(*arguments: str, begun: str) -> list[str]:
    return words(complete_recipe(context(arguments=list(arguments)), begun))


def test_kinds_and_components() -> None:
    assert words(complete_kind("")) == list(KINDS)
    assert words(complete_kind("low")) == ["lower_solver"]
    every = words(complete_component(context(), ""))
    assert every == [f"{one.kind}/{one.name}" for one in load_registry().components()]
    assert words(complete_component(context(), "lower_solver/ag")) == ["lower_solver/agd"]
    assert words(complete_component(context(), "ag")) == ["agd"]
    assert complete_component(context(), "agd")[0][1], "shells that can show the summary"


def test_recipes_and_files(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "deep.yml").touch()
    for name in ("mine.yaml", "notes.txt", ".hidden.yaml"):
        (tmp_path / name).touch()
    assert words(complete_shipped("")) == list(shipped_recipes())
    assert run(begun="") == [*shipped_recipes(), "mine.yaml", "sub dir/"]
    assert run(begun="smo") == ["smoke"]
    assert run(begun="mi") == ["mine.yaml"]
    assert run(begun="sub dir/") == ["sub dir/deep.yml"]
    assert run(begun=f"{tmp_path}/mi") == [f"{tmp_path}/mine.yaml"]
    assert run(begun=".h") == [".hidden.yaml"]
    assert run(begun="no/such/folder") == []


def test_override_keys_are_those_of_the_recipe() -> None:
    every = run("smoke", begun="")
    assert {
        "seed=",
        "regularizer=",
        "regularizer.filters=",
        "sampler.size=",
        "budget.steps=",
        "operator=",
    } <= set(every)
    assert all(word.endswith("=") for word in every)
    assert run("smoke", begun="sampler.") == ["sampler.size="]
    assert run("smoke", begun="budget.se") == ["budget.seconds="]
    assert "regularizer.weight=" in run("smoke", "regularizer=tv", begun="regularizer.")
    assert "regularizer.filters=" not in run("smoke", "regularizer=tv", begun="regularizer.")
    assert run("smoke", "regularizer", "=", "tv", begun="regularizer.nu") == ["regularizer.nu="]
    assert run("smoke", begun="evaluation.na") == ["evaluation.names="]


def test_values_of_overrides() -> None:
    names = [one.name for one in load_registry().components("regularizer")]
    assert run("smoke", begun="regularizer=") == [f"regularizer={name}" for name in names]
    assert run("smoke", begun="regularizer=tv") == ["regularizer=tv", "regularizer=tv-nonsmooth"]
    assert run("smoke", begun="regularizer.name=tv") == []
    assert run("smoke", begun="constraint=n") == ["constraint=none", "constraint=nonnegative"]
    assert run("smoke", begun="init=") == ["init=null"]
    assert run("smoke", begun="nothing=") == []


def test_bash_makes_words_of_what_is_around_an_equals_sign() -> None:
    assert rejoin(["smoke", "a", "=", "1", "b=2", "c", "="]) == ["smoke", "a=1", "b=2", "c="]
    assert "tv" in run("smoke", "regularizer", "=", begun="")
    assert run("smoke", "regularizer", "=", begun="tv") == ["tv", "tv-nonsmooth"]
    assert run("smoke", "seed", "=", "3", "regularizer", begun="fo") == ["foe", "foe-nonsmooth"], (
        "the sign itself is dropped by Typer"
    )


def test_nothing_breaks_the_shell(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1")
    assert run("nowhere.yaml", begun="s") == []
    assert "seed=" in run("bad.yaml", begun="se")
    assert "seed=" in run("list.yaml", begun="se")
    assert complete_component(context(plugin=[tmp_path]), "agd"), "what is no plugin file is passed over"
    assert complete_component(cast(typer.Context, None), "agd") == []


def test_plugin_files_count(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(FILE)
    assert words(complete_component(context(plugin=["toy.py"]), "to")) == ["toy"]


def protocol(shell: str, line: list[str]) -> list[str]:
    """What the shell's own function would get."""
    words = {
        "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
        "_TYPER_COMPLETE_ARGS": " ".join(line),
    }
    environment = (
        os.environ | words | {"_BLT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )
    done = subprocess.run(BLT, env=environment, text=True, capture_output=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split("\n") if done.stdout else []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["blt", "list", "sam"], ["sampler"]),
        (["blt", "show", "lower_solver/ag"], ["lower_solver/agd"]),
        (["blt", "run", "smo"], ["smoke"]),
        (["blt", "validate", "smoke", "sampler.s"], ["sampler.size="]),
        (["blt", "run", "smoke", "regularizer", "=", "fo"], ["foe", "foe-nonsmooth"]),
        (["blt", "run", "smoke", "upper_optimizer", "="], None),
        (["blt", "cp", "smo"], ["smoke"]),
        (["blt", "new-plugin", "x", "--kind", "hy"], ["hypergradient"]),
    ],
)
def test_the_protocol_of_bash(line: list[str], wanted: list[str] | None) -> None:
    if wanted is None:
        wanted = [one.name for one in load_registry().components("upper_optimizer")]
    assert [word for word in protocol("bash", line) if word] == wanted


def test_the_protocol_of_zsh() -> None:
    (line,) = (line for line in protocol("zsh", ["blt", "run", "smoke", "regularizer=tg"]) if "tg" in line)
    assert "regularizer=tgv" in line


def test_completion_does_without_torch() -> None:
    script = """
from types import SimpleNamespace
from bltoolbox.cli.completion import *
assert complete_recipe(SimpleNamespace(params={"arguments": ["smoke"]}), "regularizer.filt")
assert complete_component(SimpleNamespace(params={}), "")
"""
    assert imported(script) == set()


def test_without_a_cache_there_are_fewer_words_and_still_no_torch(tmp_path: Path) -> None:
    script = f"""
import os
os.environ["BLT_CACHE"] = {str(tmp_path / "none")!r}
from types import SimpleNamespace
from bltoolbox.cli.completion import *
ctx = SimpleNamespace(params={{"arguments": ["smoke"]}})
assert not complete_recipe(ctx, "regularizer.filt")
assert complete_recipe(ctx, "regularizer=foe")
"""
    assert imported(script) == set()
