"""The page for authors of plugins: the hook, the roles and the records, read from the source text, without torch."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bltoolbox.config.hooks import API_VERSION, KINDS
from bltoolbox.config.registry import GROUP
from docs.generate.markdown import code, fence, prose, table

PACKAGE = Path(__file__).parents[2] / "bltoolbox"

#: What an author meets beside the roles, by module.
RECORDS = {
    "interfaces": ("SolverState", "Oracle"),
    "events": ("Listener",),
    "problem": ("LowerLevel", "Linearization", "UpperLoss"),
    "results": (
        "Batch",
        "Estimate",
        "Constants",
        "Potentials",
        "Scales",
        "Step",
        "Value",
        "HypergradientResult",
    ),
}


@dataclass(frozen=True)
class Method:
    """``head`` is its signature; ``required`` when its role leaves it abstract."""

    name: str
    head: str
    doc: str
    required: bool


@dataclass(frozen=True)
class Class:
    """A class as its source has it: ``variables`` are its fields and class variables, each with its comment."""

    name: str
    doc: str
    kind: str
    variables: tuple[tuple[str, str], ...]
    methods: tuple[Method, ...]
    flags: tuple[str, ...]


def page() -> str:
    hooks = _source("hookspecs")
    roles = classes("interfaces")
    parts = [
        "# Plugin API",
        f"Version {API_VERSION}. [Write a plugin](write-a-plugin.md) is the guide to it; `blt check` tries whether a "
        "component keeps to it.",
        "## The hook",
        f"An entry point of the group `{GROUP}` names a module that defines this function, marked with `@hookimpl`:",
        *_function(hooks, "blt_components"),
        "`Component` and `hookimpl` are in `bltoolbox.config.hooks`. The module may set "
        f"`BLT_API = {API_VERSION}`, the version it is written for; another number is refused with a sentence.",
        *_class(classes("hookspecs")["Component"], "###"),
        f"The kinds are {', '.join(map(code, KINDS))}: the sections of a recipe, which has a list of `loggers`.",
        "## Roles",
        prose(_doc(_source("interfaces")).partition("\n\n")[2]),
        table(
            ("kind", "implement", "needed", "optional"),
            [_overview(one) for one in roles.values() if one.kind],
        ),
        *_class(roles["Role"], "###"),
    ]
    for kind in KINDS:
        parts += _class(role(kind), "###")
    parts.append("## What a component is given, and what it returns")
    for module, names in RECORDS.items():
        for name in names:
            parts += _class(classes(module)[name], "###", f"bltoolbox.{module}")
    return "\n\n".join(parts)


def role(kind: str) -> Class:
    """The role class of a kind."""
    return next(one for one in classes("interfaces").values() if one.kind == kind)


@cache
def classes(module: str) -> dict[str, Class]:
    """The public classes of a module of the toolbox."""
    text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: _read(node, text.splitlines()) for node in nodes if not node.name.startswith("_")}


def _read(node: ast.ClassDef, lines: Sequence[str]) -> Class:
    variables, methods, flags, kind = [], [], [], ""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            variables.append((ast.unparse(item), _comment(item, lines)))
            if isinstance(item.value, ast.Constant) and isinstance(item.value.value, bool):
                flags.append(ast.unparse(item.target))
        elif isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "kind":
            kind = ast.literal_eval(item.value)
        elif isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__len__"):
            methods.append(_method(item))
    doc = ast.get_docstring(node) or ""
    return Class(node.name, doc, kind, tuple(variables), tuple(methods), tuple(flags))


def _method(node: ast.FunctionDef) -> Method:
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if marks & {"property", "cached_property"}:
        head = f"{node.name}: {ast.unparse(node.returns) if node.returns else 'Any'}"
    else:
        arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
        head = f"{node.name}({arguments}){returns}"
    return Method(node.name, head, ast.get_docstring(node) or "", "abstractmethod" in marks)


def _comment(node: ast.stmt, lines: Sequence[str]) -> str:
    """The lines of ``#:`` above a field."""
    found: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not (match := re.match(r"\s*#:\s*(.*)", line)):
            break
        found.insert(0, match[1])
    return " ".join(found)


def _class(one: Class, level: str, module: str = "") -> Iterator[str]:
    yield f"{level} {one.name}"
    facts = [f"Kind `{one.kind}`." if one.kind else "", f"`{module}.{one.name}`" if module else ""]
    if any(facts):
        yield " ".join(filter(None, facts))
    yield prose(one.doc)
    if one.variables:
        yield fence("\n".join(f"{text}  # {why}" if why else text for text, why in one.variables), "python")
    for required, title in ((True, "To implement:"), (False, "Optional:" if one.kind else "")):
        chosen = [method for method in one.methods if method.required == required]
        if chosen and title:
            yield title
        if chosen:
            yield "\n".join(_item(method) for method in chosen)


def _item(method: Method) -> str:
    text = textwrap.indent(prose(method.doc), "  ")
    return f"* `{method.head}`" + (f"  \n{text}" if text else "")


def _overview(one: Class) -> tuple[str, ...]:
    needed = ", ".join(code(method.name) for method in one.methods if method.required)
    optional = ", ".join(code(method.name) for method in one.methods if not method.required)
    return code(one.kind), f"[{one.name}](#{one.name.lower()})", needed, optional


def _function(module: ast.Module, name: str) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            method = _method(node)
            yield fence(f"def {method.head}", "python")
            yield prose(method.doc)


def _source(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def _doc(module: ast.Module) -> str:
    return ast.get_docstring(module) or ""
