"""What a component accepts, as plain data: types, bounds, defaults and documentation of its parameters; its traits.

A signature is read from a class once (``describe.py``), cached as JSON (``cache.py``), and is all that is needed
to validate a recipe (``validation.py``) or to show a component, without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bltoolbox.config.hooks import SHORT

TypeName = Literal[
    "bool",
    "int",
    "float",
    "str",
    "path",
    "null",
    "choice",
    "union",
    "list",
    "tuple",
    "fixed",
    "settings",
    "component",
]

BOUNDS = {
    "gt": ("greater than", ">"),
    "ge": ("of at least", "≥"),
    "lt": ("less than", "<"),
    "le": ("of at most", "≤"),
    "multiple_of": ("that is a multiple of", "multiple of"),
}

NOUNS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "path": "a path",
    "null": "null",
    "list": "a list",
    "tuple": "a list",
    "fixed": "a list",
}


@dataclass(frozen=True)
class Type:
    """The values that a parameter accepts.

    ``items`` are the options of a union, the one item type of a ``list`` or ``tuple`` (they differ in the Python
    value only), or those of a ``fixed`` tuple; ``parameters`` those of nested ``settings``; ``role`` the kind of a
    component.
    """

    name: TypeName
    bounds: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Any, ...] = ()
    items: tuple[Type, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    role: str = ""

    def to_json(self) -> dict[str, Any]:
        data = {
            "name": self.name,
            "bounds": dict(self.bounds),
            "choices": list(self.choices),
            "items": [item.to_json() for item in self.items],
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "role": self.role,
        }
        return {key: value for key, value in data.items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Type:
        return cls(
            data["name"],
            dict(data.get("bounds", {})),
            tuple(data.get("choices", ())),
            tuple(map(cls.from_json, data.get("items", ()))),
            tuple(map(Parameter.from_json, data.get("parameters", ()))),
            data.get("role", ""),
        )

    def expected(self) -> str:
        """For messages: ``a whole number greater than 0 or null``."""
        if self.name == "union":
            return " or ".join(item.expected() for item in self.items)
        if self.name == "choice":
            return ("one of " if len(self.choices) > 1 else "") + ", ".join(map(shown, self.choices))
        if self.name == "component":
            short = "a number or " if self.role in SHORT else ""
            return f"{short}a {self.role}, e.g. {{name: …}} (blt list {self.role})"
        if self.name == "fixed":
            return f"a list of {len(self.items)}: " + ", ".join(item.expected() for item in self.items)
        if self.name == "settings":
            return f"a mapping of {', '.join(parameter.name for parameter in self.parameters)}"
        words = [f"{BOUNDS[key][0]} {number(value)}" for key, value in self.bounds.items() if key in BOUNDS]
        text = " ".join([NOUNS[self.name], " and ".join(words)]).strip()
        if "min_len" in self.bounds or "max_len" in self.bounds:
            text += f" of {self._length()}"
        return f"{text}, each {self.items[0].expected()}" if self.items else text

    def label(self) -> str:
        """For tables: ``int > 0 | null``."""
        if self.name == "union":
            return " | ".join(item.label() for item in self.items)
        if self.name == "choice":
            return " | ".join(map(plain_scalar, self.choices))
        if self.name == "component":
            return f"float | {self.role}" if self.role in SHORT else self.role
        if self.name == "fixed":
            return f"[{', '.join(item.label() for item in self.items)}]"
        words = [f"{BOUNDS[key][1]} {number(value)}" for key, value in self.bounds.items() if key in BOUNDS]
        name = f"list of {self.items[0].label()}" if self.items else self.name
        text = " ".join([name, ", ".join(words)]).strip()
        return f"{text} ({self._length()})" if {"min_len", "max_len"} & set(self.bounds) else text

    def _length(self) -> str:
        unit = "character" if self.name in ("str", "path") else "item"
        low, high = self.bounds.get("min_len", 0), self.bounds.get("max_len")
        if high is None:
            return f"at least {low} {unit}{'' if low == 1 else 's'}"
        plural = "" if high == 1 else "s"
        return (
            f"{high} {unit}{plural}"
            if low == high
            else f"{f'{low} to' if low else 'at most'} {high} {unit}{plural}"
        )


@dataclass(frozen=True)
class Parameter:
    """One parameter; ``default`` is plain JSON data and meaningless if ``required``."""

    name: str
    type: Type
    required: bool = True
    default: Any = None
    doc: str = ""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "type": self.type.to_json(), "required": self.required}
        if not self.required:
            data["default"] = self.default
        return data | {"doc": self.doc}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Parameter:
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        return cls(**values | {"type": Type.from_json(data["type"])})


@dataclass(frozen=True)
class Traits:
    """What a component requires of its partners and what it offers them.

    ``requires`` maps a partner's kind to methods it must implement; ``offers`` are the methods this class implements
    beyond its role; ``flags`` are the boolean class variables of its role that are true, such as ``full_batch``;
    ``metrics`` are the names of what a problem measures.
    """

    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        requires = {kind: list(methods) for kind, methods in self.requires.items()}
        data = {"requires": requires, "offers": list(self.offers), "flags": list(self.flags)}
        return data | ({"metrics": list(self.metrics)} if self.metrics else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Traits:
        requires = {kind: tuple(methods) for kind, methods in data["requires"].items()}
        metrics = tuple(data.get("metrics", ()))
        return cls(requires, tuple(data["offers"]), tuple(data["flags"]), metrics)


@dataclass(frozen=True)
class Signature:
    """``doc`` is the module's docstring, ``about`` that of the class without its ``Args:``."""

    parameters: tuple[Parameter, ...]
    doc: str = ""
    about: str = ""
    traits: Traits = field(default_factory=Traits)

    def to_json(self) -> dict[str, Any]:
        parameters = [parameter.to_json() for parameter in self.parameters]
        data = {"doc": self.doc, "about": self.about, "parameters": parameters}
        return data | {"traits": self.traits.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        parameters = tuple(map(Parameter.from_json, data["parameters"]))
        return cls(parameters, data["doc"], data["about"], Traits.from_json(data["traits"]))


def number(value: float) -> str:
    """As short as possible without loss: 0 rather than 0.0."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def plain_scalar(value: object) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return str(value)


def shown(value: object, limit: int = 60) -> str:
    """A value as messages quote it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value) if isinstance(value, str) else plain_scalar(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
