"""Overrides: dotted keys with YAML values, ``sampler.size=8`` or ``budget={steps: 2}``, and variants of a recipe.

A recipe may contain several settings of one experiment, each under a name:

    variants:
      isgd: {upper_optimizer: {name: isgd, step: 1e-2}}
      maid: {sampler: full, upper_optimizer: maid}

``variant=maid`` chooses one of them, and ``blt sweep`` runs them all. The keys of a variant are overrides, dotted
keys included; those of the command line are applied after them. From Python, overrides may also be a mapping of dotted
keys to values, ``{"sampler.size": 8}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bltoolbox.config.block import plain
from bltoolbox.config.validation import Where, dotted, is_number, spelled_out
from bltoolbox.config.wording import did_you_mean
from bltoolbox.config.yaml_text import Document, Spot, parse
from bltoolbox.errors import Problem

#: Texts ``key=value`` as on the command line, or a mapping of dotted keys to values.
Overrides = Sequence[str] | Mapping[str, Any]

#: The section with the variants of a recipe, and the key that chooses one.
VARIANTS, VARIANT = "variants", "variant"


def variant_names(document: Document) -> list[str]:
    """The names of the variants in a recipe; none if it has no such section."""
    section = document.data.get(VARIANTS) if isinstance(document.data, Mapping) else None
    return [str(name) for name in section] if isinstance(section, Mapping) else []


def choose_variant(document: Document, overrides: Overrides) -> None:
    """Apply the chosen variant and remove the section; whatever is wrong with it becomes a problem of the document."""
    if VARIANTS not in document.data:
        return
    names = variant_names(document)
    section = document.data.pop(VARIANTS)
    spot = document.spot((VARIANTS,))
    if not names or not all(isinstance(value, Mapping) for value in section.values()):
        example = "{isgd: {upper_optimizer: isgd}, maid: {sampler: full, upper_optimizer: maid}}"
        document.problems.append(spot.problem(f"variants: expected names with settings, e.g. {example}"))
        return
    if odd := [name for name in names if parse(name, Spot("")).data != name]:
        document.problems.append(
            spot.problem(
                f"variants: {odd[0]!r} is not a name that variant=NAME can choose; begin it with a letter"
            )
        )
        return
    chosen = _chosen(document, overrides)
    if chosen not in names:
        listed = f"{', '.join(names[:8])}{', …' * (len(names) > 8)}"
        what = "the recipe has variants" if chosen is None else f"there is no variant {chosen!r}"
        hint = f"; choose one of {listed} by variant=NAME, or run all of them with blt sweep"
        document.problems.append(spot.problem(f"variants: {what}{did_you_mean(str(chosen), names) or hint}"))
        return
    document.data[VARIANT] = chosen
    settings = [(tuple(key.split(".")), (VARIANTS, chosen, key)) for key in section[chosen]]
    parts = {where: document.part(source, section[chosen][source[-1]]) for where, source in settings}
    for where in sorted(parts, key=_order):
        if where[0] in (VARIANT, VARIANTS) or not all(where):
            message = (
                f"{dotted((VARIANTS, chosen, *where))}: a variant sets keys of a recipe, not {where[0]!r}"
            )
            document.problems.append(parts[where].root.problem(message))
        else:
            _set(document, where, parts[where])


def _chosen(document: Document, overrides: Overrides) -> str | None:
    chosen = document.data.get(VARIANT)
    for where, value in _parsed(overrides, []):
        if where == (VARIANT,):
            chosen = value.data
    return None if chosen is None else str(chosen)


def _parsed(overrides: Overrides, problems: list[Problem]) -> Iterator[tuple[Where, Document]]:
    """Keys with their values; what is not an override becomes one of the problems."""
    if isinstance(overrides, Mapping):
        for number, (key, value) in enumerate(overrides.items(), start=1):
            yield tuple(str(key).split(".")), Document(plain(value), Spot("<override>", number))
        return
    for number, override in enumerate([overrides] if isinstance(overrides, str) else overrides, start=1):
        key, equals, text = override.partition("=")
        where: Where = tuple(key_part.strip() for key_part in key.split("."))
        if not equals or not all(where):
            message = f"{override!r} is not an override; write key=value, e.g. sampler.size=8"
            problems.append(Problem(message, "<override>", number, source=override))
            continue
        yield where, parse(text, Spot("<override>", number, len(key) + 2, f"{key}="))


def apply_overrides(document: Document, overrides: Overrides) -> None:
    """Apply overrides, those of whole sections and of names first, so that options apply to the right component."""
    parsed = list(_parsed(overrides, document.problems))
    for where, value in sorted(parsed, key=lambda item: _order(item[0])):
        if value.problems:
            document.problems += value.problems
        else:
            _set(document, where, value)


def _set(document: Document, where: Where, value: Document) -> None:
    """Set a value, creating the mappings above it."""
    *above, last = where
    parent = document.data
    for part in above:
        child = parent.get(part)
        if not isinstance(child, dict):
            # A missing section, a component in its short form, or a mistake that validation reports.
            child = {} if child is None else spelled_out(str(part), child)
            parent[part] = child
        parent = child
    old = parent.get(last)
    if isinstance(old, dict) and "name" in old and isinstance(value.data, str) and not is_number(value.data):
        return _set(document, (*where, "name"), value)
    if last == "name" and above and parent.get("name") != value.data:
        parent.clear()
        document.graft(tuple(above), Document(None, value.root))
    parent[last] = value.data
    document.graft(where, value)


def _order(where: Where) -> int:
    """Sections before their options, and names before the options beside them."""
    return len(where) - (where[-1] == "name")
