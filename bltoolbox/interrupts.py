"""SIGINT and SIGTERM, let in only where nothing can be left half done.

Outside ``allowed`` a signal waits; inside it raises ``Interrupted`` at once, and whoever computes there undoes
what it began.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run was asked to stop; ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _State:
    allowed = False
    pending: int | None = None


def _handle(number: int, frame: FrameType | None) -> None:
    _State.pending = number
    if _State.allowed:
        _raise()


def _raise() -> None:
    number, _State.pending, _State.allowed = _State.pending, None, False
    if number is not None:
        raise Interrupted(number)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Turn the two signals into ``Interrupted`` within this block (main thread only)."""
    previous = {number: signal.signal(number, _handle) for number in _SIGNALS}
    _State.pending, _State.allowed = None, False
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """A computation that may be interrupted at any point, as it leaves no trace if it is."""
    before = _State.allowed
    _State.allowed = True
    try:
        if _State.pending is not None:
            _raise()
        yield
    finally:
        _State.allowed = before
