"""Freed memory stays with the process for a while, if the process asks for it.

The C library returns large blocks to the system as soon as they are freed, and the system clears each page again
when the next tensor touches it. Iterations that make a handful of large tensors each then spend up to half of their
time in page faults. glibc can be told to keep what it has, for the whole process: the ``blt`` command does that, a
library must not do it behind the back of whoever imports it. Blocks of ever new sizes would leave ever new gaps, so
what is free goes back every few seconds, between two solves.
"""

from __future__ import annotations

import ctypes
import os
import time

#: From malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_NEVER = (1 << 31) - 1
_PAD = 64 << 20
#: Seconds. A gigabyte that goes back costs a quarter of a second when it is touched again.
WHILE = 10.0


class Allocator:
    """The C library's; ``library`` is None until it keeps memory."""

    def __init__(self) -> None:
        self.library: ctypes.CDLL | None = None
        self.returned_at = 0.0

    def keep(self) -> bool:
        """Set the options of glibc, unless the user has set some; whether freed memory is kept from now on."""
        if self.library is None and not any(name.startswith("MALLOC_") for name in os.environ):
            library = _glibc()
            # A threshold is no help: glibc takes none above 32 MB, and responses of 24 filters at 600² are larger.
            # The heaps of other threads have 64 MB and are given back when they are empty, so all share one.
            options = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _PAD))
            if library is not None and all([library.mallopt(option, value) for option, value in options]):
                self.library, self.returned_at = library, time.monotonic()
        return self.library is not None

    def give_back(self, after: float = 0.0) -> bool:
        """Return what is free to the system, unless that was done less than ``after`` seconds ago."""
        if self.library is None or time.monotonic() < self.returned_at + after:
            return False
        self.returned_at = time.monotonic()
        self.library.malloc_trim(0)
        return True


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is that of GNU; others have a mallopt of other meaning."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    needed = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return library if all(hasattr(library, name) for name in needed) else None


#: There is one heap per process, and so one of these.
_ALLOCATOR = Allocator()


def keep_freed_memory() -> bool:
    """Solve faster on the CPU, up to twice: keep freed memory in this process for a few seconds instead of none.

    It concerns everything in the process and cannot be undone, so nothing but the ``blt`` command calls it by itself;
    call it once at the top of a script or notebook of your own. Only glibc can do it, and a ``MALLOC_…`` variable in
    the environment goes first; returns whether memory is kept.
    """
    return _ALLOCATOR.keep()


def return_freed_memory(after: float = 0.0) -> bool:
    """Give back what is kept, unless that was done less than ``after`` seconds ago; does nothing if nothing is
    kept."""
    return _ALLOCATOR.give_back(after)
