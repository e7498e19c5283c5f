"""The rooms keep to their rules: who imports whom, lazily or not, and no cycle among modules.

The rules are those of docs/architecture.md. Everything is read from the syntax trees; nothing is imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from bltoolbox.config.names import EXTRA_FILES, FILES, FOLDERS, GIVEN_FILE, MANIFEST, PICTURES, SWEEP_FILE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bltoolbox"
BUILT_INS = ROOT / "plugins" / "blt_builtins"

#: What each room may import besides itself; ``bltoolbox`` itself has the version and imports nothing at once.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "distributed": {"errors"},
    "runs": {"config", "errors"},
    "bilevel": {"distributed", "errors"},
    "restoration": {"bilevel", "config", "runs", "distributed", "errors"},
    "training": {"restoration", "bilevel", "config", "runs", "distributed", "errors"},
    "reports": {"restoration", "bilevel", "runs", "config", "errors"},
    "testing": {"training", "restoration", "bilevel", "config", "runs", "distributed", "errors"},
}
#: These stand above all rooms.
ABOVE = {"api", "plugin", "cli", "__main__"}
#: Annotations alone may look upwards, and few do: what a listener is told about.
TYPES_ONLY = {
    ("bltoolbox.bilevel.events", "bltoolbox.restoration.results"),
    ("bltoolbox.bilevel.events", "bltoolbox.training.experiment"),
    ("bltoolbox.reports.progress", "bltoolbox.training.experiment"),
}
#: Rooms that work without torch, and what a command may load before it needs it.
WITHOUT_TORCH = ("config", "runs", "errors")


@dataclass(frozen=True)
class Import:
    """One imported module, and where that is written."""

    source: str
    target: str
    place: str
    types_only: bool
    at_once: bool


def modules(folder: Path, name: str) -> dict[str, Path]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        dotted = ".".join((name, *parts)).removesuffix(".__init__")
        found[dotted] = path
    return found


MODULES = modules(PACKAGE, "bltoolbox")
PLUGINS = modules(BUILT_INS, "blt_builtins")


def imports(source: str, path: Path, known: dict[str, Path]) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _walk(tree, source, path, known, types_only=False, at_once=True)


def _walk(
    node: ast.AST, source: str, path: Path, known: dict[str, Path], *, types_only: bool, at_once: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # holds no statement
        if isinstance(child, ast.Import | ast.ImportFrom):
            place = f"{path.relative_to(ROOT)}:{child.lineno}"
            for target in _targets(child, known):
                yield Import(source, target, place, types_only, at_once)
        guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _walk(
            child, source, path, known, types_only=types_only or guarded, at_once=at_once and not inner
        )


def _targets(node: ast.Import | ast.ImportFrom, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, "imports are absolute"
    for alias in node.names:
        whole = f"{node.module}.{alias.name}"
        yield whole if whole in known else str(node.module)


ALL = [found for name, path in MODULES.items() for found in imports(name, path, MODULES)]


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_there_are_few_names_at_the_top() -> None:
    names = {
        path.stem for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed", "recipes")
    }
    rooms = names - {"__init__", "__main__"}
    assert rooms == {*MAY_IMPORT, *ABOVE} - {"__main__"}
    assert len(rooms) <= 13


@pytest.mark.parametrize("name", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_room_explains_itself(name: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert text.count(".") >= 3, f"{name}: say what lives here, what it may import, what a change can break"
    assert "import" in text


def test_rooms_import_only_what_they_may() -> None:
    wrong = [
        f"{found.place}: {found.source} imports {found.target}"
        for found in ALL
        if found.target.split(".")[0] == "bltoolbox"
        and room(found.source) in MAY_IMPORT
        and room(found.target) not in {"", room(found.source), *MAY_IMPORT[room(found.source)]}
        and not (found.types_only and (found.source, found.target) in TYPES_ONLY)
    ]
    assert not wrong, "\n".join(wrong)


def test_type_only_exceptions_are_used_and_few() -> None:
    seen = {(found.source, found.target) for found in ALL if found.types_only}
    assert seen >= TYPES_ONLY and len(TYPES_ONLY) <= 5


def test_no_cycle_among_modules() -> None:
    """Lazy imports count: they only hide a cycle."""
    edges: dict[str, dict[str, str]] = {}
    for found in ALL:
        if not found.types_only and found.target in MODULES and found.target != "bltoolbox":
            edges.setdefault(found.source, {})[found.target] = found.place
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            cycle = (*trail[trail.index(module) :], module)
            steps = [f"{edges[a][b]}: {a} -> {b}" for a, b in pairwise(cycle)]
            pytest.fail("modules import each other:\n" + "\n".join(steps))
        if module in done:
            return
        for target in edges.get(module, {}):
            visit(target, (*trail, module))
        done.add(module)

    for module in list(edges):
        visit(module, ())


def test_light_rooms_import_no_torch() -> None:
    heavy = ("torch", "torchvision", "numpy", "matplotlib", "PIL", "skimage")
    wrong = [
        f"{found.place}: {found.source} imports {found.target}"
        for found in ALL
        if room(found.source) in WITHOUT_TORCH and found.target.split(".")[0] in heavy[:2]
    ]
    assert not wrong, "\n".join(wrong)


LIGHT = [
    "import bltoolbox",
    "import bltoolbox.plugin",
    "import bltoolbox.config.recipe",
    "import bltoolbox.runs.history",
    "from bltoolbox import load_recipe",
    "import types; sys.modules['IPython'] = types.ModuleType('IPython'); from bltoolbox import load_recipe",
]


@pytest.mark.parametrize("statement", LIGHT)
def test_light_names_load_no_torch(statement: str) -> None:
    """In a notebook, too, where names from ``bltoolbox`` also register how results are shown."""
    assert not loads_torch(statement)


def test_a_recipe_is_loaded_without_torch() -> None:
    """The signatures of its components are cached by the first call."""
    statement = "from bltoolbox import load_recipe; load_recipe('smoke')"
    loads_torch(statement)
    assert not loads_torch(statement)


def loads_torch(statement: str) -> bool:
    code = f"import sys\n{statement}\nsys.exit(7 if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode in (0, 7)
    return done.returncode == 7


def test_built_ins_import_what_anyone_may() -> None:
    allowed = {"bltoolbox.plugin", "bltoolbox.testing"}
    wrong = [
        f"{found.place}: imports {found.target}"
        for name, path in PLUGINS.items()
        for found in imports(name, path, PLUGINS)
        if found.target.split(".")[0] == "bltoolbox" and found.target not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_a_rule_that_is_broken_is_found(tmp_path: Path) -> None:
    """The walk sees lazy, guarded and plain imports alike."""
    path = ROOT / "tests" / "test_rooms.py"
    source = tmp_path / "room.py"
    source.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from bltoolbox.cli import main\n"
        "def f():\n    from bltoolbox.training import experiment\n"
    )
    tree = ast.parse(source.read_text())
    found = list(_walk(tree, "bltoolbox.config.x", path, MODULES, types_only=False, at_once=True))
    assert [(one.target, one.types_only, one.at_once) for one in found if "bltoolbox" in one.target] == [
        ("bltoolbox.cli", True, True),
        ("bltoolbox.training.experiment", False, False),
    ]


def test_the_documented_rules_are_these() -> None:
    """The table of docs/architecture.md has every room, with exactly what it may import."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    assert {name: set(re.findall(r"`(\w+)`", allowed)) for name, allowed in rows} == MAY_IMPORT


def test_names_of_files_stand_in_one_place() -> None:
    """``recipe.yaml`` is also what the folder of a new plugin has, so it may be written there."""
    names = {*FILES, *EXTRA_FILES, *FOLDERS, SWEEP_FILE, MANIFEST} - {GIVEN_FILE, PICTURES}
    wrong = []
    for module, path in MODULES.items():
        if module == "bltoolbox.config.names":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                parts = [node.right]
            elif isinstance(node, ast.Call | ast.Compare | ast.Tuple | ast.Assign):
                parts = list(ast.iter_child_nodes(node))
            else:
                continue
            texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            files = [text for text in texts if text in names and (text not in FOLDERS or len(parts) == 1)]
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {text}" for text in files]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["hypergradients", "upper_optimizers"])
def test_a_method_fits_into_150_lines(kind: str) -> None:
    """What it shares with others, and its line search, have files of their own."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in (BUILT_INS / kind).glob("*.py")}
    assert len(lengths) > 8
    assert {name: length for name, length in lengths.items() if length > 150} == {}
