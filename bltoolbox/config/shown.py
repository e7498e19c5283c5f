"""Objects that a notebook shows as HTML, without knowing how: ``reports.notebook`` registers a function per class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RENDERERS: dict[str, Callable[[Any], str]] = {}


def renders(name: str) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Register a function that shows objects of the class called ``name``."""

    def register(function: Callable[[Any], str]) -> Callable[[Any], str]:
        _RENDERERS[name] = function
        return function

    return register


class Shown:
    """Has a picture of itself in a notebook, where there is one for it."""

    def _repr_html_(self) -> str | None:
        render = _RENDERERS.get(type(self).__name__)
        return None if render is None else render(self)
