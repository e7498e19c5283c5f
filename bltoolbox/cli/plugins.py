"""``blt plugins``: the plugins, their components, and why a plugin is not used."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, show, wrapped
from bltoolbox.errors import MissingError

if TYPE_CHECKING:
    from bltoolbox.config.registry import Plugin, Registered, Registry


def register(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("plugins", rich_help_panel="Extend")(list_plugins)


def list_plugins(
    load: Annotated[
        bool, typer.Option("--load", help="Import every component, to find missing dependencies.")
    ] = False,
    as_json: Json = False,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """List plugins, their components and any problems.

    A plugin is ok, broken, off (excluded by BLT_PLUGINS), or clashes with another plugin over a name. Exit code 4 if
    any plugin is broken or clashes. Components are imported only with --load, since most of them import torch; without
    it, missing dependencies of components go unnoticed.
    """
    registry = open_registry(plugin, warn=False)
    facts = [_facts(entry, registry, load) for entry in registry.plugins()]
    if as_json:
        print_json(facts)
    else:
        for source, group in groupby(facts, key=lambda entry: f"{entry['distribution']} {entry['version']}"):
            show(source.strip(), bold=True)
            _print(list(group))
    raise typer.Exit(4 if any(entry["status"] in ("broken", "clash") for entry in facts) else 0)


def _facts(plugin: Plugin, registry: Registry, load: bool) -> dict[str, Any]:
    components = [_component(component, registry, load) for component in registry.of(plugin)]
    status: str = plugin.status
    reason = plugin.reason
    if bad := [component for component in components if component["status"] != "ok"]:
        status = next((component["status"] for component in bad if component["status"] == "broken"), "clash")
        reason = "; ".join(component["reason"] for component in bad)
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "plugin": plugin.name,
        "module": plugin.module,
        "status": status,
        "reason": reason,
        "components": components,
    }


def _component(registered: Registered, registry: Registry, load: bool) -> dict[str, str]:
    status, reason = "ok", ""
    if clash := registry.clash(registered):
        status, reason = "clash", clash
    elif load:
        try:
            registered.load()
            registered.signature()
        except MissingError as error:
            status, reason = "broken", str(error)
    return {"kind": registered.kind, "name": registered.name, "status": status, "reason": reason}


def _print(plugins: list[dict[str, Any]]) -> None:
    width = max(len(entry["plugin"]) for entry in plugins)
    for entry in plugins:
        names = ", ".join(f"{component['kind']}/{component['name']}" for component in entry["components"])
        line = f"  {entry['plugin']:{width}}  {entry['status']:6}  {names}".rstrip()
        show(wrapped(line, width + 12), lines=True)
        if entry["reason"]:
            show(wrapped(f"  {'':{width}}  {'':6}  {entry['reason']}", width + 12), lines=True)
