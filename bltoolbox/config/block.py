"""A component as a recipe names it, before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Block:
    """The kind, the name and the options of a component, complete with defaults.

    An option that is itself a component is a Block. ``Registry.build`` makes the component.
    """

    kind: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | {key: plain(value) for key, value in self.options.items()}


def plain(value: Any) -> Any:
    """A validated value as plain data for JSON and YAML."""
    if isinstance(value, Block):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclass_fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
