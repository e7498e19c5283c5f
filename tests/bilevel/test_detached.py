"""What is not differentiable gives results without a graph, and works in every mode of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lower_level, noisy, small_foe
from torch import Tensor
from toy_models import toy_model

import bltoolbox
from blt_builtins.lower_solvers.agd import AGD
from bltoolbox import run
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.testing import Gain

#: A regularizer with analytic derivatives, and one that leaves them to autograd.
REGULARIZERS = ("foe", "icnn")
Entry = Callable[[Model, Tensor], Tensor]
ENTRIES: dict[str, Entry] = {
    "Model.solve": lambda model, y: model.solve(y),
    "Model.restore": lambda model, y: model.restore(y),
    "bltoolbox.solve": lambda model, y: bltoolbox.solve(y, model),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "recording": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def model_of(regularizer: str, theta_recorded: bool = False) -> Model:
    options = {"name": regularizer, "filters": 4, "kernel_size": 3}
    model = toy_model(regularizer=options, lower_solver="agd")
    if theta_recorded:
        for value in model.theta.values():
            value.requires_grad_()
    return model


def picture() -> Tensor:
    return noisy(1, (3, 12, 14))[0].float()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_nothing_returns_a_graph(entry: str, regularizer: str) -> None:
    expected = ENTRIES[entry](model_of(regularizer), picture())
    model = model_of(regularizer, theta_recorded=True)
    y = picture().requires_grad_()
    x = ENTRIES[entry](model, y)
    assert not x.requires_grad and x.grad_fn is None
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_inference_mode_changes_nothing(entry: str, regularizer: str) -> None:
    expected = ENTRIES[entry](model_of(regularizer), picture())
    with torch.inference_mode():
        # All of it in inference mode: parameters, measurements and solve.
        found = ENTRIES[entry](model_of(regularizer), picture())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_model_loaded_in_inference_mode_works_there_and_outside(tmp_path: Path) -> None:
    model_of("icnn").save(tmp_path / "theta.safetensors")
    with torch.inference_mode():
        model = Model.load(tmp_path / "theta.safetensors", device="cpu")
        inside = bltoolbox.solve(picture(), model)
    torch.testing.assert_close(bltoolbox.solve(picture(), model), inside, rtol=0, atol=1e-6)


class Learned(Regularizer):
    """R = e^θ/2 ‖x‖², whose constants are functions of θ."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.zeros((), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return 0.5 * theta["log_weight"].exp() * x.square().flatten(1).sum(1)

    def lipschitz(self, theta: Theta, shape: object) -> Tensor:
        return theta["log_weight"].exp()

    def strong_convexity(self, theta: Theta, shape: object) -> Tensor:
        return theta["log_weight"].exp()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [0, 2000])
def test_the_loop_detaches_start_measurements_and_theta(mode: str, limit: int) -> None:
    with MODES[mode]():
        y = noisy(2)
        x0, theta = y.clone(), {"log_weight": torch.zeros((), dtype=torch.float64)}
        if mode == "recording":
            for leaf in (y, x0, *theta.values()):
                leaf.requires_grad_()
        found = solve(AGD(), lower_level(Learned(), y, Gain(), theta), x0, 1e-8, limit=limit)
    for value in (found.x, found.residual, found.distance):
        assert not value.requires_grad and value.grad_fn is None and not value.is_inference()
    assert found.x is not x0
    if limit:
        torch.testing.assert_close(found.x, y.detach() / 2, rtol=0, atol=1e-7)


def test_energies_stay_differentiable() -> None:
    theta = {
        name: value.requires_grad_()
        for name, value in small_foe().init_params((3, 16, 16), torch.Generator()).items()
    }
    lower_level(small_foe(), noisy(2), theta=theta).energy(noisy(2, seed=1)).sum().backward()
    assert all(value.grad is not None for value in theta.values())


def test_a_run_inside_inference_mode_is_the_same_run() -> None:
    recipe = recipe_from_dict(
        {
            "data": {"name": "dead-leaves", "count": 4, "size": 16},
            "regularizer": {"name": "icnn", "filters": 4},
            "upper_optimizer": "isgd",
            "sampler": "full",
            "validation": {"count": 0},
            "dtype": "float64",
            "budget": {"steps": 2},
        }
    )
    outside = run(recipe)
    with torch.inference_mode():
        inside = run(recipe)
    for name, value in outside.last.items():
        torch.testing.assert_close(inside.last[name], value, rtol=1e-9, atol=1e-9)
