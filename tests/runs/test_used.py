"""The part of its budget that a run has used is the same number for the run and for those who read its logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bltoolbox import load_recipe, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.runs.budget import used, used_after
from bltoolbox.runs.history import glance
from bltoolbox.runs.logs import read_recipe
from bltoolbox.runs.watch import Watched


@pytest.mark.parametrize(
    ("budget", "share"),
    [
        ({"steps": 4}, 0.5),
        ({"steps": 4, "computations": 100}, 0.9),
        ({"steps": 1, "seconds": 60}, 2.0),
        ({"steps": None, "seconds": 12}, 0.25),
        ({"seconds": "soon", "steps": True}, 0.0),
        ({"computations": 0}, 0.0),
        ({}, 0.0),
        (None, 0.0),
        ("4 steps", 0.0),
    ],
)
def test_it_is_the_largest_over_the_limits(budget: Any, share: float) -> None:
    assert used(budget, {"steps": 2, "computations": 90, "seconds": 3.0}) == share
    assert used_after(budget, {"step": 2, "computations": 90}, {"seconds": 3.0}) == min(share, 1.0)


def test_what_a_log_lacks_counts_as_nothing() -> None:
    budget = {"steps": 4, "computations": 10, "seconds": 1}
    assert used_after(budget, {"step": 1}, {}) == 0.25
    assert used_after(budget, {}, {}) == 0.0


class Fractions(Listener):
    """What the run says of itself after each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.found.append(fraction)


def test_the_run_and_its_readers_agree(tmp_path: Path) -> None:
    words = ["data={name: dead-leaves, count: 4, size: 12}", "evaluation=null", "validation.count=0"]
    words += ["regularizer=tv", "sampler={name: epoch, size: 2}", "device=cpu"]
    listener = Fractions()
    recipe = load_recipe("smoke", [*words, "budget={steps: 3, computations: 1e5}"])
    run(recipe, out=tmp_path / "run", listeners=[listener])
    watched = Watched(tmp_path / "run")
    assert len(listener.found) == 3 and listener.found[-1] == 1.0
    assert watched._shares(watched.metrics.look(), watched.timings.look()) == listener.found
    assert glance(tmp_path / "run", read_recipe(tmp_path / "run", [])).fraction == listener.found[-1]
