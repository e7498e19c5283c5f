"""All samples at each step: v_i = 1.

When to choose it: deterministic methods (`maid` needs it), or data sets of a few images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bltoolbox.plugin import Batch, Sampler


class Full(Sampler):
    """All samples at each step."""

    full = True

    def init(self, m: int, seed: int) -> dict[str, Any]:
        return {"m": m}

    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        return Batch(range(state["m"]), [1.0] * state["m"]), dict(state)
