"""The sections of a recipe that only training needs: a finished θ is used without them.

The recipe of a θ file may name a sampler, an optimizer, a logger or data of a plugin that is not installed here, or
options that another version had. What is wrong with such a section does not matter then; it is kept as it was written,
so that a model that is saved again still tells how it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bltoolbox.config.block import Block
from bltoolbox.config.validation import Issue

#: The sections, and the kind of component that each names.
TRAINING_KEYS = {
    "data": "data",
    "evaluation": "data",
    "baseline": "regularizer",
    "hypergradient": "hypergradient",
    "sampler": "sampler",
    "upper_optimizer": "upper_optimizer",
    "loggers": "logger",
}


def excuse(issues: list[Issue], values: dict[str, Any], given: Mapping[str, Any]) -> list[Issue]:
    """The issues that matter for using θ; the sections of the others are kept in ``values`` as they were given."""
    kinds = dict(TRAINING_KEYS)
    if given.get("evaluation_solver") is not None:
        kinds["lower_solver"] = "lower_solver"
    excused = {str(issue.where[0]) for issue in issues if issue.where} & set(kinds) & set(given)
    for key in excused:
        section = given[key]
        if isinstance(section, list | tuple):
            values[key] = tuple(_unchecked(kinds[key], item) for item in section)
        else:
            values[key] = _unchecked(kinds[key], section)
    return [issue for issue in issues if not issue.where or issue.where[0] not in excused]


def _unchecked(kind: str, section: Any) -> Block:
    """A component that is not looked up."""
    options = {"name": section} if isinstance(section, str) else section
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        return Block(kind, "unknown")
    return Block(kind, options["name"], {key: value for key, value in options.items() if key != "name"})
