"""The fraction of its budget that a run has used, for the run itself and for everyone who reads its logs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bltoolbox.runs.logs import number


def used(budget: Any, spent: Mapping[str, Any]) -> float:
    """The fraction of a budget that is used: the largest over its limits, which may be exceeded; 0 if it has none.

    ``budget`` and ``spent`` are by the keys of the recipe's section. A damaged recipe may contain anything,
    and a log may lack what was spent.
    """
    settings = budget if isinstance(budget, Mapping) else {}
    limits = {name: limit for name in spent if (limit := number(settings.get(name)))}
    return max(((number(spent[name]) or 0.0) / limit for name, limit in limits.items()), default=0.0)


def used_after(budget: Any, step: Mapping[str, Any], timing: Mapping[str, Any]) -> float:
    """The fraction after a step, at most 1, from its lines of ``metrics.jsonl`` and ``timings.jsonl``."""
    spent = {
        "steps": step.get("step"),
        "computations": step.get("computations"),
        "seconds": timing.get("seconds"),
    }
    return min(1.0, used(budget, spent))
