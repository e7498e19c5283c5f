"""A grid of recipes: ``KEY=a,b,c`` on the command line becomes one cell for each combination of values.

A comma separates values unless it is inside brackets, braces or quotes, so a value may be a list or a complete
component: ``upper_optimizer={name: isgd, step: 1},maid``. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bltoolbox.config.yaml_text import Spot, parse
from bltoolbox.errors import UsageError
from bltoolbox.runs.settings import shown

#: More cells than this are assumed to be a mistake.
MAX_CELLS = 10_000
#: Longest name of a cell; longer names are shortened and made unique by a checksum.
MAX_NAME = 80

_OPEN, _CLOSE = "[{", "]}"


@dataclass(frozen=True)
class Cell:
    """One point of the grid: its distinctive values, and all overrides of its run."""

    name: str
    settings: dict[str, str]
    overrides: list[str]


@dataclass(frozen=True)
class Grid:
    """Keys in the order they were given, each with its values as they were written."""

    values: dict[str, list[str]]

    @property
    def varying(self) -> list[str]:
        """The keys with several values."""
        return [key for key, values in self.values.items() if len(values) > 1]

    def __len__(self) -> int:
        return math.prod(len(values) for values in self.values.values())

    def cells(self) -> list[Cell]:
        """Every combination; the last key varies fastest. Names are unique, also on file systems that ignore case."""
        varying = self.varying
        labels = short_keys(varying)
        cells: list[Cell] = []
        taken: set[str] = set()
        for values in itertools.product(*self.values.values()):
            all_settings = dict(zip(self.values, values, strict=True))
            settings = {key: all_settings[key] for key in varying}
            parts = [f"{labels[key]}={readable(value)}" for key, value in settings.items()]
            name = free_name(shortened(",".join(parts) or "run"), taken)
            taken.add(name.casefold())
            cells.append(Cell(name, settings, [f"{key}={value}" for key, value in all_settings.items()]))
        return cells


def parse_grid(arguments: Sequence[str]) -> Grid:
    """From ``KEY=a,b,c`` words, in the order in which they were given."""
    values: dict[str, list[str]] = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        key = ".".join(name.strip() for name in key.split("."))
        if not all(key.split(".")):
            raise UsageError(f"{argument!r} is not of the form KEY=a,b,c, e.g. sampler.size=8,16")
        if key in values:
            raise UsageError(f"{key} is given twice; write all its values after one '=': {key}=a,b,c")
        values[key] = _values(key, text)
    grid = Grid(values)
    if len(grid) > MAX_CELLS:
        raise UsageError(f"the grid has {len(grid):,} cells, more than {MAX_CELLS:,}; split the sweep")
    return grid


def with_variants(grid: Grid, names: Sequence[str]) -> Grid:
    """The grid over all variants of a recipe, unless it names some of them itself."""
    if not names or "variant" in grid.values:
        return grid
    return Grid({"variant": list(names)} | grid.values)


def split_values(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes."""
    parts, depth, quote, begun = [""], 0, "", True
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            begun = True
            continue
        parts[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and begun:
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth = max(0, depth - 1)
        # A quote opens one where a value begins; within a word it is an apostrophe.
        begun = not quote and (letter in _OPEN + ",:" or (begun and letter.isspace()))
    return [piece.strip() for piece in parts]


def _values(key: str, text: str) -> list[str]:
    values = split_values(text)
    if len(values) == 1:
        return [text]
    if not all(values):
        raise UsageError(f"{key}={text}: there is an empty value; write null for none")
    seen: dict[str, str] = {}
    for value in values:
        same = repr(_data(value))
        if same in seen:
            raise UsageError(f"{key}={text}: {value} is given twice" + _as(seen[same], value))
        seen[same] = value
    return values


def _as(first: str, again: str) -> str:
    return "" if first == again else f", first as {first}"


def _data(value: str) -> Any:
    """A value as YAML reads it; the text itself if it is not YAML, which validation reports."""
    document = parse(value, Spot("<override>"))
    return value if document.problems else document.data


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key, shortened to its last parts as far as it stays unique."""
    short: dict[str, str] = {}
    for key in keys:
        names = key.split(".")
        endings = [".".join(names[-count:]) for count in range(1, len(names) + 1)]
        others = [f".{other}" for other in keys if other != key]
        short[key] = next(
            (ending for ending in endings if not any(other.endswith(f".{ending}") for other in others)), key
        )
    return short


def readable(value: str) -> str:
    """A value as a part of a file name: ``isgd+step=1`` for ``{name: isgd, step: 1}``."""
    text = "+".join(_words(_data(value)))
    return re.sub(r"[^\w.+=-]+", "-", text, flags=re.ASCII).strip("-") or "empty"


def _words(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            inner = "+".join(_words(value))
            yield inner if key == "name" else f"{key}={inner}"
    elif isinstance(data, list):
        for value in data:
            yield from _words(value)
    else:
        yield shown(data)


def shortened(name: str) -> str:
    """A name that file systems accept; a checksum keeps long ones apart."""
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME - 9].rstrip('.,+=-')}-{digest}"


def free_name(name: str, taken: set[str]) -> str:
    """The name, or the first of ``name-2``, ``name-3``, … that is not taken (in small letters)."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate.casefold() not in taken)
