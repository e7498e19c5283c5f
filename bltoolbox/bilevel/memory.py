"""Memory that was freed stays with the process, for a while.

The C library hands large blocks back to the system as soon as they are freed, and the system clears each page again
when the next tensor touches it. Iterations that make a handful of large tensors each then spend up to half of their
time in page faults. glibc can be told to keep what it has. Blocks of ever new sizes would leave ever new gaps, so what
is free goes back every few seconds, between two solves.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import cache

#: From malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = (1 << 31) - 1
_PAD = 64 << 20
#: Seconds. A gigabyte that goes back costs a quarter of a second when it is touched again.
_WHILE = 10.0


def keep_freed_memory() -> bool:
    """Keep freed memory for a while, with glibc, unless a ``MALLOC_…`` variable is set; return whether it is kept."""
    return_freed_memory(after=_WHILE)
    return _glibc() is not None


def return_freed_memory(after: float = 0.0) -> bool:
    """Give back what is free, if that was done so many seconds ago; whether it was done."""
    library = _glibc()
    if library is None or time.monotonic() < _Last.time + after:
        return False
    _Last.time = time.monotonic()
    library.malloc_trim(0)
    return True


class _Last:
    time = time.monotonic()


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, told to keep memory; once a process."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return None
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries have a mallopt of other meaning
        set_option = library.mallopt
    except (AttributeError, OSError, TypeError):
        return None
    # A threshold would not do: glibc takes none above 32 MB, and the responses of 24 filters at 600² are larger.
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return library if all([set_option(option, value) for option, value in options]) else None
