"""A plugin cannot break the house, and ``blt plugins`` says what is wrong with it; single files are plugins too."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import caller
from conftest import Install
from test_recipe import SMALL
from test_registry import SAMPLER, hook

from bltoolbox.config.registry import load_registry

Run = Callable[..., subprocess.CompletedProcess[str]]

TWO_KINDS = '''
"""Two components in one file."""
from bltoolbox.plugin import Batch, Component, Regularizer, Sampler, hookimpl

class Ridge(Regularizer):
    """R = (w/2)|x|^2.

    Args:
        weight: w.
    """
    def __init__(self, weight: float = 0.1) -> None:
        self.weight = weight
    def init_params(self, shape, generator):
        import torch
        return {"log_weight": torch.full((1,), self.weight, dtype=torch.float64).log()}
    def energy(self, theta, x):
        return theta["log_weight"].exp() * x.square().flatten(1).sum(1) / 2

class First(Sampler):
    """The first of all samples."""
    def init(self, m, seed): return {"m": m}
    def next(self, state): return Batch([0], [float(state["m"])]), dict(state)

@hookimpl
def blt_components():
    return [
        Component("regularizer", "slope", f"{__name__}:Ridge", "A slope."),
        Component("sampler", "first", f"{__name__}:First", "Always the first."),
    ]
'''

RECIPE = """\
data: {name: dead-leaves, count: 4, size: 16}
regularizer: {name: slope, weight: 0.2}
sampler: first
validation: {count: 1, checks: 1}
budget: {steps: 2}
"""


@pytest.fixture
def told(blt: Run) -> Callable[..., tuple[int, dict[str, dict[str, Any]]]]:
    def call(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        done = blt("plugins", "--json", *arguments)
        assert done.stderr == ""
        return done.returncode, {one["plugin"]: one for one in json.loads(done.stdout)}

    return call


def test_all_is_well(blt: Run, told: Any) -> None:
    code, found = told()
    assert code == 0
    assert {one.name for one in load_registry().plugins()} == set(found)
    solvers = found["lower_solvers"]
    assert (solvers["distribution"], solvers["version"], solvers["status"]) == ("bltoolbox", "0.1.0", "ok")
    assert {"kind": "lower_solver", "name": "agd", "status": "ok", "reason": ""} in solvers["components"]
    text = blt("plugins").stdout
    assert text.startswith("bltoolbox 0.1.0\n")
    assert "lower_solver/agd" in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        (hook().replace("return [", "raise RuntimeError('boom'); ["), "RuntimeError: boom"),
        (hook().replace("return [", "return 3; ["), "must return a list of Component"),
    ],
)
def test_a_broken_plugin_is_shown_with_its_reason(
    blt: Run, told: Any, install: Install, source: str, reason: str
) -> None:
    install("bad-dist", {"bad": "bad_light"}, {"bad_light": source})
    code, found = told()
    assert code == 4
    assert found["bad"]["status"] == "broken"
    assert reason in found["bad"]["reason"]
    assert found["bad"]["components"] == []
    assert found["lower_solvers"]["status"] == "ok"
    text = blt("plugins").stdout
    assert "bad-dist 1.0" in text
    assert reason in text
    assert blt("list").returncode == 0


def test_a_clash_is_shown_on_both_sides(told: Any, install: Install) -> None:
    install("usurper", {"usurping": "usurper_light"}, {"usurper_light": hook("agd", "lower_solver")})
    code, found = told()
    assert code == 4
    for name in ("usurping", "lower_solvers"):
        assert found[name]["status"] == "clash"
        assert "usurper 1.0 (plugin 'usurping')" in found[name]["reason"]
    assert [one["status"] for one in found["lower_solvers"]["components"]].count("clash") == 1
    assert found["samplers"]["status"] == "ok"


def test_a_dependency_that_a_component_lacks_is_found_by_loading(told: Any, install: Install) -> None:
    modules = {"toy_light": hook(), "toy_heavy": "import no_such_module\n" + SAMPLER}
    install("toy", {"toy": "toy_light"}, modules)
    code, found = told()
    assert (code, found["toy"]["status"]) == (0, "ok"), "nothing is imported unless asked"
    code, found = told("--load")
    assert (code, found["toy"]["status"]) == (4, "broken")
    assert "No module named 'no_such_module'" in found["toy"]["components"][0]["reason"]
    assert {one["status"] for name, one in found.items() if name != "toy"} == {"ok"}


def test_what_is_off_is_not_broken(told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLT_PLUGINS", "samplers")
    code, found = told()
    assert code == 0
    assert (found["lower_solvers"]["status"], found["samplers"]["status"]) == ("off", "ok")
    monkeypatch.setenv("BLT_PLUGINS", "samplers,nothing")
    assert told()[0] == 4


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run ``blt`` in this process, which has imported torch already; what it prints."""

    def call(*arguments: str, cwd: Path) -> str:
        monkeypatch.chdir(cwd)
        done = caller("", capfd)(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_one_file_of_two_kinds_from_a_folder_with_spaces(here: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "my own"
    folder.mkdir()
    (folder / "two kinds.py").write_text(TWO_KINDS)
    (folder / "r.yaml").write_text(RECIPE)
    plugin = ("--plugin", "my own/two kinds.py")
    listed = json.loads(here("list", "--json", *plugin, cwd=tmp_path))
    assert {("regularizer", "slope"), ("sampler", "first")} <= {(one["kind"], one["name"]) for one in listed}
    assert "weight: float; default 0.1" in here("show", "slope", *plugin, cwd=tmp_path)
    assert "sampler/first" in here("show", "sampler/first", "--plugin", "./two kinds.py", cwd=folder)
    assert here("validate", "my own/r.yaml", *plugin, cwd=tmp_path) == "my own/r.yaml: valid\n"
    here("run", "my own/r.yaml", *plugin, "-q", "-o", "out", cwd=tmp_path)
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    found = json.loads(here("plugins", "--json", *plugin, cwd=tmp_path))
    (own,) = (one for one in found if one["plugin"] == "two kinds.py")
    assert [one["name"] for one in own["components"]] == ["slope", "first"]
    schema = json.loads(here("schema", *plugin, cwd=tmp_path))
    assert "regularizer.slope" in schema["$defs"]
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_plugin_file_works_in_a_process_of_its_own(blt: Run, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_KINDS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = blt("run", "r.yaml", "--plugin", "two.py", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: slope" in done.stdout


def test_without_its_file_a_recipe_is_refused(blt: Run, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(SMALL.replace("foe, filters: 4", "slope"))
    done = blt("validate", "r.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "'slope' is not a registered regularizer" in done.stderr
