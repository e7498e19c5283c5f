"""From a class to its signature, and from validated options to an object.

The annotations of ``__init__`` (or the fields of a dataclass) are the configuration. Supported are ``int``,
``float``, ``bool``, ``str``, ``Path``, ``Literal``, unions with ``None`` and each other, ``list``, ``Sequence`` and
``tuple``, ``Annotated`` with bounds and lengths of annotated_types, nested dataclasses, and the role classes for a
component within a component. Parameters are documented in the class docstring, in Google style::

    Args:
        size: Samples per step.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as at

from bltoolbox.config.block import Block, plain
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.signatures import Parameter, Signature, Traits, Type, TypeName
from bltoolbox.config.validation import Checker

SCALARS: dict[Any, TypeName] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Path: "path",
    os.PathLike: "path",
    type(None): "null",
    None: "null",
}

#: Metadata of a dataclass field that is not a setting.
NO_SETTING: Mapping[str, Any] = {"setting": False}


class Undescribable(Exception):
    """A signature that a recipe cannot express; the sentence is for the author of the component."""


@dataclass(frozen=True)
class OfKind:
    """``Annotated[Block, OfKind("data")]``: a component of that kind, not yet built."""

    kind: str


def describe(cls: type[Any]) -> Signature:
    """The signature of a component or settings class."""
    module = sys.modules.get(cls.__module__)
    about, _ = _docs(cls)
    doc = inspect.cleandoc(getattr(module, "__doc__", None) or "")
    traits = _traits(cls)
    # What is made of the sections of a recipe has no parameters of its own.
    parameters = () if "from_sections" in traits.flags else tuple(_parameters(cls))
    return Signature(parameters, doc, about, traits)


def _traits(cls: type[Any]) -> Traits:
    """The traits of a class; none for a class without a role."""
    role = next((base for base in cls.__mro__ if vars(base).get("kind") in KINDS), None)
    if role is None:
        return Traits()
    requires = getattr(cls, "requires", {})
    if not isinstance(requires, Mapping):
        raise Undescribable(f"requires of {cls.__name__} must map kinds to the names of methods")
    for kind, methods in requires.items():
        if kind not in KINDS or isinstance(methods, str):
            raise Undescribable(
                f"requires of {cls.__name__} must map kinds to lists of methods, not {kind!r} to {methods!r}"
            )
    public = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
    static = (
        inspect.getattr_static
    )  # a class method looked up in the ordinary way is never the same object twice
    offers = [name for name in public if static(cls, name) is not static(role, name, None)]
    flags = [name for name, value in vars(role).items() if isinstance(value, bool) and getattr(cls, name)]
    wanted = {kind: tuple(map(str, methods)) for kind, methods in requires.items()}
    metrics = tuple(map(str, getattr(cls, "metrics", ()))) if cls.kind == "problem" else ()
    return Traits(wanted, tuple(offers), tuple(sorted(flags)), metrics)


def construct(cls: type[Any], options: Mapping[str, Any], build: Callable[[Block], Any]) -> Any:
    """An object from validated options: settings become their dataclass, blocks whatever ``build`` makes of them."""
    annotations = {name: annotation for name, annotation, _ in _declared(cls)}
    return cls(**{key: _convert(annotations[key], value, build) for key, value in options.items()})


def _convert(annotation: Any, value: Any, build: Callable[[Block], Any]) -> Any:
    if isinstance(value, Block):
        return build(value)
    if isinstance(value, list | tuple):
        return type(value)(_convert(annotation, item, build) for item in value)
    if isinstance(value, Mapping):
        fitting = (
            cls for cls in settings_classes(annotation) if set(value) == {p.name for p in _parameters(cls)}
        )
        return construct(next(fitting), value, build)
    return value


def settings_classes(annotation: Any) -> Iterator[type[Any]]:
    """The dataclasses within an annotation."""
    if inspect.isclass(annotation) and is_dataclass(annotation) and annotation is not Block:
        yield annotation
    for argument in get_args(annotation):
        yield from settings_classes(argument)


def nested_settings(cls: type[Any]) -> Iterator[type[Any]]:
    """The settings dataclasses among the parameters of a class."""
    for _, annotation, _ in _declared(cls):
        yield from settings_classes(annotation)


def _parameters(cls: type[Any]) -> Iterator[Parameter]:
    _, docs = _docs(cls)
    for name, annotation, default in _declared(cls):
        where = f"parameter {name!r} of {cls.__name__}"
        if name == "name":
            raise Undescribable(f"{where} would hide the name of the component; rename it")
        declared = _type(annotation, where)
        if default is MISSING:
            yield Parameter(name, declared, doc=docs.get(name, ""))
            continue
        default = plain(default)
        checker = Checker()
        checker.value(declared, default, (name,))
        if checker.issues:
            raise Undescribable(
                f"{where} has a default that violates its annotation: {checker.issues[0].message}"
            )
        yield Parameter(name, declared, False, default, docs.get(name, ""))


def _declared(cls: type[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default (or MISSING) of each parameter."""
    is_data = is_dataclass(cls) and "__init__" in vars(cls)
    init = cls if is_data else cls.__init__
    if init is object.__init__:
        return
    try:
        hints = typing.get_type_hints(init, include_extras=True)
    except Exception as error:
        raise Undescribable(f"the annotations of {cls.__name__} cannot be evaluated: {error}") from error
    if is_data:
        for field in fields(cls):
            if field.init and field.metadata.get("setting", True):
                made = field.default if field.default_factory is MISSING else field.default_factory()
                yield field.name, hints[field.name], made
        return
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        where = f"parameter {parameter.name!r} of {cls.__name__}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise Undescribable(f"{where} cannot be set by name")
        if parameter.name not in hints:
            raise Undescribable(f"{where} has no annotation")
        yield parameter.name, hints[parameter.name], _default(parameter)


def _default(parameter: inspect.Parameter) -> Any:
    return MISSING if parameter.default is parameter.empty else parameter.default


def _type(annotation: Any, where: str, bounds: Mapping[str, Any] | None = None) -> Type:
    """The type behind an annotation; ``bounds`` come from an ``Annotated`` around it."""
    bounds = bounds or {}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kinds = [extra.kind for extra in arguments[1:] if isinstance(extra, OfKind)]
        if kinds:
            return Type("component", role=kinds[0])
        return _type(arguments[0], where, {**bounds, **_bounds(arguments[1:])})
    if origin in (Union, types.UnionType):
        return Type("union", items=tuple(_type(argument, where, bounds) for argument in arguments))
    if origin is Literal:
        return Type("choice", choices=arguments)
    if (origin or annotation) in (list, collections.abc.Sequence, tuple):
        return _sequence(origin, arguments, where, bounds)
    scalar = SCALARS.get(origin or annotation)
    if scalar is not None:
        return Type(scalar, _fitting(scalar, bounds))
    if inspect.isclass(annotation):
        kind = getattr(annotation, "kind", None)
        if kind in KINDS:
            return Type("component", role=kind)
        if is_dataclass(annotation):
            return Type("settings", parameters=tuple(_parameters(annotation)))
    shown = annotation.__name__ if inspect.isclass(annotation) else str(annotation)
    raise Undescribable(f"{where} is annotated {shown}, which a recipe cannot express")


def _sequence(origin: Any, arguments: tuple[Any, ...], where: str, bounds: Mapping[str, Any]) -> Type:
    if not arguments:
        raise Undescribable(f"{where} is a list without an item type; write e.g. list[int]")
    if origin is tuple and arguments[-1] is not Ellipsis:
        return Type("fixed", items=tuple(_type(argument, where) for argument in arguments))
    name: TypeName = "tuple" if origin is tuple else "list"
    return Type(name, _fitting(name, bounds), items=(_type(arguments[0], where),))


def _fitting(name: TypeName, bounds: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds that apply to a type: those of ``Annotated[int | None, Gt(0)]`` are not for None."""
    keys = {
        "int": ("gt", "ge", "lt", "le", "multiple_of"),
        "float": ("gt", "ge", "lt", "le", "multiple_of", "infinite"),
    }.get(name, ("min_len", "max_len"))
    return {key: bounds[key] for key in keys if key in bounds}


def _bounds(extras: tuple[Any, ...]) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for extra in extras:
        if isinstance(extra, at.GroupedMetadata):
            bounds |= _bounds(tuple(extra))
        elif isinstance(extra, at.Predicate):
            negated = extra.func if isinstance(extra.func, at.Not) else None
            if negated is not None and negated.func is math.isnan:
                bounds["infinite"] = True
        else:
            for key in ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length"):
                if isinstance(extra, at.BaseMetadata) and hasattr(extra, key):
                    bounds[key.replace("length", "len")] = getattr(extra, key)
    return bounds


def _docs(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """The class docstring without its ``Args:``, and the text of each argument."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    if is_dataclass(cls) and text.startswith(f"{cls.__name__}("):
        text = ""  # written by @dataclass, not by an author
    lines = text.splitlines()
    if "Args:" not in [line.rstrip() for line in lines]:
        return text, {}
    start = [line.rstrip() for line in lines].index("Args:")
    after = enumerate(lines[start + 1 :])
    # A docstring that begins with its Args loses its indentation: then they extend to the end.
    length = next((k for k, line in after if start > 0 and line[:1].strip()), len(lines))
    block = inspect.cleandoc("\n" + "\n".join(lines[start + 1 : start + 1 + length]))
    docs: dict[str, list[str]] = {}
    for line in block.splitlines():
        match = re.match(r"(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if match:
            docs[match[1]] = [match[2]]
        elif docs and line.strip():
            docs[next(reversed(docs))].append(line.strip())
    about = "\n".join([*lines[:start], *lines[start + 1 + length :]]).strip()
    return about, {name: " ".join(parts).strip() for name, parts in docs.items()}
