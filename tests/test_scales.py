"""Automatic scales: no hand tuning, and the scale of the loss is of no consequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bltoolbox.assemble import assemble
from bltoolbox.experiment import run
from bltoolbox.listeners import RunResult
from bltoolbox.recipe import recipe_from_dict
from bltoolbox.results import Batch

torch.set_num_threads(1)

METHODS: dict[str, Any] = {
    "isgd": {"sampler": {"name": "epoch", "size": 8}, "upper_optimizer": "isgd"},
    "maid": {"sampler": "full", "upper_optimizer": "maid"},
}
# Total variation starts near its optimum for this noise; a weight a fifth of that is a start to learn from.
REGULARIZERS: dict[str, Any] = {
    "foe": {"name": "foe", "filters": 6, "kernel_size": 5},
    "tv": {"name": "tv", "weight": 0.02},
    "crr": {"name": "crr"},
    "icnn": {"name": "icnn", "filters": 8},
}


def trained(method: str, regularizer: Any, steps: int, **changes: Any) -> RunResult:
    chosen = METHODS[method]
    settings = {
        "data": {"name": "dead-leaves", "count": 16, "size": 24},
        "regularizer": regularizer,
        "sampler": chosen["sampler"],
        "upper_optimizer": {"name": chosen["upper_optimizer"], "step": "auto", "tol": "auto"},
        "validation": {"count": 0},
        "certificates": {"bound": "none"},
        "budget": {"steps": steps},
    }
    return run(recipe_from_dict(settings | changes))


def full_loss(result: RunResult, theta: dict[str, torch.Tensor]) -> float:
    experiment = assemble(result.model.recipe)
    ids = range(len(experiment.train))
    return experiment.oracle.on(Batch(ids, [1.0] * len(ids))).value(theta, 1e-2).value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_training_works_without_hand_tuning(method: str, name: str) -> None:
    result = trained(method, REGULARIZERS[name], steps=12 if method == "maid" and name != "icnn" else 30)
    before = full_loss(result, assemble(result.model.recipe).theta)
    assert full_loss(result, result.last) <= 0.8 * before


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_loss_does_not_change_the_path(method: str, scale: float) -> None:
    options = {"regularizer": REGULARIZERS["foe"], "steps": 5, "dtype": "float64"}
    plain = trained(method, **options)
    scaled = trained(method, loss_scale=scale, **options)
    for name, value in plain.last.items():
        torch.testing.assert_close(scaled.last[name], value, rtol=1e-9, atol=1e-9)
    losses = zip(plain.history, scaled.history, strict=True)
    assert all(theirs["loss"] == pytest.approx(scale * mine["loss"], rel=1e-9) for mine, theirs in losses)
