"""A generated plugin installs, is listed, passes the suite and runs, for every kind, as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from environments import make_environment

from bltoolbox.cli.scaffold import EXAMPLES, PARTNERS, new_plugin, package_name
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import load_registry

Run = Callable[..., subprocess.CompletedProcess[str]]

NAMES = {kind: f"a-new-{kind.replace('_', '-')}" for kind in KINDS}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One plugin for each kind, and one of all kinds together."""
    folder, registry = tmp_path_factory.mktemp("plugins"), load_registry()
    for kind, name in NAMES.items():
        new_plugin(name, [kind], folder / name, registry)
    new_plugin("of-all-kinds", KINDS, folder / "of-all-kinds", registry)
    return {path.name: path for path in folder.iterdir()}


def test_each_kind_installs_is_listed_and_runs_as_generated(written: dict[str, Path], tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "env", with_toolbox=True)
    environment.install(list(written.values()))
    recipes = {name: folder / "recipe.yaml" for name, folder in written.items()}
    # A problem has its own tasks for evaluation; a plugin of all kinds has a recipe for it and one for images.
    others = {"with its problem": written["of-all-kinds"] / "recipe-problem.yaml"}
    of_problems = {NAMES["problem"], *others}
    small = ["data.count=8", "data.size=16", "sampler.size=4", "validation.count=4", "evaluation="]
    runs = [
        ("run", str(file), "budget={steps: 2}", "-q", "-o", name, *([] if name in of_problems else small))
        for name, file in (recipes | others).items()
    ]
    # That of all kinds has the same components under other names.
    checks = [("check", name) for name in NAMES.values()]
    (_, listed, _), *rest = environment.blt(("list", "--json"), *runs, *checks, cwd=tmp_path, figures=False)
    found = {(one["distribution"], one["kind"], one["name"]) for one in json.loads(listed)}
    for kind, name in NAMES.items():
        assert (name, kind, name) in found
        assert ("of-all-kinds", kind, f"of-all-kinds-{kind.replace('_', '-')}") in found
    for name, (code, _, trouble) in zip(recipes | others, rest[: len(runs)], strict=True):
        assert code == 0, f"{name}: {trouble}"
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 2, name
    for name, (code, out, trouble) in zip(NAMES.values(), rest[len(runs) :], strict=True):
        assert code == 0, f"blt check {name}: {out}\n{trouble}"


def test_what_is_generated_keeps_to_the_projects_own_rules(written: dict[str, Path], tmp_path: Path) -> None:
    folder = str(next(iter(written.values())).parent)
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), folder]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config], text=True, capture_output=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_generated_recipes_are_valid_and_nothing_is_left_of_the_template(written: dict[str, Path]) -> None:
    for name, folder in written.items():
        texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.*") if path.is_file()}
        for path, text in texts.items():
            assert "my-plugin" not in text, path
            assert "my_plugin" not in text, path
            assert not re.search(r"@\w+@", text), path
            assert len(text.splitlines()) < 100, path
        package = folder / name.replace("-", "_")
        assert "torch" not in (package / "__init__.py").read_text().partition('"""\n\n')[2]
        assert f'conformance_tests("{name}")' in texts[folder / "tests" / "test_plugin.py"]
        assert "yaml-language-server: $schema=" in texts[folder / "recipe.yaml"]


def test_examples_are_none_of_the_builtins() -> None:
    known = {one.component.target.partition(":")[2] for one in load_registry().components()}
    assert not known & {cls for cls, _ in EXAMPLES.values()}
    assert set(EXAMPLES) == set(PARTNERS) == set(KINDS)
    for kind, name in PARTNERS.items():
        assert load_registry().get(kind, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My_Plugin", "did you mean 'my-plugin'"),
        ("my plugin", "did you mean 'my-plugin'"),
        ("3d-prior", "did you mean 'd-prior'"),
        ("-x", "did you mean 'x'"),
        ("a--b", "did you mean 'a-b'"),
        ("", "lowercase letters"),
        ("ünder", "lowercase letters"),
        ("../up", "lowercase letters"),
        ("lambda", "a Python keyword"),
        ("json", "would hide the Python package 'json'"),
        ("torch", "would hide the Python package 'torch'"),
        ("blt-builtins", "would hide the Python package 'blt_builtins'"),
        ("tv", "'tv' is already a regularizer of bltoolbox"),
    ],
)
def test_bad_names_are_refused(blt: Run, tmp_path: Path, name: str, message: str) -> None:
    done = blt("new-plugin", "--", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_command(blt: Run, tmp_path: Path) -> None:
    done = blt("new-plugin", "my-thing", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "blt check my-thing" in done.stderr
    files = [tmp_path / line for line in done.stdout.splitlines()]
    assert all(file.is_file() for file in files)
    assert (tmp_path / "my-thing" / "my_thing" / "regularizer.py") in files, (
        "a regularizer unless asked otherwise"
    )
    again = blt("new-plugin", "my-thing", cwd=tmp_path)
    assert again.returncode == 2
    assert "my-thing exists and is not empty" in again.stderr
    (tmp_path / "empty here").mkdir()
    two = ("--kind", "sampler", "--kind", "operator", "--kind", "sampler", "-o", "empty here")
    assert blt("new-plugin", "my-thing", *two, cwd=tmp_path).returncode == 0
    package = tmp_path / "empty here" / "my_thing"
    assert {path.name for path in package.iterdir()} == {"__init__.py", "operator.py", "sampler.py"}
    wrong = blt("new-plugin", "other", "--kind", "smapler", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'sampler'?" in wrong.stderr
    (tmp_path / "file").write_text("")
    assert blt("new-plugin", "other", "-o", "file", cwd=tmp_path).returncode == 2
    assert blt("new-plugin", "other", "-o", "file/x", cwd=tmp_path).returncode == 2


def test_the_kebab_name_becomes_a_package() -> None:
    assert package_name("my-new-prior2") == "my_new_prior2"
