"""SIGINT and SIGTERM, delivered only where nothing can be left incomplete.

In a run (``handled``), a signal outside ``allowed`` waits; inside it raises ``Interrupted`` at once, and the
code there undoes what it began. A signal that waits is acknowledged at once, and a second Ctrl-C ends the process
without waiting: files are replaced atomically, so what was written stays intact. Elsewhere in a command
(``end_process``) it always raises ``Interrupted``, except during imports, where extension modules turn exceptions into
other ones, and at the very end: there the process exits at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds after which another Ctrl-C is meant; a shell may deliver one twice.
_AGAIN = 0.3
#: Codes of a terminal: start of an empty line, visible cursor.
_LINE, _CURSOR = "\r\x1b[2K", "\x1b[?25h"


class Interrupted(BaseException):
    """The run was asked to stop; ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass
class _State:
    """How this process responds to the two signals; there is one such object per process."""

    allowed: bool = False
    pending: int | None = None
    #: Whether nothing remains to be done but to exit.
    ending: bool = False
    #: Whether a user at the keyboard is told that a signal waits, and may insist.
    answers: bool = False
    since: float = 0.0


_state = _State()


def _handle(number: int, frame: FrameType | None) -> None:
    first = _state.pending is None and not _state.since
    if first:
        _state.since = time.monotonic()
    elif _state.answers and number == signal.SIGINT and time.monotonic() - _state.since > _AGAIN:
        _write("interrupted at once" if not os.isatty(2) else f"{_CURSOR}interrupted at once")
        os._exit(128 + number)
    _state.pending = number
    if _state.answers and first:
        more = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        _write(f"interrupting at the next safe place{more}")
    if _state.allowed:
        _raise()


def _write(sentence: str) -> None:
    """A line on stderr. Past Python's buffers, which the signal may have found locked."""
    with contextlib.suppress(OSError):
        os.write(2, (f"{_LINE}{sentence}\n" if os.isatty(2) else f"{sentence}\n").encode())


def _raise() -> None:
    number, _state.pending, _state.allowed = _state.pending, None, False
    if number is not None:
        raise Interrupted(number)


@contextlib.contextmanager
def handled(answers: bool = False) -> Iterator[None]:
    """Turn the two signals into ``Interrupted`` within this block (main thread only).

    With ``answers``, the first one is acknowledged on stderr, and a second Ctrl-C is not kept waiting.
    """
    # Before the handlers, or a signal that comes right after them would be forgotten.
    _state.pending, _state.allowed, _state.answers, _state.since = None, False, answers, 0.0
    with _handlers(_handle):
        yield
    # One that came too late to interrupt anything still counts: what follows in a script must not start.
    _raise()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """A computation that may be interrupted at any point without leaving a trace."""
    before = _state.allowed
    _state.allowed = True
    try:
        if _state.pending is not None:
            _raise()
        yield
    finally:
        _state.allowed = before


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Note the two signals in a list within this block, for a process that passes them on (main thread only)."""
    numbers: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    with _handlers(note):
        yield numbers


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def end_process() -> None:
    """Let the two signals end this process quietly. For commands, which own their process, not for libraries."""
    for number in _SIGNALS:
        # Signals that the parent ignores stay ignored, as for a background job of a shell script.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.unraisablehook = _end_from_finalizer


def end_process_at_once() -> None:
    """From here on nothing can be left incomplete: do not raise exceptions while Python cleans up."""
    _state.ending = True


def _end(number: int, frame: FrameType | None) -> None:
    if _state.ending:
        os._exit(128 + number)
    if _imports(frame):
        announce()
        os._exit(128 + number)
    raise Interrupted(number)


def announce() -> None:
    """Print that the command was interrupted; of several ranks, the first one does."""
    if os.environ.get("RANK", "0") == "0":
        _write("interrupted")


def _end_from_finalizer(unraisable: sys.UnraisableHookArgs) -> None:
    """A signal during a finalizer, where Python cannot raise, still ends the process."""
    if isinstance(unraisable.exc_value, Interrupted):
        os._exit(unraisable.exc_value.exit_code)
    sys.__unraisablehook__(unraisable)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
