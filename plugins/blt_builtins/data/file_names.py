"""Which files of two sets belong together: those with the same name.

In a folder, the name of a file is its path from that folder on, without the suffix. For a glob it is what the
wildcards stand for, without a suffix at the end: `gt/*.png` and `low-dose/*.npy` match by the stems of their files,
`scans/*/full.png` and `scans/*/low.png` by their folders.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

#: Names that a message lists.
_LISTED = 3


def named_files(path: str, suffixes: Iterable[str]) -> dict[str, Path]:
    """Files of a folder or a glob by name, in the order of names; hidden files are not looked at."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        by_name: dict[str, list[Path]] = {}
        for file in files_below(folder, suffixes):
            by_name.setdefault(_stem(file.relative_to(folder).as_posix()), []).append(file)
    else:
        by_name = _matched(str(folder), frozenset(suffixes))
    for name, files in by_name.items():
        if len(files) > 1:
            raise ValueError(
                f"two files of {path} are called {name}: {files[0]} and {files[1]}; keep one of them, or give a glob"
                " that tells them apart"
            )
    return {name: by_name[name][0] for name in sorted(by_name)}


def is_glob(path: str) -> bool:
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def refuse_mismatch(sets: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise unless all sets of names, each with what it is called, are equal."""
    title, first = sets[0]
    for other, names in sets[1:]:
        lacking = [
            f"{len(missing)} of {where} have no partner in {what} ({_listed(missing)})"
            for where, what, missing in (
                (title, other, sorted(set(first) - set(names))),
                (other, title, sorted(set(names) - set(first))),
            )
            if missing
        ]
        if lacking:
            raise ValueError(
                f"{' and '.join(lacking)}; files belong together if their names are the same up to the suffix"
            )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def files_below(folder: Path, suffixes: Iterable[str]) -> Iterator[Path]:
    """Regular files with one of the suffixes; links to folders are followed, each folder once."""
    wanted, seen = frozenset(suffixes), set[str]()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            file = Path(place, name)
            # A named pipe would be waited for.
            if not name.startswith(".") and file.suffix.lower() in wanted and file.is_file():
                yield file


def _matched(pattern: str, suffixes: frozenset[str]) -> dict[str, list[Path]]:
    wildcards = re.compile(_groups(pattern.replace(os.sep, "/")))
    by_name: dict[str, list[Path]] = {}
    for text in glob.glob(pattern, recursive=True):
        path = Path(text)
        match = wildcards.fullmatch(text.replace(os.sep, "/"))
        if match and path.suffix.lower() in suffixes and path.is_file():
            name = "/".join(group for group in match.groups() if group)
            ends_open = match.lastindex is not None and match.end(match.lastindex) == len(text)
            by_name.setdefault(_stem(name) if ends_open else name, []).append(path)
    return by_name


def _groups(pattern: str) -> str:
    """A glob as a regular expression with a group for each wildcard."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])", pattern)
    expressions = {"**/": "(?:(.*)/)?", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}

    def expression(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            inner = token[1:-1].replace("\\", r"\\")
            return f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
        return expressions.get(token) or re.escape(token)

    return "".join(map(expression, parts))


def _stem(name: str) -> str:
    return name[: len(name) - len(suffix)] if (suffix := Path(name).suffix) else name
