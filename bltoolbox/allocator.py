"""Memory that was freed stays with the process.

The C library hands large blocks back to the system as soon as they are freed, and the system clears each page again
when the next tensor touches it. Iterations that make a handful of large tensors each then spend up to half of their
time in page faults. glibc can be told to keep what it has: the process stays as large as it once was, which is no
larger than before.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

#: From malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER = (1 << 31) - 1
_PAD = 64 << 20


@cache
def keep_freed_memory() -> bool:
    """Whether it was done: once a process, with glibc, unless a variable ``MALLOC_…`` says what the user wants."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries have a mallopt of other meaning
        set_option = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # A threshold would not do: glibc takes none above 32 MB, and the responses of 24 filters at 600² are larger.
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
    return all([set_option(option, value) for option, value in options])
