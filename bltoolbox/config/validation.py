"""Validation of plain data against signatures: every problem is collected, with its path.

Numbers are read generously and exactly: a float may be written as a whole number or as a fraction (``25/255``), a
whole number as ``1e5``; a boolean is never a number, and NaN and infinity are refused unless the annotation is
``IsNotNan``.

Not by pydantic: it validates classes, and these signatures are plain data from a cache, so that no plugin (nor torch)
is imported to check a recipe. Models built from them would cost 0.13 s more (measured: 0.11 s import, 0.02 s for
twelve models), and each of their errors would still need new wording and a lookup of components.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from bltoolbox.config.block import Block, plain
from bltoolbox.config.hooks import SHORT
from bltoolbox.config.names import is_component, is_reserved
from bltoolbox.config.signatures import Parameter, Type, shown
from bltoolbox.config.wording import did_you_mean
from bltoolbox.errors import MissingError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

Where = tuple[str | int, ...]

#: A plain number instead of a component is for images in [0, 1].
PLAIN = Type("float", {"ge": 0, "le": 1})

FRACTION = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*/\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")
MAX_DEPTH = 20


@dataclass(frozen=True)
class Issue:
    """Something wrong at ``where``; on its key rather than its value if ``at_key``.

    ``missing`` means that the recipe is correct, but a component it names cannot be used here.
    """

    where: Where
    message: str
    at_key: bool = False
    missing: bool = False


def dotted(where: Where) -> str:
    """``sampler.size``, ``data.names[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".")


class Checker:
    """Checks values and collects ``issues``; its results are meaningful only if there are none.

    Without a registry, nested components are not checked.
    """

    def __init__(self, registry: Registry | None = None, *, confined: bool = False) -> None:
        self.registry = registry
        #: Whether paths belong to a logger, which writes: they must stay in the run directory.
        self.confined = confined
        self.issues: list[Issue] = []

    def parameters(
        self, known: Sequence[Parameter], given: Mapping[str, Any], where: Where, owner: str
    ) -> dict[str, Any]:
        """All parameters in their order, defaults filled in."""
        names = [parameter.name for parameter in known]
        for key in given:
            if key not in names:
                hint = did_you_mean(str(key), names)
                if not hint:
                    hint = f" (it has {', '.join(names)})" if names else " (it has none)"
                noun = "parameter" if where else "key"
                self._issue((*where, str(key)), f"{owner} has no {noun} {str(key)!r}{hint}", at_key=True)
        return {parameter.name: self._parameter(parameter, given, where) for parameter in known}

    def value(self, type: Type, value: Any, where: Where) -> Any:
        """``value`` as Python code wants it."""
        if len(where) > MAX_DEPTH:
            return self._issue(where, f"nested more than {MAX_DEPTH} levels deep")
        return getattr(self, f"_{type.name}")(type, value, where)

    def _parameter(self, parameter: Parameter, given: Mapping[str, Any], where: Where) -> Any:
        here = (*where, parameter.name)
        if parameter.name not in given:
            if parameter.required:
                return self._issue(here, f"missing; expected {parameter.type.expected()}")
            return self.value(parameter.type, parameter.default, here)
        value = given[parameter.name]
        default = parameter.default
        # Options alone, as in `sampler: {size: 8}` or the override `sampler.size=8`, mean the default component.
        if (
            isinstance(value, Mapping)
            and "name" not in value
            and isinstance(default, Mapping)
            and "name" in default
        ):
            value = {"name": default["name"], **value}
        return self.value(parameter.type, value, here)

    def _issue(self, where: Where, message: str, *, at_key: bool = False, missing: bool = False) -> None:
        prefix = f"{dotted(where)}: " if where else ""
        self.issues.append(Issue(where, prefix + message, at_key, missing))

    def _expected(self, type: Type, value: Any, where: Where, hint: str = "") -> None:
        self._issue(where, f"expected {type.expected()}, got {shown(value)}{hint}")

    def _bool(self, type: Type, value: Any, where: Where) -> Any:
        return value if isinstance(value, bool) else self._expected(type, value, where)

    def _null(self, type: Type, value: Any, where: Where) -> Any:
        return None if value is None else self._expected(type, value, where)

    def _int(self, type: Type, value: Any, where: Where) -> Any:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not _within(type, value):
            return self._expected(type, value, where)
        return int(value)

    def _float(self, type: Type, value: Any, where: Where) -> Any:
        result = _to_float(value)
        if result is None:
            return self._expected(type, value, where)
        if math.isnan(result) or (math.isinf(result) and not type.bounds.get("infinite")):
            return self._issue(where, f"expected {type.expected()}, finite, got {shown(value)}")
        return result if _within(type, result) else self._expected(type, value, where)

    def _str(self, type: Type, value: Any, where: Where) -> Any:
        if isinstance(value, str) and _long_enough(type, value):
            return value
        quotable = isinstance(value, bool | int | float)
        return self._expected(type, value, where, " (in quotes it would be text)" if quotable else "")

    def _path(self, type: Type, value: Any, where: Where) -> Any:
        if not isinstance(value, str | Path) or not str(value) or not _long_enough(type, str(value)):
            return self._expected(type, value, where)
        path = Path(value)
        if self.confined and (trouble := leaves(path)):
            hint = "give the logger its own file or folder in the run directory"
            return self._issue(where, f"{shown(str(value))} {trouble}; {hint}")
        return path

    def _choice(self, type: Type, value: Any, where: Where) -> Any:
        for choice in type.choices:
            # 1 and true are equal in Python, but different in a recipe.
            if choice == value and isinstance(choice, bool) == isinstance(value, bool):
                return choice
        texts = [choice for choice in type.choices if isinstance(choice, str)]
        hint = did_you_mean(value, texts) if isinstance(value, str) and len(type.choices) > 1 else ""
        return self._expected(type, value, where, hint)

    def _union(self, type: Type, value: Any, where: Where) -> Any:
        for option in sorted(type.items, key=lambda option: not _exact(option, value)):
            trial = Checker(self.registry, confined=self.confined)
            result = trial.value(option, value, where)
            if not trial.issues:
                return result
        meant = [option for option in type.items if _shaped(option, value)]
        if len(meant) == 1:  # report the problem inside rather than the entire value
            return self.value(meant[0], value, where)
        return self._expected(type, value, where)

    def _list(self, type: Type, value: Any, where: Where) -> Any:
        if not isinstance(value, list | tuple) or not _long_enough(type, value):
            return self._expected(type, value, where)
        return [self.value(type.items[0], item, (*where, index)) for index, item in enumerate(value)]

    def _tuple(self, type: Type, value: Any, where: Where) -> Any:
        result = self._list(type, value, where)
        return None if result is None else tuple(result)

    def _fixed(self, type: Type, value: Any, where: Where) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(type.items):
            return self._expected(type, value, where)
        pairs = enumerate(zip(type.items, value, strict=True))
        return tuple(self.value(option, item, (*where, index)) for index, (option, item) in pairs)

    def _settings(self, type: Type, value: Any, where: Where) -> Any:
        if is_dataclass(value):
            value = plain(value)
        if not isinstance(value, Mapping):
            return self._expected(type, value, where)
        return self.parameters(type.parameters, value, where, dotted(where))

    def _component(self, type: Type, value: Any, where: Where) -> Any:
        kind = type.role
        if self.registry is None:
            named = isinstance(value, str | Block) or (isinstance(value, Mapping) and "name" in value)
            named = named or (kind in SHORT and is_number(value))
            return value if named else self._expected(type, value, where)
        if isinstance(value, Block):
            value = value.to_dict()
        if kind in SHORT and is_number(value):
            if self.value(PLAIN, value, where) is None:
                return None
            value = spelled_out(kind, value)
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            return self._expected(type, value, where)
        if "name" not in given:
            return self._issue(where, f"has no name; write {{name: …}} (blt list {kind})")
        name = given["name"]
        if not isinstance(name, str):
            return self._issue(
                (*where, "name"), f"expected the name of a {kind}, got {shown(name)} (blt list {kind})"
            )
        try:
            registered = self.registry.get(kind, name)
        except MissingError as error:
            return self.issues.append(Issue((*where, "name"), f"{dotted(where)}: {error}"))
        try:
            signature = registered.signature()
        except MissingError as error:
            return self.issues.append(Issue((*where, "name"), f"{dotted(where)}: {error}", missing=True))
        options = {key: item for key, item in given.items() if key != "name"}
        inner = Checker(self.registry, confined=self.confined or kind == "logger")
        values = inner.parameters(signature.parameters, options, where, f"{kind} {name!r}")
        self.issues += inner.issues
        return Block(kind, name, values)


def leaves(path: Path) -> str:
    """Why a path is not an unused file in the run directory; empty if it is."""
    windows = PureWindowsPath(path)
    if path.is_absolute() or windows.drive or windows.root or str(path).startswith("~"):
        return "is not relative to the run directory"
    if ".." in windows.parts or not path.parts:
        return "leads outside the run directory"
    if not all(map(is_component, path.parts)):
        return "has a part that cannot be a file name"
    return "is a name that the run itself uses" if is_reserved(path) else ""


def is_number(value: Any) -> bool:
    """Whether a value is written as a number of a recipe, also ``25/255``; it may be out of bounds."""
    fraction = isinstance(value, str) and FRACTION.fullmatch(value) is not None
    return fraction or _to_float(value) is not None


def spelled_out(kind: str, value: Any) -> dict[str, Any]:
    """The mapping that the short form of a component stands for: its name, or a number where SHORT has one."""
    if kind in SHORT and is_number(value):
        name, option = SHORT[kind]
        return {"name": name, option: value}
    return {"name": value}


def in_short(kind: str, value: Any) -> Any:
    """The plain number that a mapping stands for, where SHORT has one for it; else the value itself."""
    name, option = SHORT.get(kind, ("", ""))
    short = isinstance(value, Mapping) and set(value) == {"name", option} and value["name"] == name
    return value[option] if short else value


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and (match := FRACTION.fullmatch(value)):
        try:
            return float(match[1]) / float(match[2])
        except (ValueError, ZeroDivisionError):
            return None
    return None


def _within(type: Type, value: Any) -> bool:
    bounds = type.bounds
    return (
        ("gt" not in bounds or value > bounds["gt"])
        and ("ge" not in bounds or value >= bounds["ge"])
        and ("lt" not in bounds or value < bounds["lt"])
        and ("le" not in bounds or value <= bounds["le"])
        and ("multiple_of" not in bounds or value % bounds["multiple_of"] == 0)
    )


def _long_enough(type: Type, value: Sequence[Any]) -> bool:
    return type.bounds.get("min_len", 0) <= len(value) <= type.bounds.get("max_len", math.inf)


def _exact(type: Type, value: Any) -> bool:
    """Whether the value has exactly this type, so that ``int | float`` keeps 1 an int."""
    kinds = {"bool": bool, "int": int, "float": float, "str": str, "path": Path}
    return type.name in ("choice", "null") or kinds.get(type.name) is value.__class__


def _shaped(type: Type, value: Any) -> bool:
    """Whether the value has the form of this type, so that the type was probably intended."""
    if isinstance(value, Mapping):
        return type.name in ("settings", "component")
    if isinstance(value, str):
        return type.name == "component"
    if type.name == "component" and type.role in SHORT and is_number(value):
        return True
    return isinstance(value, list | tuple) and type.name in ("list", "tuple", "fixed")
