"""``blt models``: the trained models that come with the toolbox."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, print_json, say, show
from bltoolbox.cli.completion import complete_model


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("models")(models)


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show the card of this one.", autocompletion=complete_model),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the trained models that come with the toolbox, or show the card of one; blt apply takes their names.

    For example: blt models --json
    """
    from bltoolbox.cli.display.tables import print_rows
    from bltoolbox.restoration.shipped import read_card, shipped_models

    if name is not None:
        card = read_card(name)
        if as_json:
            print_json(card.as_dict() | {"card": card.text})
        else:
            show(card.text or f"{card.name} has no card: {card.path}", nl=not card.text, lines=True)
        return
    cards = [read_card(one) for one in shipped_models()]
    if as_json:
        print_json([card.as_dict() for card in cards])
        return
    if not cards:
        say("no model comes with this installation; train one, e.g. blt run denoise")
        return
    keys = ("task", "parameters", "noise", "psnr")
    rows = [["name", "task", "parameters", "σ", "PSNR"]]
    rows += [[card.name, *(_shown(card.facts.get(key)) for key in keys)] for card in cards]
    print_rows(rows, left=2)
    for card in cards:
        if card.facts.get("summary"):
            say(f"{card.name}: {card.facts['summary']}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return "–" if value is None else str(value)
