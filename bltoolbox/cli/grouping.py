"""The texts of ``--help``: commands in groups by what a user wants to do, arguments as a user types them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """Shows an argument as its ``metavar`` spells it, without the braces and Python types that Typer adds."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return [str(self.options_metavar), *(str(argument.metavar) for argument in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                if param.param_type_name == "argument":
                    sections["Arguments"].append((str(param.metavar), record[1]))
                else:
                    sections["Options"].append(record)
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class Commands(typer.Typer):
    """An application whose commands are ``PlainCommand``."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": PlainCommand} | options)


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
