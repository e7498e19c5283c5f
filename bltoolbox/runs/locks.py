"""Locks: only one process at a time writes to a directory. A lock is released when its process ends, however it
ends."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bltoolbox.config.names import LOCK_FILE
from bltoolbox.config.reading import FileRefused, open_file
from bltoolbox.errors import BltError, UsageError
from bltoolbox.runs.files import open_regular

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Set to 1 to accept file systems without locks, where two processes may write to one directory.
NO_LOCK = "BLT_NO_LOCK"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
#: ``is_locked`` holds a lock briefly, so acquiring one is tried a few times, this many seconds apart.
_TRIES, _PAUSE = 6, 0.05


@contextlib.contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a directory; ``busy`` is the message if another process holds it."""
    with open_regular(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, within=folder) as lock:
        for attempt in range(_TRIES):
            if acquire(lock, folder):
                break
            if attempt == _TRIES - 1:
                raise UsageError(busy)
            time.sleep(_PAUSE)
        yield


def acquire(lock: IO[bytes], folder: Path, *, wait: bool = False) -> bool:
    """Take the lock of an open file; False if another process holds it. Closing the file releases it."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if os.environ.get(NO_LOCK) != "1":
            raise BltError(
                f"the file system of {folder} has no locks ({error.strerror}), so a second process could write"
                f" there; choose a directory elsewhere, or set {NO_LOCK}=1 and make sure that only one process does"
            ) from error
    return True


def is_locked(folder: Path) -> bool:
    """Whether a process is writing to a directory."""
    try:
        with open_file(folder / LOCK_FILE, follow=False) as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, FileRefused):
        return False
    return False
