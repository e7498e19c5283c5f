"""Text from files, made safe to print: names, labels and messages may come from someone else.

Control characters act on a terminal: they move the cursor, overwrite earlier lines or change the window title. Marks
that reverse the direction of writing can disguise text. Both are shown as ``\\x1b`` or ``\\u202e``.
"""

from __future__ import annotations

import re

#: Control characters, marks of direction, line separators, and halves of characters that cannot be encoded.
_OBEYED = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
_CONTROL = re.compile(f"[{_OBEYED}]")
_CONTROL_IN_LINES = re.compile(rf"(?![\n\t])[{_OBEYED}]")


def printable(text: object) -> str:
    """As one line."""
    return _CONTROL.sub(_escape, str(text))


def printable_lines(text: object) -> str:
    """With line breaks and tabs as they are: for messages of several lines."""
    return _CONTROL_IN_LINES.sub(_escape, str(text))


def printable_json(text: str) -> str:
    """Equivalent JSON text: escapes within its strings are decoded again when it is loaded."""
    return _CONTROL_IN_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(match[0])
    return short or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
