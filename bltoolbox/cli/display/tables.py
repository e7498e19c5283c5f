"""Tables on stdout: drawn on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bltoolbox.cli.common import show
from bltoolbox.config.printable import printable


def print_rows(rows: Sequence[Sequence[str]], *, left: int = 1, title: str = "") -> None:
    """A heading and rows; the first ``left`` columns are text, the others numbers."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(rows, left, title)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if title:
        show(title)
    for row in rows:
        cells = [
            f"{cell:<{width}}" if number < left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        show("  ".join(cells).rstrip())


def _draw(rows: Sequence[Sequence[str]], left: int, title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left")
    for number, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    for row in rows[1:]:
        # A space at the end keeps numbers aligned with those that have a mark there; rich would cut it off.
        table.add_row(*(Text(f"{cell[:-1]}\xa0" if cell.endswith(" ") else cell) for cell in row))
    Console(highlight=False).print(table)


def number(value: float | None, form: str) -> str:
    """A figure of a table, or a dash where there is none."""
    return "–" if value is None else format(value, form)
