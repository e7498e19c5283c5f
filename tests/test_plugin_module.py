"""``bltoolbox.plugin``: what type checkers see, what is loaded and what is documented are the same names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
from conftest import ROOT

from bltoolbox import plugin
from docs.generate import plugin_api

#: Files of the toolbox that stand for those of other authors.
AUTHORS = sorted(
    [*(ROOT / "plugins").rglob("*.py"), *(ROOT / "bltoolbox" / "cli" / "templates").rglob("*.tmpl")]
)


def _imports_for_type_checkers() -> dict[str, str]:
    """Names with the modules that ``if TYPE_CHECKING`` takes them from; each under its own name, to be
    re-exported."""
    tree = ast.parse(Path(plugin.__file__).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for item in node.body:
                assert isinstance(item, ast.ImportFrom) and item.module
                for alias in item.names:
                    assert alias.asname == alias.name, f"{alias.name} is not re-exported"
                    assert alias.name not in found, f"{alias.name} is imported twice"
                    found[alias.name] = item.module
    return found


def test_the_lazy_table_is_what_type_checkers_see() -> None:
    assert _imports_for_type_checkers() == plugin._WHERE
    assert sum(len(names) for names in plugin._HOME.values()) == len(plugin._WHERE), "a name has two homes"


@pytest.mark.parametrize("name", plugin.__all__)
def test_every_name_resolves_to_what_its_module_defines(name: str) -> None:
    value = getattr(plugin, name)
    if name in plugin._WHERE:
        module = importlib.import_module(plugin._WHERE[name])
        assert value is getattr(module, name)
        if isinstance(value, type | FunctionType):
            assert value.__module__ == module.__name__, f"{name} is defined in {value.__module__}"


def test_other_names_are_refused_with_a_sentence() -> None:
    with pytest.raises(AttributeError, match=r"bltoolbox\.plugin has no 'LowerLevel'; docs/plugin-api\.md"):
        plugin.LowerLevel  # noqa: B018
    assert set(plugin.__all__) <= set(dir(plugin))


def test_the_hook_is_light() -> None:
    script = (
        "import sys; from bltoolbox.plugin import Component, hookimpl; before = 'torch' in sys.modules;"
        "from bltoolbox.plugin import Regularizer; print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_every_name_is_documented() -> None:
    assert plugin_api.documented() == set(plugin.__all__)
    page = (ROOT / "docs" / "plugin-api.md").read_text(encoding="utf-8")
    for name in plugin.__all__:
        shown = (f"\n### {name}\n", f"* `{name}(", f"* `{name} = ", f"`@{name}`", f"`{name}`")
        assert any(text in page for text in shown), f"docs/plugin-api.md does not explain {name}"


@pytest.mark.parametrize("path", AUTHORS, ids=lambda path: str(path.relative_to(ROOT)))
def test_authors_import_nothing_else(path: Path) -> None:
    """But for the conformance suite, in tests."""
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] in ("from", "import") and words[1].split(".")[0] == "bltoolbox":
            assert words[1] in ("bltoolbox.plugin", "bltoolbox.testing.conformance"), line
