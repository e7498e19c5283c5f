"""Names of files: those that a run directory uses, those that a recipe may choose, and those that cannot be written.

Without torch. ``runs`` reads and writes what is named here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from bltoolbox.errors import UsageError

#: The longest name that common file systems accept, in bytes.
_LONGEST = 255

LOCK_FILE = "lock"
MANIFEST = "files.json"
LOGS = ("metrics.jsonl", "timings.jsonl", "checks.jsonl", "log.txt")
#: What every run writes, and what only some do.
FILES = (
    "recipe.yaml",
    "resolved.yaml",
    *LOGS,
    "status.json",
    "env.json",
    "theta.safetensors",
    "report.html",
)
EXTRA_FILES = ("trace.json",)
#: State to continue from, θ at each check, pictures; and the names of the files in them.
FOLDERS = {
    "checkpoints": re.compile(
        r"(state|warm|own)-[0-9]{8,}(-p[0-9]+)?(-[0-9]+of[0-9]+)?\.ckpt|(best|last)\.safetensors"
    ),
    "thetas": re.compile(r"[0-9]{6,}\.safetensors"),
    "images": re.compile(r"(restored|curves|filters)\.png|evaluation\.json|evaluation-[0-9]+-[a-z]+\.png"),
}


def is_component(name: object) -> bool:
    """Whether ``name`` is the name of one file or folder: not a path, nothing special, nothing invisible."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= _LONGEST:
        return False
    return name not in (".", "..") and not re.search(
        r"[/\\\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", name
    )


def is_reserved(path: Path) -> bool:
    """Whether a relative path is one that a run itself writes to."""
    first = path.parts[0].casefold() if path.parts else ""
    return first in FOLDERS or first in (*FILES, *EXTRA_FILES, MANIFEST, LOCK_FILE)


def refuse_unusable_name(path: Path | str) -> None:
    """Refuse a name that is not UTF-8, which no log or JSON file can contain, or too long for a file system."""
    text = os.fspath(path)
    shown = text.encode("utf-8", "backslashreplace").decode()
    if shown != text:
        raise UsageError(f"{shown} is not a UTF-8 name; choose another one")
    if "\0" in text:
        raise UsageError(f"{text!r} contains a null character; choose another name")
    for name in Path(text).parts:
        if (size := len(name.encode())) > _LONGEST:
            raise UsageError(
                f"the name {name[:30]}… has {size} bytes, but file systems allow {_LONGEST}; choose a shorter one"
            )
