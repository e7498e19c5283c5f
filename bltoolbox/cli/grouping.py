"""The list of commands in ``blt --help``, in groups by what a user wants to do."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class GroupedCommands(TyperGroup):
    """Lists commands under the ``rich_help_panel`` they were registered with, as plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        for name in names:
            command = self.get_command(ctx, name)
            if command is None or command.hidden:
                continue
            heading = getattr(command, "rich_help_panel", None)
            heading = heading if isinstance(heading, str) else "Commands"
            groups.setdefault(heading, []).append((name, command.get_short_help_str(limit)))
        # Padded names put the descriptions of all groups in one column.
        width = max(map(len, names))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in rows])
