"""``blt schema``: what an editor needs to complete and check recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, Plugins, open_registry, say, show


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("schema")(schema)


def schema(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write, replacing what is there; stdout."),
    ] = None,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Write a JSON Schema of recipes, covering all installed components.

    Recipes carry the line

        # yaml-language-server: $schema=bltoolbox.schema.json

    which editors with a YAML language server (VS Code, Neovim, Emacs, …) follow from the recipe's own folder. So write
    the schema beside your recipes, and again when you install a plugin:

        blt cp denoise && blt schema -o bltoolbox.schema.json

    Then the editor completes components and options, shows their documentation and marks mistakes. What it cannot see
    (whether components fit together) blt validate does.
    """
    from bltoolbox.config.names import refuse_unusable_name
    from bltoolbox.config.schema import dump_schema, recipe_schema
    from bltoolbox.runs.files import write_bytes

    if out is not None:
        refuse_unusable_name(out)
    found, troubles = recipe_schema(open_registry(plugin))
    for trouble in troubles:
        say(f"warning: left out: {trouble}")
    text = dump_schema(found)
    if out is None:
        show(text, nl=False, lines=True)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, text.encode())
    show(str(out), lines=True)
