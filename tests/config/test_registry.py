"""Discovery: everyone comes in through the same door, and nobody's mistake is anyone else's."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, Install

from bltoolbox.config.hooks import KINDS
from bltoolbox.config.registry import Plugin, load_registry
from bltoolbox.errors import MissingError, UsageError

HOOK = """
from bltoolbox.config.hooks import Component, hookimpl
@hookimpl
def blt_components():
    return [Component({kind!r}, {name!r}, {target!r}, "A toy.")]
"""

SAMPLER = """
from bltoolbox.bilevel.roles import Sampler
class Toy(Sampler):
    def init(self, m, seed): return {}
    def next(self, state): raise NotImplementedError
class Half(Sampler):
    def init(self, m, seed): return {}
class Stranger: pass
"""


def hook(name: str = "toy", kind: str = "sampler", target: str = "toy_heavy:Toy") -> str:
    return HOOK.format(kind=kind, name=name, target=target)


def plugin(name: str) -> Plugin:
    return next(one for one in load_registry().plugins() if one.name == name)


def test_every_folder_of_plugins_is_packaged_registered_and_sound() -> None:
    packaged = {path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    folders = {
        f"{package}.{path.parent.name}"
        for package in packaged
        for path in (ROOT / "plugins" / package).glob("*/__init__.py")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    points = project["project"]["entry-points"]["bltoolbox"]
    assert {Path(package).name for package in packages} - {"bltoolbox"} == packaged
    assert set(points.values()) == folders
    registry = load_registry()
    ours = [one for one in registry.plugins() if one.distribution == "bltoolbox"]
    assert {one.module for one in ours} == folders
    assert not registry.warnings()


def test_every_builtin_loads_and_documents_its_parameters() -> None:
    registry = load_registry()
    assert {one.kind for one in registry.components()} == set(KINDS)
    for registered in registry.components():
        assert registered.load().kind == registered.kind
        signature = registered.signature()
        assert signature.doc, f"{registered.component.target} has no module docstring"
        undocumented = [parameter.name for parameter in signature.parameters if not parameter.doc]
        assert not undocumented, f"{registered.component.target}: Args lacks {undocumented}"


def test_components_are_in_the_order_of_a_recipe_then_by_name() -> None:
    keys = [(KINDS.index(one.kind), one.name) for one in load_registry().components()]
    assert keys == sorted(keys)
    assert {one.kind for one in load_registry().components("sampler")} == {"sampler"}
    with pytest.raises(UsageError, match=r"'samplers' is not a kind.*did you mean 'sampler'"):
        load_registry().components("samplers")


def test_third_party_component_with_provenance(install: Install) -> None:
    install("toy-dist", {"toys": "toy_light"}, {"toy_light": hook(), "toy_heavy": SAMPLER}, version="2.5")
    registered = load_registry().get("sampler", "toy")
    assert (registered.distribution, registered.version) == ("toy-dist", "2.5")
    assert (registered.plugin.name, registered.plugin.module) == ("toys", "toy_light")
    assert "toy_heavy" not in sys.modules, "the target must be imported on use only"
    assert registered.load().__name__ == "Toy"
    assert load_registry().find("toy") == load_registry().find("sampler/toy")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("BLT_API = 99\n" + hook(), "plugin API 99.*provides API 2"),
        ("BLT_API = 1\n" + hook(), "plugin API 1.*provides API 2"),
        ("x = 1", r"defines no blt_components\(\) marked with @hookimpl"),
        (hook().replace("return [", "raise RuntimeError('boom'); ["), "RuntimeError: boom"),
        (hook().replace("return [", "return 3; ["), "must return a list of Component, not a int"),
        (hook().replace("return [", "return None; ["), "must return a list of Component, not None"),
        (hook().replace("return [", "return ['agd', "), "an item is a str"),
        (hook(kind="smapler"), "'smapler' is not a kind of component; did you mean 'sampler'"),
        (hook(name="My Toy"), "'My Toy' is not of the form 'my-name'"),
        (hook(target="toy_heavy.Toy"), "not of the form 'package.module:Class'"),
        (hook().replace('"A toy."', "None"), "summary of a Component must be text"),
        (hook().replace("blt_components()", "blt_components(extra)"), "extra"),
    ],
)
def test_a_broken_plugin_is_recorded_and_the_others_go_on(install: Install, source: str, reason: str) -> None:
    install("bad-dist", {"bad": "bad_light"}, {"bad_light": source})
    install("good-dist", {"good": "good_light"}, {"good_light": hook("fine")})
    registry = load_registry()
    record = next(one for one in registry.plugins() if one.name == "bad")
    assert record.status == "broken"
    assert re.search(reason, record.reason), record.reason
    assert registry.get("sampler", "fine").distribution == "good-dist"
    assert any("bad-dist 1.0 (plugin 'bad') is not used" in warning for warning in registry.warnings())
    with pytest.raises(MissingError, match="broken plugins: 'bad'"):
        registry.get("sampler", "toy")


def test_a_generator_is_a_fine_hook(install: Install) -> None:
    install("gen", {"gen": "gen_light"}, {"gen_light": hook().replace("return [", "yield from [")})
    assert load_registry().get("sampler", "toy").distribution == "gen"


def test_nobody_wins_a_clash(install: Install) -> None:
    install("usurper", {"usurping": "usurper_light"}, {"usurper_light": hook("agd", "lower_solver")})
    registry = load_registry()
    with pytest.raises(MissingError) as caught:
        registry.get("lower_solver", "agd")
    assert "bltoolbox 0.1.0 (plugin 'lower_solvers')" in str(caught.value)
    assert "usurper 1.0 (plugin 'usurping')" in str(caught.value)
    with pytest.raises(MissingError, match="neither is used"):
        registry.find("agd")
    assert registry.get("lower_solver", "mm")
    assert "agd" not in [one.name for one in registry.components()]
    assert len(registry.warnings()) == 1


def test_two_distributions_may_share_an_entry_point_name(install: Install) -> None:
    install("one", {"same": "one_light"}, {"one_light": hook("first")})
    install("two", {"same": "two_light"}, {"two_light": hook("second")})
    registry = load_registry()
    assert registry.get("sampler", "first").distribution == "one"
    assert registry.get("sampler", "second").distribution == "two"


def test_one_name_of_two_kinds_has_to_be_qualified(install: Install) -> None:
    install("toy", {"toy": "toy_light"}, {"toy_light": hook("tv", "sampler")})
    with pytest.raises(UsageError, match="use regularizer/tv or sampler/tv"):
        load_registry().find("tv")
    assert load_registry().find("sampler/tv").distribution == "toy"


def test_blt_plugins_restricts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLT_PLUGINS", "samplers, operatros")
    registry = load_registry()
    # The problem of recipes that name none is part of the toolbox itself.
    assert {one.kind for one in registry.components()} == {"problem", "sampler"}
    assert [one.name for one in registry.components("problem")] == ["variational"]
    assert plugin("lower_solvers").status == "off"
    assert "did you mean 'operators'" in plugin("operatros").reason


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "lower_solver",
            "adg",
            "'adg' is not a registered lower_solver; did you mean 'agd'.*blt list lower_solver",
        ),
        ("lower_solver", "maid", "is not a registered lower_solver; it is of kind upper_optimizer"),
        (
            "sampler",
            "zzz",
            r"'zzz' is not a registered sampler; .* add --plugin FILE.py \(blt list sampler\)$",
        ),
    ],
)
def test_unknown_names(kind: str, name: str, message: str) -> None:
    with pytest.raises(MissingError, match=message):
        load_registry().get(kind, name)


def test_find_suggests() -> None:
    with pytest.raises(MissingError, match="did you mean 'dead-leaves'"):
        load_registry().find("dead-leafs")
    with pytest.raises(UsageError, match="'solver' is not a kind"):
        load_registry().find("solver/agd")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such:Toy", "cannot be imported: ModuleNotFoundError"),
        ("toy_heavy:Nothing", "has no class Nothing"),
        ("toy_heavy:Stranger", r"Stranger does not derive from bltoolbox\.plugin\.Sampler"),
        ("toy_heavy:Half", "Half lacks next"),
        ("toy_raises:Toy", "RuntimeError: built for another torch"),
    ],
)
def test_unusable_targets(install: Install, target: str, message: str) -> None:
    raises = "raise RuntimeError('built for another torch')"
    install(
        "toy",
        {"toy": "toy_light"},
        {"toy_light": hook(target=target), "toy_heavy": SAMPLER, "toy_raises": raises},
    )
    with pytest.raises(MissingError, match=f"sampler 'toy' of toy 1.0 .*{message}"):
        load_registry().get("sampler", "toy").load()


FILE = SAMPLER + hook().replace("'toy_heavy:Toy'", 'f"{__name__}:Toy"')


def test_a_single_file_is_a_plugin(tmp_path: Path) -> None:
    for folder in ("a", "b c"):
        (tmp_path / folder).mkdir()
        name = folder[0] + "-toy"
        (tmp_path / folder / "my-toy.py").write_text(FILE.replace("'toy'", repr(name)))
    files = [tmp_path / "a" / "my-toy.py", tmp_path / "b c" / "my-toy.py", tmp_path / "a" / "my-toy.py"]
    registry = load_registry(files)
    assert not registry.warnings()
    first, second = registry.get("sampler", "a-toy"), registry.get("sampler", "b-toy")
    assert first.load() is not second.load()
    assert first.plugin.module == load_registry(files[:1]).get("sampler", "a-toy").plugin.module
    assert not list(tmp_path.rglob("__pycache__")), "nothing may be left beside a user's file"


def test_bad_plugin_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_registry([tmp_path / "nowhere.py"])
    (tmp_path / "bad.py").write_text("1 / 0")
    registry = load_registry([tmp_path / "bad.py"])
    assert "ZeroDivisionError: division by zero" in registry.warnings()[0]
    assert registry.components()
    (tmp_path / "bad.py").write_text(FILE)
    assert load_registry([tmp_path / "bad.py"]).get("sampler", "toy"), "an edited file is read anew"
