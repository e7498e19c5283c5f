"""The page for authors of plugins: the hook, the roles and the records, read from the source text, without torch."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bltoolbox import plugin
from bltoolbox.config.hooks import API_VERSION, KINDS, ROLES
from bltoolbox.config.registry import GROUP
from docs.generate.markdown import code, fence, prose, table

ROOT = Path(__file__).parents[2]
HOOKS = "bltoolbox.config.hooks"


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
    bases: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    methods: tuple[Method, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Definition:
    """A function, or a name that stands for a type or a value."""

    head: str
    doc: str


def page() -> str:
    hooks = _source(HOOKS)
    parts = [
        "# Plugin API",
        f"Version {API_VERSION}. [Write a plugin](write-a-plugin.md) is the guide; `blt check` tests whether a "
        "component conforms. Import every name on this page from `bltoolbox.plugin`.",
        "## The hook",
        f"An entry point of the group `{GROUP}` names a module that defines this function, marked with `@hookimpl`:",
        *_function(hooks, "blt_components"),
        "The module imports only `Component` and `hookimpl`, which are light, and no component. It may set "
        f"`BLT_API = {API_VERSION}`, the version it is written for; other versions are refused with a message.",
        *_class(classes(HOOKS)["Component"]),
        f"The kinds are {', '.join(map(code, KINDS))}: the sections of a recipe, where loggers are a list, `loggers`.",
        "## Roles",
        prose(_doc(_source("bltoolbox.bilevel.roles")).partition("\n\n")[2]),
        table(("kind", "implement", "needed", "optional"), [_overview(role(kind)) for kind in KINDS]),
    ]
    for name in ("Role", "Parametric", *(ROLES[kind] for kind in KINDS)):
        parts += _class(_named(name))
    parts.append("## Arguments and results of components")
    for name in _others():
        parts += _class(_named(name))
    parts += ["## Types and functions", *_definitions()]
    return "\n\n".join(parts)


def role(kind: str) -> Class:
    """The role class of a kind."""
    return _named(ROLES[kind])


def optional(kind: str) -> list[Method]:
    """The methods that a component may implement, those of ``Parametric`` included."""
    owner = role(kind)
    own = [method for base in owner.bases if base == "Parametric" for method in _named(base).methods]
    methods = {method.name: method for method in (*own, *owner.methods)}
    return [method for method in methods.values() if not method.required]


def documented() -> set[str]:
    """Every name that this page explains."""
    heads = {definition.head.partition("(")[0].split()[0] for _, definition in _defined()}
    return {"Component", "hookimpl", "Role", "Parametric", *ROLES.values(), *_others(), *heads}


def _named(name: str) -> Class:
    return classes(plugin._WHERE[name])[name]


def _others() -> list[str]:
    """The classes beside the roles, in the order of their modules and of the text there."""
    roles = {"Role", "Parametric", *ROLES.values()}
    return [
        name
        for module, names in plugin._HOME.items()
        for name in classes(module)
        if name in names and name not in roles
    ]


def _defined() -> Iterator[tuple[str, Definition]]:
    """Functions, types and constants of ``bltoolbox.plugin``, with their modules."""
    for module, names in plugin._HOME.items():
        available = definitions(module)
        yield from ((module, available[name]) for name in names if name in available)


def _definitions() -> Iterator[str]:
    yield "\n".join(
        f"* `{definition.head}`"
        + (f"  \n{textwrap.indent(prose(definition.doc), '    ')}" if definition.doc else "")
        for _, definition in _defined()
    )


@cache
def definitions(module: str) -> dict[str, Definition]:
    """The public functions and assigned names of a module."""
    tree, lines, texts = _source(module), _text(module).splitlines(), {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            method = _method(node)
            texts[node.name] = Definition(method.head, method.doc)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts[node.targets[0].id] = Definition(ast.unparse(node), _comment(node, lines))
    return {name: text for name, text in texts.items() if not name.startswith("_")}


@cache
def classes(module: str) -> dict[str, Class]:
    """The public classes of a module of the toolbox, in the order of its text."""
    text = _text(module)
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
        elif isinstance(item, ast.FunctionDef) and any(
            isinstance(one, ast.Name) and one.id == "overload" for one in item.decorator_list
        ):
            continue  # the definition that follows them has the documentation
        elif isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__len__"):
            methods.append(_method(item))
    doc, bases = ast.get_docstring(node) or "", tuple(ast.unparse(base) for base in node.bases)
    return Class(node.name, doc, kind, bases, tuple(variables), tuple(methods), tuple(flags))


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
    texts: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
        if not (match := re.match(r"\s*#:\s*(.*)", line)):
            break
        texts.insert(0, match[1])
    return " ".join(texts)


def _class(cls: Class) -> Iterator[str]:
    yield f"### {cls.name}"
    bases = [base for base in cls.bases if base in plugin._WHERE and base != "Role"]
    facts = [f"Kind `{cls.kind}`." if cls.kind else ""]
    facts += [f"Derives from [{base}](#{base.lower()}), whose methods it has too." for base in bases]
    if any(facts):
        yield " ".join(filter(None, facts))
    yield prose(cls.doc)
    if cls.variables:
        yield fence("\n".join(f"{text}  # {why}" if why else text for text, why in cls.variables), "python")
    for required, title in ((True, "To implement:"), (False, "Optional:" if cls.kind else "")):
        chosen = [method for method in cls.methods if method.required == required]
        if chosen and title:
            yield title
        if chosen:
            yield "\n".join(_item(method) for method in chosen)


def _item(method: Method) -> str:
    text = textwrap.indent(prose(method.doc), "    ")
    return f"* `{method.head}`" + (f"  \n{text}" if text else "")


def _overview(cls: Class) -> tuple[str, ...]:
    needed = ", ".join(code(method.name) for method in cls.methods if method.required)
    others = ", ".join(code(method.name) for method in optional(cls.kind))
    return code(cls.kind), f"[{cls.name}](#{cls.name.lower()})", needed, others


def _function(module: ast.Module, name: str) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            method = _method(node)
            yield fence(f"def {method.head}", "python")
            yield prose(method.doc)


def _text(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def _source(module: str) -> ast.Module:
    return ast.parse(_text(module))


def _doc(module: ast.Module) -> str:
    return ast.get_docstring(module) or ""
