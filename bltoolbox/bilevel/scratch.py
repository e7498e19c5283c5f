"""Where files of the size of the warm starts lie: on a disk of this machine, not in the run directory, which may be
shared by many over a network.

``BLT_SCRATCH`` names the folder; else the folder for temporary files (``TMPDIR``, which batch systems set to the local
disk), unless it is in memory or full, and else the one that the caller suggests.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bltoolbox.errors import UsageError

T = TypeVar("T")

VARIABLE = "BLT_SCRATCH"
MOUNTS = Path("/proc/mounts")
_IN_MEMORY = ("tmpfs", "ramfs")
#: What another folder may not suffer from: no room, no right to write, no such folder.
_ELSEWHERE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT)


def scratch_folders(suggested: Path | None) -> list[Path]:
    """Folders to try in turn."""
    if given := os.environ.get(VARIABLE):
        if not os.path.isdir(given) or not os.access(given, os.W_OK):
            raise UsageError(
                f"{VARIABLE}={given} is not a folder that can be written to; name another or unset it"
            )
        return [Path(given)]
    temporary = Path(tempfile.gettempdir())
    if suggested is None:
        return [temporary]
    return [suggested, temporary] if in_memory(temporary) else [temporary, suggested]


def in_scratch(suggested: Path | None, make: Callable[[Path], T]) -> T:
    """What ``make`` returns in the first folder that has room for it."""
    *others, last = scratch_folders(suggested)
    for folder in others:
        try:
            return make(folder)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
    return make(last)


def in_memory(folder: Path) -> bool:
    """Whether the files of a folder take memory; False where the system does not say."""
    try:
        mounts = [line.split() for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    place = folder.resolve()
    homes = [
        (len(point), kind)
        for _, point, kind, *_ in (mount for mount in mounts if len(mount) > 2)
        if place.is_relative_to(point)
    ]
    return max(homes, default=(0, ""))[1] in _IN_MEMORY
