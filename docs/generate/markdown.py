"""Docstrings and tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

EXAMPLE = "For example: "


def prose(text: str) -> str:
    """A docstring: paragraphs as they are, equations and code (indented by four) in fences, examples as commands."""
    blocks: list[tuple[str, str]] = []
    for paragraph in filter(None, re.split(r"\n\s*\n", text.strip("\n"))):
        kind, body = "", _inline(paragraph)
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            kind, body = "text", "\n".join(line[4:] for line in paragraph.splitlines())
        elif paragraph.startswith(EXAMPLE):
            kind, body = "sh", "\n".join(paragraph.removeprefix(EXAMPLE).split(", or "))
        if kind == "text" and blocks and blocks[-1][0] == kind:
            body = blocks.pop()[1] + "\n\n" + body
        blocks.append((kind, body))
    return "\n\n".join(fence(body, kind) if kind else body for kind, body in blocks)


def fence(body: str, language: str) -> str:
    return f"```{language}\n{body.rstrip()}\n```"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def sentence(text: str) -> str:
    """With a capital first letter, unless it begins with a symbol or a list of values, and a full stop."""
    text = text.strip()
    first = text[:1].upper() if re.match(r"[a-z]+ ", text) else text[:1]
    return first + text[1:] + ("" if text.endswith((".", "?", ":")) or not text else ".")


def first_paragraph(text: str) -> str:
    return _inline(" ".join(re.split(r"\n\s*\n", text.strip())[0].split()))


def _cell(text: str) -> str:
    """On one line; a bar would end the cell, in code as well."""
    return " ".join(_inline(text).split()).replace("|", r"\|")


def _inline(text: str) -> str:
    """Double backticks, as Python's docstrings have them, single; what looks like HTML or emphasis outside code not."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"``([^`]+)``", r"`\1`", text))
    for k in range(0, len(parts), 2):
        escaped = re.sub(r"<(?=\w)", r"\\<", parts[k])
        # A subscript within a word is safe, x* is not: its star would begin or end an emphasis.
        escaped = re.sub(r"(?<![\w\\])_(?=\w)|(?<=\w)_(?!\w)|(?<=\W)_(?=\W)", r"\\_", escaped)
        parts[k] = re.sub(r"(?<=\bx)\*", r"\\*", escaped)
    return "".join(parts)
