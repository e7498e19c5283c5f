"""Scales: no hand tuning, the scale of the loss does not change the path, and a θ that cannot move is noticed."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import caller

from blt_builtins.hypergradients.bome import BOME
from bltoolbox import run
from bltoolbox.bilevel.records import Accuracy, Batch
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.results import RunResult
from bltoolbox.training.assemble import assemble

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
    return experiment.oracle.on(Batch(ids, [1.0] * len(ids))).value(theta, Accuracy(1e-2)).value


@pytest.mark.parametrize(
    ("method", "count"), [("isgd", 16), ("maid", 4), pytest.param("maid", 16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_training_works_without_hand_tuning(method: str, count: int, name: str) -> None:
    result = trained(
        method,
        REGULARIZERS[name],
        steps=30 if method == "isgd" else 20 if name == "icnn" else 12,
        data={"name": "dead-leaves", "count": count, "size": 24},
    )
    before = full_loss(result, assemble(result.model.recipe).theta)
    assert full_loss(result, result.last) <= 0.8 * before


@cache
def path_of_foe(method: str, scale: float) -> RunResult:
    return trained(method, REGULARIZERS["foe"], 5, dtype="float64", loss_scale=scale)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_loss_does_not_change_the_path(method: str, scale: float) -> None:
    plain, scaled = path_of_foe(method, 1.0), path_of_foe(method, scale)
    for name, value in plain.last.items():
        torch.testing.assert_close(scaled.last[name], value, rtol=1e-9, atol=1e-9)
    losses = zip(plain.history, scaled.history, strict=True)
    assert all(theirs["loss"] == pytest.approx(scale * mine["loss"], rel=1e-9) for mine, theirs in losses)


#: Methods with a step that scales inversely with the loss, and Adam, whose step is a length in θ.
NUMBERS: dict[str, dict[str, Any]] = {
    "isgd": {"step": 1e-3},
    "isgd-ls": {"step": 1e-3},
    "iadam": {},
    "hoag": {"step": 1e-3},
    "maid": {"step": 1e-2},
}


@cache
def path_of_numbers(method: str, scale: float) -> RunResult:
    options = dict(NUMBERS[method])
    if "step" in options:
        options["step"] /= scale
    settings = {
        "data": {"name": "dead-leaves", "count": 4, "size": 16},
        "regularizer": {"name": "foe", "filters": 4, "kernel_size": 3},
        "sampler": "full",
        "upper_optimizer": {"name": method, "tol": 0.05, "adjoint_tol": 0.1} | options,
        "validation": {"count": 0},
        "certificates": {"bound": "none"},
        "dtype": "float64",
        "budget": {"steps": 4},
        "loss_scale": scale,
    }
    return run(recipe_from_dict(settings))


@pytest.mark.parametrize("method", NUMBERS)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_accuracies_that_are_numbers_scale_with_the_loss(method: str, scale: float) -> None:
    plain, scaled = path_of_numbers(method, 1.0), path_of_numbers(method, scale)
    for name, value in plain.last.items():
        torch.testing.assert_close(scaled.last[name], value, rtol=1e-9, atol=1e-9)
    assert [one["adjoint_tol"] for one in plain.history] == [one["adjoint_tol"] for one in scaled.history]
    assert plain.cost.computations == scaled.cost.computations
    assert all(one["gradient_norm"] > 0 for one in scaled.history)


def too_loose(**changes: Any) -> dict[str, Any]:
    """δ is larger than the right-hand side of the adjoint system: conjugate gradients stop at q = 0."""
    return {
        "data": {"name": "dead-leaves", "count": 4, "size": 16},
        "regularizer": "tv",
        "sampler": "full",
        "upper_optimizer": {"name": "isgd", "adjoint_tol": 1e6},
        "validation": {"count": 0},
        "budget": {"steps": 9},
    } | changes


def test_a_zero_hypergradient_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = run(recipe_from_dict(too_loose()))
    said = [one.getMessage() for one in caplog.records if "exactly zero" in one.getMessage()]
    assert len(said) == 1 and said[0].startswith("step 1: ") and "adjoint_tol" in said[0]
    assert result.steps == 9


def test_ten_zero_hypergradients_in_a_row_end_the_run() -> None:
    with pytest.raises(
        NumericalError, match=r"steps 1 to 10: the hypergradient is exactly zero .*adjoint_tol"
    ):
        run(recipe_from_dict(too_loose(budget={"steps": 20})))


def test_the_command_fails_with_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("device=cpu", "upper_optimizer.adjoint_tol=1e6", "budget={steps: 12}", "baseline=null")
    done = caller("run", capfd)("smoke", *options, "--out", str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert "exactly zero" in done.stderr and "lower upper_optimizer.adjoint_tol" in done.stderr


def test_zeros_survive_a_resume() -> None:
    """Nine zeros before an interruption and one after it are ten in a row."""
    experiment = assemble(recipe_from_dict(too_loose()))
    kept: list[dict[str, Any]] = []

    class Memory:
        def due(self) -> bool:
            return True

        def keep(self, content: dict[str, Any]) -> None:
            kept.append(content)

        def finish(self) -> None: ...

    result = experiment.run(keeper=Memory())  # type: ignore[arg-type]
    again = assemble(recipe_from_dict(too_loose(budget={"steps": 12})))
    content = kept[-1] | {"own": []}
    with pytest.raises(NumericalError, match="steps 1 to 10"):
        again.run(content=content, history=result.history)


def test_draws_without_samples_and_losses_of_zero_are_no_accident(caplog: pytest.LogCaptureFixture) -> None:
    empty = {"name": "independent", "size": 1e-9}
    run(recipe_from_dict(too_loose(sampler=empty, budget={"steps": 30})))
    clean = {"name": "tikhonov", "weight": 1e-30}
    run(recipe_from_dict(too_loose(noise=0.0, regularizer=clean, budget={"steps": 12})))
    assert not [one for one in caplog.records if "exactly zero" in one.getMessage()]


class Wandering(BOME):
    """Its multiplier stays zero, so that only the loss moves x, and z is zero."""

    def _multiplier(self, *arguments: Any) -> torch.Tensor:
        return torch.zeros_like(super()._multiplier(*arguments))


def test_a_method_that_moves_x_may_leave_theta_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    experiment = assemble(recipe_from_dict(too_loose(hypergradient="bome", budget={"steps": 12})))
    experiment.oracle.hypergradient = Wandering()
    losses = [record["loss"] for record in experiment.run().history]
    assert len(losses) == 12 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert not [one for one in caplog.records if "exactly zero" in one.getMessage()]
