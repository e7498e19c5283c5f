"""What the shell offers on Tab: kinds, components, recipes, override keys and their values.

Nothing here imports torch: the options of a component are offered once its signature is in the cache, which the first
``blt validate`` or ``blt show`` puts there. On any error the shell gets no suggestions instead of a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from bltoolbox.config.hooks import KINDS

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.config.signatures import Parameter, Type

#: A suggestion and its description, for shells that show it.
Word = tuple[str, str]

Arguments = ParamSpec("Arguments")


def _quietly(complete: Callable[Arguments, list[Word]]) -> Callable[Arguments, list[Word]]:
    @wraps(complete)
    def careful(*args: Arguments.args, **kwargs: Arguments.kwargs) -> list[Word]:
        try:
            return complete(*args, **kwargs)
        except (Exception, SystemExit):
            return []

    return careful


@_quietly
def complete_kind(incomplete: str) -> list[Word]:
    return [(kind, "") for kind in KINDS if kind.startswith(incomplete)]


@_quietly
def complete_component(ctx: typer.Context, incomplete: str) -> list[Word]:
    """``kind/name``, and names alone once something is typed."""
    components = [
        (registered.kind, registered.name, registered.component.summary)
        for registered in _registry(ctx).components()
    ]
    full = [(f"{kind}/{name}", summary) for kind, name, summary in components]
    short = [(name, summary) for _, name, summary in components] if incomplete else []
    return [word for word in full + short if word[0].startswith(incomplete)]


@_quietly
def complete_shipped(incomplete: str) -> list[Word]:
    from bltoolbox.config.shipped_recipes import recipe_summary, shipped_recipes

    shipped = shipped_recipes().items()
    return [(name, recipe_summary(path)) for name, path in shipped if name.startswith(incomplete)]


@_quietly
def complete_model(incomplete: str) -> list[Word]:
    """Shipped models, θ files and folders, which may be run directories."""
    from bltoolbox.restoration.shipped import read_card, shipped_models

    shipped = [name for name in shipped_models() if name.startswith(incomplete)]
    return [(name, str(read_card(name).facts.get("summary", ""))) for name in shipped] + _files(
        incomplete, (".safetensors",)
    )


@_quietly
def complete_recipe(ctx: typer.Context, incomplete: str) -> list[Word]:
    """Recipes and YAML files first; once there is one, also override keys and their values."""
    words = rejoin(ctx.params.get("arguments") or ())
    sources = [word for word in words if "=" not in word]
    if not sources:
        return complete_shipped(incomplete) + _files(incomplete)
    entries = {entry.key: entry for entry in _entries(sources[0], words, _registry(ctx))}
    key, equals, begun = incomplete.partition("=")
    if equals:
        return [(f"{key}={word}", doc) for word, doc in _values(entries.get(key), begun)]
    if len(words) > 1 and (behind := entries.get(words[-1].removesuffix("="))):
        return _values(behind, incomplete)  # bash splits words at "="
    offered = [(f"{entry.key}=", entry.parameter.doc) for entry in entries.values()]
    matches = [word for word in offered if word[0].startswith(incomplete)]
    return matches + (_files(incomplete) if incomplete and not matches else [])


@_quietly
def complete_grid(ctx: typer.Context, incomplete: str) -> list[Word]:
    """As for one recipe; after a comma follows another value of the same key."""
    before, comma, begun = incomplete.rpartition(",")
    key, equals, _ = before.partition("=")
    offered = complete_recipe(ctx, f"{key}={begun}" if comma and equals else begun)
    values = [(word.removeprefix(f"{key}=") if equals else word, doc) for word, doc in offered]
    return [(f"{before}{comma}{word}", doc) for word, doc in values]


def rejoin(words: Sequence[str]) -> list[str]:
    """Words as they were before bash split them at each ``=``."""
    joined: list[str] = []
    cut = False
    for word in words:
        if joined and (cut or word == "="):
            joined[-1] += word
        else:
            joined.append(word)
        cut = word == "="
    return joined


@dataclass(frozen=True)
class _Entry:
    """A dotted key of a recipe, its parameter, and the components it accepts."""

    key: str
    parameter: Parameter
    components: tuple[Word, ...]


def _entries(source: str, words: Sequence[str], registry: Registry) -> Iterator[_Entry]:
    from bltoolbox.config.describe import describe
    from bltoolbox.config.overrides import apply_overrides
    from bltoolbox.config.reading import RECIPE, read_text
    from bltoolbox.config.recipe import Recipe
    from bltoolbox.config.shipped_recipes import find_recipe
    from bltoolbox.config.yaml_text import Spot, parse

    document = parse(read_text(find_recipe(source), RECIPE).removeprefix("\ufeff"), Spot(source))
    if not isinstance(document.data, dict):
        document.data = {}
    apply_overrides(document, [word for word in words if "=" in word and not word.endswith("=")])
    yield from _walk(describe(Recipe).parameters, document.data, "", registry)


def _walk(
    parameters: Sequence[Parameter], data: Mapping[str, Any], prefix: str, registry: Registry
) -> Iterator[_Entry]:
    from bltoolbox.config.cache import remembered_signature

    for parameter in parameters:
        key = prefix + parameter.name
        value = data.get(parameter.name, parameter.default)
        inner = value if isinstance(value, Mapping) else {}
        options = _options(parameter.type)
        roles = [option.role for option in options if option.name == "component"]
        components = [registered for role in roles for registered in registry.components(role)]
        yield _Entry(
            key,
            parameter,
            tuple((registered.name, registered.component.summary) for registered in components),
        )
        for option in options:
            yield from _walk(option.parameters, inner, f"{key}.", registry)
        name = _name(value, roles) or _name(parameter.default)
        for registered in components:
            if registered.name == name and (signature := remembered_signature(registered.component.target)):
                yield from _walk(signature.parameters, inner, f"{key}.", registry)


def _values(entry: _Entry | None, begun: str) -> list[Word]:
    if entry is None:
        return []
    words = list(entry.components)
    for option in _options(entry.parameter.type):
        choices = {"bool": ("true", "false"), "null": ("null",)}.get(option.name, option.choices)
        words += [(str(choice), "") for choice in choices]
    return [word for word in words if word[0].startswith(begun)]


def _options(type: Type) -> tuple[Type, ...]:
    return type.items if type.name == "union" else (type,)


def _name(value: Any, roles: Sequence[str] = ()) -> str | None:
    from bltoolbox.config.validation import spelled_out

    for role in roles:
        value = value if isinstance(value, Mapping) else spelled_out(role, value)
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else None


def _files(incomplete: str, suffixes: Sequence[str] = (".yaml", ".yml")) -> list[Word]:
    """Files of some suffixes, YAML by default, and folders, which may contain some."""
    folder, slash, begun = incomplete.rpartition("/")
    matches: list[Word] = []
    for path in sorted(Path(folder + slash or ".").expanduser().iterdir()):
        hidden = path.name.startswith(".") and not begun.startswith(".")
        if not path.name.startswith(begun) or hidden:
            continue
        if path.is_dir():
            matches.append((f"{folder}{slash}{path.name}/", ""))
        elif path.suffix in suffixes:
            matches.append((f"{folder}{slash}{path.name}", ""))
    return matches


def _registry(ctx: typer.Context) -> Registry:
    from bltoolbox.config.registry import load_registry

    files = [path for path in ctx.params.get("plugin") or () if Path(path).is_file()]
    return load_registry(files)
