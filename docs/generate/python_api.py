"""The pages of Python names: one summary each, which the site replaces by the full reference of mkdocstrings.

On GitHub a page is a list of names with one sentence each and where they are defined. A comment such as
``<!-- ::: bltoolbox.run -->`` marks the place of the reference. Everything is read from the source text, without torch.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import bltoolbox
from bltoolbox import plugin
from docs.generate.markdown import fence, first_paragraph

ROOT = Path(__file__).parents[2]

PYTHON = """
# Python

Everything that `bltoolbox` exports. Importing the package imports no torch; a name is loaded when it is first used.
For tasks rather than names, see the [tutorial](../tutorial.md) and
[Train in your own PyTorch loop](../train-in-pytorch.md).
"""
PLUGIN = """
# bltoolbox.plugin

The one module that the author of a plugin imports, name by name. [Plugin API](../plugin-api.md) explains the same
names by role, and [Write a plugin](../write-a-plugin.md) is the guide.
"""
TESTING = """
# bltoolbox.testing

Problems whose answers are known in closed form, for tests of components. `blt check` runs the conformance suite.
"""
ERRORS = """
# bltoolbox.errors

What the toolbox raises: each error is one sentence, and has the exit code that the
[command line](../cli-reference.md#exit-codes) returns.
"""


def pages() -> dict[str, str]:
    return {
        "api/python.md": _page(PYTHON, "bltoolbox", bltoolbox._HOMES),
        "api/plugin.md": _page(
            PLUGIN,
            "bltoolbox.plugin",
            {"Component": "bltoolbox.config.hooks", "hookimpl": "bltoolbox.config.hooks", **plugin._WHERE},
        ),
        "api/testing.md": _page(TESTING, "bltoolbox.testing", _imported("bltoolbox.testing")),
        "api/errors.md": _page(ERRORS, "bltoolbox.errors", _defined("bltoolbox.errors")),
    }


def _page(introduction: str, module: str, homes: Mapping[str, str]) -> str:
    parts = [introduction.strip()]
    for name in sorted(homes, key=str.lower):
        parts += [f"## {name}", f"<!-- ::: {module}.{name} -->"]
        parts += [fence(f"from {module} import {name}", "python"), summary(homes[name], name)]
    return "\n\n".join(filter(None, parts))


def summary(module: str, name: str) -> str:
    """The first paragraph of a name's docstring, or the comment of ``#:`` above it."""
    text = _path(module).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return first_paragraph(ast.get_docstring(node) or "")
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            comments = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.startswith("#:"):
                    break
                comments.insert(0, line.removeprefix("#:").strip())
            return first_paragraph(" ".join(comments))
    raise LookupError(f"{module} does not define {name}")


def _path(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(package: str) -> dict[str, str]:
    """Names that a package imports from its modules."""
    tree = ast.parse(_path(package).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _defined(module: str) -> dict[str, str]:
    """Public classes of a module."""
    tree = ast.parse(_path(module).read_text(encoding="utf-8"))
    return {
        node.name: module
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
