"""The names of the files in a run directory, and the list of those that its run has written.

``--overwrite`` deletes what ``files.json`` lists, and nothing else. The list may come from someone else, so a name
counts only if a run gives such names to its files. A folder in the list, written with a slash, stands for the files
in it with such names; other files in it are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bltoolbox
from bltoolbox.config.names import EXTRA_FILES, FILES, FOLDERS, MANIFEST
from bltoolbox.config.reading import read_json
from bltoolbox.runs.files import list_folder, write_json


class Manifest:
    """The names that the run of a directory has written, and what started it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.there, content = _read(folder)
        names = content.get("files")
        allowed = (*FILES, *EXTRA_FILES, *(f"{name}/" for name in FOLDERS))
        self.names = {name for name in names if name in allowed} if isinstance(names, list) else set()
        self.started_by = content.get("started_by")

    def claim(self, *names: str, started_by: str | None = None) -> None:
        """Record names before they are written."""
        if started_by is None and self.names >= set(names):
            return
        self.names |= set(names)
        self.started_by = started_by or self.started_by
        content = {
            "bltoolbox": bltoolbox.__version__,
            "started_by": self.started_by,
            "files": sorted(self.names),
        }
        write_json(self.folder / MANIFEST, content, within=self.folder)

    def files(self) -> tuple[list[Path], list[Path]]:
        """The existing files: those of the run, and those that merely have such names."""
        mine: list[Path] = []
        strays: list[Path] = []
        for name in list_folder(self.folder, self.folder):
            if name in (*FILES, *EXTRA_FILES):
                (mine if name in self.names else strays).append(self.folder / name)
        for folder, pattern in FOLDERS.items():
            owned = mine if f"{folder}/" in self.names else strays
            names = list_folder(self.folder / folder, self.folder)
            owned += [self.folder / folder / name for name in names if pattern.fullmatch(name)]
        return mine, strays


def _read(folder: Path) -> tuple[bool, dict[str, Any]]:
    """Whether there is a list, and its content."""
    try:
        content = read_json(folder / MANIFEST, follow=False)
    except OSError:
        return False, {}
    except ValueError:  # damaged, or not a regular file
        return True, {}
    return True, content if isinstance(content, dict) else {}
