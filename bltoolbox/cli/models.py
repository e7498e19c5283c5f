"""``blt models``: the trained models that come with the toolbox."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, print_json, say, show, wrapped
from bltoolbox.cli.completion import complete_model


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("models", rich_help_panel="Look")(models)


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Show the card of this model.", autocompletion=complete_model),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the trained models that come with the toolbox.

    With a name, show the card of that model. blt apply accepts these names.

    For example: blt models denoise-color
    """
    from bltoolbox.cli.display.tables import print_rows
    from bltoolbox.restoration.shipped import QUALITY, read_card, shipped_models

    if name is not None:
        card = read_card(name)
        if as_json:
            print_json(card.as_dict() | {"card": card.text})
        else:
            show(card.text or f"{card.name} has no card: {card.path}", nl=not card.text, lines=True)
        return
    cards = [read_card(model) for model in shipped_models()]
    if as_json:
        print_json([card.as_dict() for card in cards])
        return
    if not cards:
        say("this installation contains no trained models; train one, e.g. blt run denoise")
        return
    keys = ("task", "parameters", "noise", "levels", QUALITY.name)
    rows = [["name", "task", "parameters", "trained σ", "usable σ", QUALITY.label]]
    rows += [[card.name, *(_shown(card.facts.get(key)) for key in keys)] for card in cards]
    print_rows(rows, left=2)
    for card in cards:
        if card.facts.get("start"):
            say(wrapped(f"start with {card.name} for {card.facts['start']}", 2, sys.stderr), lines=True)
    for card in cards:
        if card.facts.get("summary"):
            images = card.facts.get("images")
            measured = f" {QUALITY.label} on {images}." if images else ""
            say(wrapped(f"{card.name}: {card.facts['summary']}{measured}", 2, sys.stderr), lines=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
