"""YAML with positions: from text to plain data with the position of each value, and back.

The scalars are those of YAML 1.2 (``1e-6`` is a number, ``on`` is text, ``012`` is 12). Only one document of
mappings, lists and scalars is allowed: tags, anchors and aliases are refused, so nothing that is read can
construct an object or grow beyond its file; size and depth are bounded. Each mistake becomes a Problem, and
reading continues where that makes sense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import yaml

from bltoolbox.config.validation import Where, dotted
from bltoolbox.errors import Problem

MAX_DEPTH = 20
#: Python refuses to convert longer ones, and no parameter is that large.
MAX_DIGITS = 300

INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Spot:
    """A position in a file; lines and columns count from 1."""

    file: str
    line: int = 1
    column: int = 1
    #: The line of text, if it is known.
    source: str = field(default="", compare=False, repr=False)

    def problem(self, message: str) -> Problem:
        return Problem(message, self.file, self.line, self.column, self.source)


@dataclass
class Document:
    """Plain data, the positions of its keys and values, and the problems of the text."""

    data: Any
    root: Spot
    keys: dict[Where, Spot] = field(default_factory=dict)
    values: dict[Where, Spot] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def spot(self, where: Where, at_key: bool = False) -> Spot:
        """The position of a value, or of the nearest collection around it."""
        if at_key and where in self.keys:
            return self.keys[where]
        while where and where not in self.values:
            where = where[:-1]
        return self.values.get(where, self.root) if where else self.root

    def part(self, where: Where, data: Any) -> Document:
        """A copy of ``data``, the value at ``where``, with the positions that are known in it."""
        size = len(where)
        keys, values = (
            {
                place[size:]: spot
                for place, spot in table.items()
                if place[:size] == where and len(place) > size
            }
            for table in (self.keys, self.values)
        )
        return Document(deepcopy(data), self.spot(where), keys, values)

    def graft(self, where: Where, other: Document) -> None:
        """Record that the value at ``where`` now comes from another document."""
        for table in (self.keys, self.values):
            for old in [key for key in table if key[: len(where)] == where]:
                del table[old]
        self.keys[where] = self.values[where] = other.root
        self.keys.update({(*where, *key): spot for key, spot in other.keys.items()})
        self.values.update({(*where, *key): spot for key, spot in other.values.items()})
        self.problems += other.problems


def scalar(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INT.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else text
    for form, base in ((r"0o[0-7]+", 8), (r"0x[0-9a-fA-F]+", 16)):
        if re.fullmatch(form, text):
            return int(text[2:], base) if len(text) <= MAX_DIGITS else text
    return float(text) if FLOAT.fullmatch(text) else text


def parse(text: str, root: Spot) -> Document:
    """Read one document that starts at ``root``."""
    return _Composer(text, root).document


def dump(data: Any) -> str:
    """Plain data as YAML that ``parse`` reads back unchanged; innermost collections on one line."""
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=1_000_000
    )
    return text


def dump_inline(data: Any) -> str:
    """Plain data as YAML on one line."""
    text: str = yaml.dump(data, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML quotes what YAML 1.1 would misread; what only YAML 1.2 would misread (1e-6) is left to us, and so are
    # control characters and exotic line breaks, which it writes unescaped unless the quotes are double.
    style = None if isinstance(scalar(value), str) else "'"
    if not value.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


class _Stop(Exception):
    """Reading cannot continue."""


class _Composer:
    def __init__(self, text: str, root: Spot) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.origin = root
        self.document = Document(None, root)
        try:
            self._read_quickly()
        except _Stop:
            pass
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._problem(mark, _explain(error))
        except yaml.reader.ReaderError as error:
            before = text[: error.position].split("\n")
            message = f"the character U+{int(error.character):04X} is not allowed in YAML"
            self.document.problems.append(self._spot(len(before) - 1, len(before[-1])).problem(message))
        except RecursionError:
            self.document.problems.append(root.problem("nested too deeply"))

    def _read_quickly(self) -> None:
        """With the parser in C, if there is one; the one in Python explains what is wrong."""
        try:
            self._read(getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            self.document = Document(None, self.origin)
            self._read(yaml.SafeLoader)

    def _read(self, loader: Any) -> None:
        events: Iterator[Any] = iter(yaml.parse(self.text, Loader=loader))
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._problem(
                        event.start_mark, "a second document begins here; a recipe is a single document"
                    )
                    raise _Stop
            elif isinstance(event, yaml.NodeEvent):
                self.document.data = self._node(event, events, ())
                self.document.root = self.document.values[()]

    def _node(self, event: Any, events: Iterator[Any], where: Where) -> Any:
        mark = event.start_mark
        self.document.values[where] = self._spot(mark.line, mark.column)
        if len(where) > MAX_DEPTH:
            self._problem(mark, f"nested more than {MAX_DEPTH} levels deep")
            raise _Stop
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._problem(
                mark, f"{self._label(where)}anchors (&) and aliases (*) are not allowed; write the value out"
            )
        if isinstance(event, yaml.AliasEvent):
            return None
        if event.tag is not None:
            self._problem(mark, f"{self._label(where)}tags (!) are not allowed; write the plain value")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, where)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self._node(event, events, (*where, len(items))))
            return items
        return event.value if event.style else scalar(event.value)

    def _mapping(self, events: Iterator[Any], where: Where) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            mark = event.start_mark
            if not isinstance(event, yaml.ScalarEvent):
                self._problem(mark, f"{self._label(where)}a key must be plain text")
                raise _Stop
            here = (*where, event.value)
            if event.value in mapping:
                first = self.document.keys[here]
                self._problem(mark, f"{dotted(here)}: duplicate key, first given in line {first.line}")
                self._node(next(events), events, (*where, event.value, "again"))
                continue
            self.document.keys[here] = self._spot(mark.line, mark.column)
            mapping[event.value] = self._node(next(events), events, here)
        return mapping

    def _label(self, where: Where) -> str:
        return f"{dotted(where)}: " if where else ""

    def _spot(self, line: int, column: int) -> Spot:
        origin, source = self.origin, self.lines[line] if line < len(self.lines) else ""
        if line == 0:  # behind the key of an override
            return Spot(origin.file, origin.line, origin.column + column, origin.source + source)
        return Spot(origin.file, origin.line + line, 1 + column, source)

    def _problem(self, mark: Any, message: str) -> None:
        spot = self._spot(mark.line, mark.column) if mark else self.origin
        self.document.problems.append(spot.problem(message))


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or error.context or "cannot be parsed"
    if "'\\t'" in problem:
        return "a tab is not allowed here; YAML is indented with spaces"
    if "mapping values are not allowed" in problem:
        return "not valid YAML: a ':' is not allowed here; check the indentation, or quote the value"
    return f"not valid YAML: {problem}"
