"""The space of a search: ``KEY=LOW..HIGH`` is a range, ``KEY=log:LOW..HIGH`` one on a logarithmic scale.

Both ends belong to a range; it contains whole numbers if both ends are whole numbers, and ends may be fractions,
``noise=5/255..50/255``. As in a grid, ``KEY=a,b,c`` are choices, and a single value is a plain override.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bltoolbox.config.yaml_text import scalar
from bltoolbox.errors import UsageError
from bltoolbox.training.sweep.grid import Cell, Grid, parse_grid, readable, short_keys, shortened

_FORM = "write LOW..HIGH or log:LOW..HIGH, e.g. upper_optimizer.step=log:1e-4..1e-1"
_RANGE = re.compile(r"\s*(log:)?\s*([^\s:]+?)\s*\.\.\s*([^\s:]+?)\s*")


@dataclass(frozen=True)
class Range:
    """Numbers between two ends."""

    low: float
    high: float
    log: bool
    whole: bool

    def text(self, value: float) -> str:
        """A value as an override; four digits are more than a search can tell apart."""
        if self.whole:
            return str(round(value))
        return repr(min(self.high, max(self.low, float(f"{value:.4g}"))))


@dataclass(frozen=True)
class Space:
    """What a search varies, and what it keeps."""

    ranges: dict[str, Range]
    choices: dict[str, list[str]]
    fixed: dict[str, str]
    #: As it was written, in the order of the command line.
    grid: Grid

    def corners(self) -> list[Cell]:
        """Cells at both ends of every range and with every choice: if they are valid, the others are likely to be."""
        count = max([2, *map(len, self.choices.values())])
        cells = []
        for number in range(count):
            values = {
                key: ends.text(ends.high if number % 2 else ends.low) for key, ends in self.ranges.items()
            }
            values |= {key: texts[number % len(texts)] for key, texts in self.choices.items()}
            cells.append(self.cell(values))
        return [cell for k, cell in enumerate(cells) if cell.name not in {c.name for c in cells[:k]}]

    def cell(self, values: Mapping[str, str]) -> Cell:
        """A point of the space."""
        settings = {key: values[key] for key in self.grid.values if key in values}
        labels = short_keys(list(settings))
        name = shortened(",".join(f"{labels[key]}={readable(value)}" for key, value in settings.items()))
        return Cell(name, settings, [f"{key}={value}" for key, value in (self.fixed | settings).items()])

    def ask(self, trial: Any) -> Cell:
        """The point that a trial of Optuna suggests."""
        values = {}
        for key, ends in self.ranges.items():
            if ends.whole:
                values[key] = ends.text(trial.suggest_int(key, int(ends.low), int(ends.high), log=ends.log))
            else:
                values[key] = ends.text(trial.suggest_float(key, ends.low, ends.high, log=ends.log))
        for key, texts in self.choices.items():
            values[key] = trial.suggest_categorical(key, texts)
        return self.cell(values)


def parse_space(arguments: Sequence[str], variants: Sequence[str] = ()) -> Space:
    """From ``KEY=…`` words, with the variants of the recipe as choices unless some are named."""
    grid = parse_grid(arguments)
    if variants and "variant" not in grid.values:
        grid = Grid({"variant": list(variants)} | grid.values)
    ranges: dict[str, Range] = {}
    choices: dict[str, list[str]] = {}
    fixed: dict[str, str] = {}
    for key, texts in grid.values.items():
        spans = [text for text in texts if ".." in text or text.strip().startswith("log:")]
        if not spans and len(texts) > 1:
            choices[key] = texts
        elif not spans:
            fixed[key] = texts[0]
        elif len(texts) > 1:
            raise UsageError(f"{key}={','.join(texts)}: a range stands alone; {_FORM}")
        else:
            ranges[key] = _range(key, texts[0])
    if not ranges and not choices:
        raise UsageError(f"--search needs a range or choices; {_FORM}")
    return Space(ranges, choices, fixed, grid)


def _range(key: str, text: str) -> Range:
    match = _RANGE.fullmatch(text)
    ends = [] if match is None else [_number(end) for end in match.groups()[1:]]
    if match is None or any(end is None for end in ends):
        raise UsageError(f"{key}={text} is not a range; {_FORM}")
    low, high = (end for end in ends if end is not None)
    log = match[1] is not None
    if not low < high:
        raise UsageError(f"{key}={text}: the first end must be below the second one")
    if log and low <= 0:
        raise UsageError(f"{key}={text}: a logarithmic range needs positive ends")
    return Range(low, high, log, isinstance(low, int) and isinstance(high, int))


def _number(text: str) -> int | float | None:
    """A finite number or a fraction of two; None if it is neither."""
    parts = [scalar(text_part) for text_part in text.split("/")]
    if len(parts) > 2 or any(
        isinstance(number, bool) or not isinstance(number, int | float) for number in parts
    ):
        return None
    if not all(math.isfinite(number) for number in parts) or (len(parts) == 2 and parts[1] == 0):
        return None
    value: int | float = parts[0] if len(parts) == 1 else parts[0] / parts[1]
    return value
