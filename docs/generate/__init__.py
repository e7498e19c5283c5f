"""Reference pages written from the code: components, recipes, commands, the plugin API, the names of Python modules.

``python -m docs.generate docs`` writes them, and ``make docs`` calls it; a test fails while they are stale. Only
the toolbox's own components appear, whatever else is installed. Nothing here imports torch once the signatures are
cached: roles are read from their source text.
"""

from __future__ import annotations

from docs.generate import commands, components, plugin_api, python_api, recipes

__all__ = ["pages"]

HEADER = "<!-- Generated from the code by `make docs` (python -m docs.generate docs). Do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    bodies = {
        "components.md": components.page(),
        "recipe-reference.md": recipes.page(),
        "cli-reference.md": commands.page(),
        "plugin-api.md": plugin_api.page(),
        **python_api.pages(),
    }
    return {name: f"{HEADER}\n\n{body.strip()}\n" for name, body in bodies.items()}
