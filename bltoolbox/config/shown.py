"""Objects that a notebook shows as HTML, without knowing how: ``reports.notebook`` registers a function per class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RENDERERS: dict[str, Callable[[Any], str]] = {}


def renders(name: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Register a function that renders objects of the class ``name`` as HTML."""

    def register(function: Callable[[Any], str]) -> Callable[[Any], str]:
        _RENDERERS[name] = function
        return function

    return register


class Shown:
    """Rendered as HTML in a notebook if a function is registered for its class."""

    def _repr_html_(self) -> str | None:
        render = _RENDERERS.get(type(self).__name__)
        return None if render is None else render(self)
