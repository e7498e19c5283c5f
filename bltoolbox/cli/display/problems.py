"""Problems of a recipe with the line of text that has them, and a caret below it."""

from __future__ import annotations

from bltoolbox.config.printable import printable
from bltoolbox.errors import Problem, RecipeError

#: Characters of a source line that are shown, and those of them before the caret.
_WIDTH, _BEFORE = 72, 40


def described(error: RecipeError) -> str:
    """The message of an error, with the source of each problem where it is known."""
    if not error.problems or str(error) != "\n".join(map(str, error.problems)):
        return str(error)
    return "\n".join(line for problem in error.problems for line in (str(problem), *_source(problem)))


def _source(problem: Problem) -> list[str]:
    """The source line and the caret; nothing where the position is unknown or behind the line."""
    text, column = problem.source.replace("\t", " ").rstrip(), problem.column - 1
    if not text or not 0 <= column <= len(text):
        return []
    start = max(0, column - _BEFORE) if len(text) > _WIDTH else 0
    head, tail = printable(text[start:column]), printable(text[column : start + _WIDTH])
    more = "…" if start else ""
    dots = "…" if start + _WIDTH < len(text) else ""
    return [f"    {more}{head}{tail}{dots}", " " * (4 + len(more) + len(head)) + "^"]
