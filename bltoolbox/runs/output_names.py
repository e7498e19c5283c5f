"""Names of outputs that cannot be written, refused before anything is. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

from bltoolbox.errors import UsageError

#: What the usual file systems take, in bytes.
_LONGEST = 255


def refuse_unusable_name(path: Path | str) -> None:
    """Refuse a name that is not UTF-8, which no log or JSON file can hold, or too long for a file system."""
    text = os.fspath(path)
    shown = text.encode("utf-8", "backslashreplace").decode()
    if shown != text:
        raise UsageError(f"{shown} is not a name in UTF-8; choose another one")
    if "\0" in text:
        raise UsageError(f"{text!r} contains a null character; choose another name")
    for name in Path(text).parts:
        if (size := len(name.encode())) > _LONGEST:
            raise UsageError(
                f"the name {name[:30]}… has {size} bytes, and file systems take {_LONGEST}; choose a shorter one"
            )
