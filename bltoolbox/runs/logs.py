"""The files of a run directory as data, for everyone who reads them: logs, status, environment, recipe. No torch.

They may be damaged, unfinished or come from someone else: what cannot be read is left out, and noted where someone
asks for notes. Logs are read completely, from their end, or (``Tail``) as they grow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bltoolbox.config.names import ENV_FILE, LOG_FILE, PICTURES_INDEX, RECIPE_FILE, STATUS_FILE
from bltoolbox.config.reading import (
    LOG,
    RECIPE,
    FileRefused,
    Limit,
    open_file,
    parse_json,
    read_bytes,
    read_end,
    read_json,
    read_start,
    read_text,
)
from bltoolbox.config.yaml_text import Spot, parse

#: No run writes larger numbers, and axes cannot show them.
LARGEST = 1e100
#: Number of bytes that are read at the beginning or the end of a log.
_END = 1 << 16


def number(value: Any) -> float | None:
    """A number that a figure can show, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if abs(value) < LARGEST else None
    except OverflowError:
        return None


def read_status(path: Path) -> dict[str, Any] | None:
    """The content of ``status.json``; None if it cannot be read."""
    return _read_object(path / STATUS_FILE)


def read_environment(path: Path) -> dict[str, Any]:
    """The content of ``env.json``; empty if it cannot be read."""
    return _read_object(path / ENV_FILE) or {}


def read_index(path: Path) -> list[dict[str, Any]]:
    """The index of the pictures of a finished run; empty if it is missing or damaged."""
    try:
        content = read_json(path / PICTURES_INDEX, follow=False)
    except (OSError, ValueError):
        return []
    usable = isinstance(content, list) and all(isinstance(entry, dict) for entry in content)
    return content if usable else []


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path, follow=False)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_source(path: Path) -> str:
    """A recipe as text; empty if it cannot be read."""
    return _text(read_bytes, path, RECIPE)


def log_start(path: Path) -> str:
    """The beginning of ``log.txt``."""
    return _text(read_start, path / LOG_FILE, _END)


def log_end(path: Path) -> list[str]:
    """The last lines of ``log.txt``."""
    return _text(read_end, path / LOG_FILE, _END).splitlines()


def _text(read: Callable[..., bytes], path: Path, bound: Limit | int) -> str:
    try:
        return read(path, bound, follow=False).decode("utf-8", "replace")
    except (OSError, FileRefused):
        return ""


def read_recipe(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        document = parse(
            read_text(path / RECIPE_FILE, RECIPE, follow=False, errors="replace"), Spot(str(path))
        )
    except (OSError, FileRefused):
        document = parse("", Spot(str(path)))
    if document.problems or not isinstance(document.data, dict):
        notes.append(f"{RECIPE_FILE} is damaged, so its settings are unknown")
        return {}
    return document.data


def read_lines(path: Path, notes: list[str], *, required: bool = True) -> list[dict[str, Any]]:
    """The JSON objects of a log, line by line; damaged lines are left out and noted."""
    try:
        text = read_text(path, LOG, follow=False, errors="replace")
    except FileRefused as error:
        notes.append(str(error))
        return []
    except OSError:
        if required:
            notes.append(f"{path.name} is missing")
        return []
    return _parse_lines(text.split("\n"), path.name, notes)


def read_tail(path: Path, size: int = _END) -> list[dict[str, Any]]:
    """The last lines of a log that is being written."""
    try:
        end = read_end(path, size, follow=False)
    except (OSError, FileRefused):
        return []
    lines = end.decode("utf-8", "replace").split("\n")
    return _parse_lines(lines if len(end) < size else lines[1:], path.name, [])


def _parse_lines(lines: Sequence[str], name: str, notes: list[str]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line, name) if line.strip() else None
        except ValueError:
            record = ()
        if isinstance(record, dict):
            records.append(record)
        elif record is not None:
            damaged.append(number)
    if damaged:
        many = len(damaged) > 1
        places = ", ".join(map(str, damaged[:5])) + (", …" if len(damaged) > 5 else "")
        notes.append(
            f"{name}: line{'s' * many} {places} cannot be read and {'are' if many else 'is'} left out"
        )
    return records


def by_step(lines: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Lines by their step; the last line of a step wins."""
    return {line["step"]: line for line in lines if isinstance(line.get("step"), int)}


class Tail:
    """The lines of a log that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._place = 0
        self._file = 0
        self._rest = b""

    def look(self) -> list[dict[str, Any]]:
        """All complete lines so far; damaged lines are left out."""
        try:
            with open_file(self.path, follow=False) as log:
                status = os.fstat(log.fileno())
                LOG.check(self.path, status.st_size)
                if status.st_size < self._place or status.st_ino != self._file:
                    self.lines, self._place, self._rest, self._file = [], 0, b"", status.st_ino
                log.seek(self._place)
                new = log.read(status.st_size - self._place)
        except (OSError, FileRefused):
            return self.lines
        self._place += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        for line in whole:
            try:
                record = parse_json(line, self.path)
            except ValueError:
                continue
            if isinstance(record, dict):
                self.lines.append(record)
        return self.lines
