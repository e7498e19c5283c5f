"""``blt schema``: a JSON Schema with which editors complete and check recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, Plugins, open_registry, say, show


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("schema", rich_help_panel="Extend")(schema)


def schema(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Output file, replaced if it exists; default stdout."
        ),
    ] = None,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Write a JSON Schema for recipes, for editors.

    The schema covers all installed components. Recipes contain the line

        # yaml-language-server: $schema=bltoolbox.schema.json

    which editors with a YAML language server (VS Code, Neovim, Emacs, …) resolve relative to the recipe's folder. Write
    the schema next to your recipes, and again after installing a plugin:

        blt cp denoise && blt schema -o bltoolbox.schema.json

    The editor then completes components and options, shows their documentation and marks mistakes. It cannot tell
    whether components fit together; blt validate can.
    """
    from bltoolbox.config.names import refuse_unusable_name
    from bltoolbox.config.schema import dump_schema, recipe_schema
    from bltoolbox.runs.files import write_bytes

    if out is not None:
        refuse_unusable_name(out)
    schema, troubles = recipe_schema(open_registry(plugin))
    for trouble in troubles:
        say(f"warning: left out: {trouble}")
    text = dump_schema(schema)
    if out is None:
        show(text, nl=False, lines=True)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, text.encode())
    show(str(out), lines=True)
