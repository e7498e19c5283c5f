"""``blt plugins``: the plugins, their components, and why a plugin is not used."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bltoolbox.cli.common import Debug, Json, Plugins, open_registry, print_json, show
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
    found = [_facts(one, registry, load) for one in registry.plugins()]
    if as_json:
        print_json(found)
    else:
        for source, group in groupby(found, key=lambda one: f"{one['distribution']} {one['version']}"):
            show(source.strip(), bold=True)
            _print(list(group))
    raise typer.Exit(4 if any(one["status"] in ("broken", "clash") for one in found) else 0)


def _facts(plugin: Plugin, registry: Registry, load: bool) -> dict[str, Any]:
    components = [_component(one, registry, load) for one in registry.of(plugin)]
    status: str = plugin.status
    reason = plugin.reason
    if bad := [one for one in components if one["status"] != "ok"]:
        status = next((one["status"] for one in bad if one["status"] == "broken"), "clash")
        reason = "; ".join(one["reason"] for one in bad)
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
    width = max(len(one["plugin"]) for one in plugins)
    for one in plugins:
        names = ", ".join(f"{part['kind']}/{part['name']}" for part in one["components"])
        show(f"  {one['plugin']:{width}}  {one['status']:6}  {names}".rstrip())
        if one["reason"]:
            show(f"  {'':{width}}  {'':6}  {one['reason']}")
