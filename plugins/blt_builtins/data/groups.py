"""Which photograph each image of an array was cut from: a CSV file beside the array.

It has a header, one row per image, and a column ``photograph``, ``photo``, ``group``, ``source`` or ``image`` (the
first of these that exists). With a column ``index``, the rows may be in any order.
"""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path

from bltoolbox.plugin import TABLE, FileRefused, file_size, open_file

COLUMNS = ("photograph", "photo", "group", "source", "image")


def read_groups(array: Path, total: int, choice: str) -> list[str] | None:
    """The photograph of each of ``total`` images, or None if each image is its own photograph.

    ``choice`` is a file (as given, or beside the array), ``none``, or ``auto``: the CSV file with the name of the
    array, if it exists and has such a column.
    """
    if choice == "none":
        return None
    if choice == "auto":
        file = array.with_suffix(".csv")
        if not file.is_file():
            return None
    else:
        file = Path(choice).expanduser()
        file = file if file.is_file() else array.parent / file
        if not file.is_file():
            raise ValueError(f"groups: there is no file {choice}, here or beside {array}")
    try:
        with open_file(file) as raw:
            TABLE.check(file, file_size(raw))
            lines = io.TextIOWrapper(raw, newline="", encoding="utf-8-sig")
            # One row too many shows that the file does not fit; the others need not be kept.
            rows = list(itertools.islice(csv.DictReader(lines), total + 1))
            columns = {str(name).strip().lower(): name for name in (rows[0] if rows else ())}
    except (OSError, csv.Error, UnicodeDecodeError, FileRefused) as error:
        raise ValueError(f"groups: {file} cannot be read: {error}; groups: none does without it") from error
    column = next((columns[name] for name in COLUMNS if name in columns), None)
    if column is None:
        if choice == "auto":
            return None
        raise ValueError(f"groups: {file} has no column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]}")
    index = columns.get("index")
    order = [row[index] if index else i for i, row in enumerate(rows)]
    groups = {str(place).strip(): str(row[column]).strip() for place, row in zip(order, rows, strict=True)}
    count = str(len(rows)) if len(rows) <= total else "more"
    if len(rows) != total or set(groups) != {str(i) for i in range(total)} or not all(groups.values()):
        raise ValueError(
            f"groups: {file} must have one row for each of the {total} images of {array.name}, but has {count}"
            f" rows{' with other indices' if len(rows) == total else ''}; groups: none does without it"
        )
    name = file.resolve()
    return [f"{name} {groups[str(i)]}" for i in range(total)]
