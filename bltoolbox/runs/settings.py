"""Resolved recipes compared: the dotted keys in which they differ, and a label for each recipe. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bltoolbox.config.validation import in_short
from bltoolbox.config.yaml_text import dump_inline

_ABSENT = object()
#: Keys that do not affect the result of a run.
IRRELEVANT = ("loggers",)


def flatten(recipe: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A recipe as dotted keys; a component's name stands at ``regularizer.name``, and a number that stands for a
    component at the key of its section."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if not above and key in IRRELEVANT:
            continue
        value = value if above else in_short(key, value)
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The dotted keys that are not the same in all recipes, in the order of the recipes."""
    flat = [flatten(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [
        key
        for key in keys
        if any(not _same(settings.get(key, _ABSENT), flat[0].get(key, _ABSENT)) for settings in flat)
    ]


def labels(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What distinguishes each recipe: ``upper_optimizer=isgd, sampler.size=8``; empty if nothing does.

    Where recipes name different components, the options of a component are given only if they differ between the
    recipes that name it. Variants go by their names, with the settings in which runs of one variant differ.
    """
    variants = [recipe.get("variant") for recipe in recipes]
    if all(variants) and len(set(map(str, variants))) > 1:
        return [_variant_label(recipe, recipes) for recipe in recipes]
    flat = [flatten(recipe) for recipe in recipes]
    keys = differing(recipes)
    names = []
    for settings in flat:
        parts = []
        for key in keys:
            if key not in settings:
                continue
            rivals = [
                other for other in flat if _component(other, key, keys) == _component(settings, key, keys)
            ]
            # If all recipes with the same component agree, the name of the component suffices.
            if any(not _same(other.get(key, _ABSENT), settings[key]) for other in rivals):
                parts.append(f"{key.removesuffix('.name')}={shown(settings[key])}")
        names.append(", ".join(parts))
    return names


def _variant_label(recipe: Mapping[str, Any], recipes: Sequence[Mapping[str, Any]]) -> str:
    same = [other for other in recipes if other["variant"] == recipe["variant"]]
    more = labels(same)[next(k for k, other in enumerate(same) if other is recipe)]
    return ", ".join(filter(None, [str(recipe["variant"]), more]))


def _component(flat: Mapping[str, Any], key: str, keys: Sequence[str]) -> tuple[Any, ...]:
    """The names of the components that an option belongs to, if they differ."""
    words = key.split(".")
    above = [".".join([*words[:count], "name"]) for count in range(1, len(words))]
    return tuple(repr(flat.get(name)) for name in above if name in keys and name != key)


def shown(value: Any) -> str:
    """A value as a person writes it: 0.1, or 25/255 for a noise level of 25 gray levels."""
    if isinstance(value, float):
        if float(f"{value:g}") == value:
            return f"{value:g}"
        levels = f"{255 * value:.4g}"
        return f"{levels}/255" if float(levels) / 255 == value else f"{value:.4g}"
    if isinstance(value, list | tuple) and any(isinstance(item, float) for item in value):
        return f"[{', '.join(map(shown, value))}]"
    return value if isinstance(value, str) else dump_inline(value)


def _same(value: Any, other: Any) -> bool:
    return value is other or (value == other and isinstance(value, bool) == isinstance(other, bool))
