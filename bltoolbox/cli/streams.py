"""The standard streams of the command, whose reader may have closed them or whose disk may be full.

A command exits quietly once its output is no longer read, as in ``blt list | head -1``, with 141 like other programs.
Output that cannot be written for another reason is an error. Messages on stderr are dropped instead: a run does not
stop because they are not read.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import Any, TextIO

from bltoolbox.errors import BltError

#: The exit code of a command whose output is no longer read; the same as after SIGPIPE.
CLOSED = 128 + getattr(signal, "SIGPIPE", 13)


class OutputFailed(BltError):
    """Standard output cannot be written. Not an OSError, which libraries handle in their own ways."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to standard output: {error.strerror or error}")
        self.exit_code = CLOSED if error.errno == errno.EPIPE else 1


class _Guarded(io.FileIO):
    """A standard stream; everything after the first failure is dropped."""

    def __init__(self, descriptor: int, strict: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.strict = strict
        self.failed = False

    def write(self, content: Any, /) -> int:
        if not self.failed:
            try:
                return super().write(content)
            except BlockingIOError:
                raise
            except OSError as error:
                self.failed = True
                if self.strict:
                    raise OutputFailed(error) from error
        return len(content)


def guard_streams() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that fail as described above."""
    for descriptor in range(3):
        # A closed descriptor would be reused by the next file that is opened, which would then receive the output.
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _guarded(sys.stdout, 1, strict=True)
    sys.stderr = _guarded(sys.stderr, 2, strict=False)


def _guarded(stream: TextIO | None, descriptor: int, strict: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Guarded(descriptor, strict)),
        encoding=getattr(stream, "encoding", None),
        errors="replace",
        line_buffering=not strict or os.isatty(descriptor),
    )
