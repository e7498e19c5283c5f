"""``blt new-plugin``: a package to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bltoolbox.cli.common import Debug, open_registry, say, show
from bltoolbox.cli.completion import complete_kind
from bltoolbox.config.hooks import KINDS
from bltoolbox.config.names import refuse_unusable_name
from bltoolbox.errors import UsageError


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("new-plugin", rich_help_panel="Extend")(new_plugin)


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="For example my-prior.")],
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help=f"Component to start with; repeatable. One of {', '.join(KINDS)}; default regularizer.",
            autocompletion=complete_kind,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Output folder; default NAME.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Create a plugin package with working examples.

    It contains components, a test, a recipe and a README.

    For example: blt new-plugin my-prior --kind regularizer
    """
    from bltoolbox.cli.scaffold import new_plugin as write

    target = out or Path(name)
    refuse_unusable_name(target)
    try:
        files = write(name, kind or [], target, open_registry(None, warn=False))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    for file in files:
        show(str(file))
    say(f"next: pip install -e {target}, then blt check {name}, then blt run {target / 'recipe.yaml'}")
