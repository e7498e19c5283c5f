"""Everything that is imported is declared in pyproject.toml, everything declared is imported, nothing needs Unix."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Extras of people who work on the toolbox itself; what is in them is not imported by it.
FOR_DEVELOPERS = {"test", "docs"}
#: Packages that are imported under the roof of another one.
BEHIND = {"torch.utils.tensorboard": "tensorboard"}
#: Modules of the standard library that Windows does not have.
UNIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


@dataclass(frozen=True)
class Import:
    """An import of the package that ships ``module``, in ``place``."""

    module: str
    place: str
    #: At the top of a module, where it is needed to import the toolbox at all.
    eager: bool
    #: In a ``try`` that catches ImportError.
    guarded: bool

    @property
    def distributions(self) -> set[str]:
        """The names that an installer knows it by; several where packages share a namespace."""
        if self.module in BEHIND:
            return {BEHIND[self.module]}
        top = self.module.partition(".")[0]
        return {canonicalize_name(name) for name in DISTRIBUTIONS.get(top, [top])}


DISTRIBUTIONS = metadata.packages_distributions()


def imports(path: Path) -> Iterator[Import]:
    def visit(node: ast.AST, eager: bool, guarded: bool) -> Iterator[Import]:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "client_package"
        ):
            names = [ast.literal_eval(node.args[0])]
        for name in names:
            yield Import(name, f"{path.relative_to(ROOT)}:{node.lineno}", eager, guarded)  # type: ignore[attr-defined]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            eager = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            eager = False
        if isinstance(node, ast.Try):
            guarded = guarded or any("ImportError" in ast.unparse(handler) for handler in node.handlers)
        for child in ast.iter_child_nodes(node):
            if calls or not isinstance(child, ast.expr):
                yield from visit(child, eager, guarded)

    text = path.read_text()
    calls = "client_package" in text  # of interest within expressions, which hold no import otherwise
    yield from visit(ast.parse(text), eager=True, guarded=False)


@functools.cache
def imported(folder: str) -> list[Import]:
    """What is neither ours nor of the standard library."""
    ours = {"bltoolbox", "blt_builtins", "docs", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    return [
        entry
        for path in sorted((ROOT / folder).rglob("*.py"))
        for entry in imports(path)
        if entry.module.partition(".")[0] not in ours | sys.stdlib_module_names
    ]


def shipped() -> list[Import]:
    """What the packages that users install import."""
    return imported("bltoolbox") + imported("plugins")


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


REQUIRED = names(PROJECT["dependencies"])
EXTRAS = {extra: names(texts) for extra, texts in PROJECT["optional-dependencies"].items()}


def test_everything_imported_is_declared() -> None:
    declared = REQUIRED.union(*EXTRAS.values())
    missing = {*shipped(), *imported("tests"), *imported("docs")}
    missing = {entry for entry in missing if not entry.distributions & declared}
    assert not missing, "declare these in pyproject.toml"


def test_what_only_an_extra_brings_is_not_imported_by_everyone() -> None:
    missing = [entry for entry in shipped() if entry.eager and not entry.distributions & REQUIRED]
    assert not missing, "make these dependencies, or import them in the function that needs them"


@pytest.mark.parametrize("extra", ["", *sorted(EXTRAS.keys() - FOR_DEVELOPERS)])
def test_everything_declared_is_imported(extra: str) -> None:
    used: set[str] = set()
    for entry in shipped():
        used |= entry.distributions
    unused = (EXTRAS[extra] if extra else REQUIRED) - used
    assert not unused, "remove these from pyproject.toml"


def test_each_requirement_has_a_least_version() -> None:
    texts = [
        *PROJECT["dependencies"],
        *(text for texts in PROJECT["optional-dependencies"].values() for text in texts),
    ]
    assert [text for text in texts if ">=" not in text] == []


def test_what_windows_lacks_is_imported_with_care() -> None:
    bare = [
        entry.place
        for folder in ("bltoolbox", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for entry in imports(path)
        if entry.module in UNIX and not entry.guarded
    ]
    assert not bare, "guard these by try/except ImportError"


def test_the_walk_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        "import one.two\n"
        "def f():\n    from three import x\n    from . import four\n"
        "try:\n    import five\nexcept ImportError:\n    pass\n"
    )
    found = [(entry.module, entry.eager, entry.guarded) for entry in imports(tmp_path / "a.py")]
    assert found == [("one.two", True, False), ("three", False, False), ("five", True, True)]
