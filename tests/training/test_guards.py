"""What goes wrong is noticed where it happens, named, and survived if the recipe says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.records import Theta
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.errors import NumericalError, RecipeError
from bltoolbox.restoration.model import read_theta
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import run_in
from bltoolbox.training.experiment import Experiment
from bltoolbox.training.run_dir import RunDirectory

torch.set_num_threads(1)


def experiment(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 12, "size": 16},
        "regularizer": {"name": "foe", "filters": 3, "kernel_size": 3},
        "sampler": {"name": "epoch", "size": 4},
        "upper_optimizer": {"name": "isgd", "step": 1e-2, "tol": 0.1},
        "validation": {"count": 0},
        "certificates": {"bound": "none"},
        "budget": {"steps": 6},
    }
    return assemble(recipe_from_dict(settings | changes))


class FaultyGradient(CGIFT):
    """Fails in the calls it is told to."""

    def __init__(self, faults: set[int]) -> None:
        super().__init__()
        self.faults, self.calls = faults, 0

    def estimate(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls in self.faults:
            raise NumericalError("an injected fault")
        return super().estimate(*arguments, **options)


class Poisoned(FieldOfExperts):
    """Its gradient turns into NaN once θ has moved by more than a given distance."""

    reach = 0.05

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        gradient = super().gradient(theta, x)
        return gradient * torch.nan if float(theta["log_scale"] - self.first) > self.reach else gradient

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        params = super().init_params(shape, generator)
        self.first = float(params["log_scale"])
        return params


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"iteration_limit": 2}, ["step 1", "AGD", "samples", "iteration limit", "raise it"]),
        (
            {"upper_optimizer": {"name": "isgd", "tol": 1e-9, "adjoint_tol": 0.1}},
            ["AGD", "precision", "float64"],
        ),
        (
            {"hypergradient": {"name": "cg-ift", "iteration_limit": 1}},
            ["samples", "limit of 1", "iteration_limit"],
        ),
        ({"upper_optimizer": {"name": "isgd", "step": 1e6}}, ["step 1", "regularizer", "smaller step"]),
    ],
)
def test_a_failure_names_the_component_the_samples_the_step_and_a_remedy(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(NumericalError) as raised:
        run_in(RunDirectory(tmp_path / "run"), experiment(**changes))
    for word in words:
        assert word in str(raised.value)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"].startswith("failed: ")
    saved, _ = read_theta(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in saved.values())
    assert list((tmp_path / "run" / "checkpoints").glob("state-*.ckpt"))


def test_skip_batch_leaves_out_the_batches_that_fail_and_no_others() -> None:
    chosen = experiment(on_divergence="skip-batch")
    chosen.oracle.hypergradient = FaultyGradient({2, 4})
    result = chosen.run()
    assert result.steps == 6
    assert [record.get("recoveries", 0) for record in result.history] == [0, 1, 2, 2, 2, 2]


def test_shrink_step_goes_back_and_halves_the_step() -> None:
    chosen = experiment(on_divergence="shrink-step")
    chosen.oracle.hypergradient = FaultyGradient({3})
    result = chosen.run()
    sizes = [record["step_size"] for record in result.history]
    assert sizes[:2] == [1e-2, 1e-2] and sizes[2:] == [5e-3] * (len(sizes) - 2)
    assert result.steps == 6


def test_shrink_step_survives_a_region_where_nothing_can_be_computed() -> None:
    chosen = experiment(
        on_divergence="shrink-step", upper_optimizer={"name": "isgd", "step": 0.05, "tol": 0.1}
    )
    poisoned = Poisoned(filters=3, kernel_size=3)
    poisoned.init_params((3, 8, 8), torch.Generator())
    problem = replace(chosen.problem, regularizer=poisoned)
    chosen.problem = chosen.oracle.problem = problem
    chosen.oracle.tasks = VariationalTasks(problem, chosen.train.samples)
    result = chosen.run()
    assert result.status == "budget spent"
    moved = float(result.last["regularizer.log_scale"] - poisoned.first)
    assert moved <= Poisoned.reach + 0.05, "the last θ may be one step too far, never more"


def test_recovery_gives_up_when_nothing_helps() -> None:
    chosen = experiment(on_divergence="skip-batch")
    chosen.oracle.hypergradient = FaultyGradient(set(range(1, 100)))
    with pytest.raises(NumericalError, match="after 10 attempts to recover"):
        chosen.run()


def test_stop_is_the_default_and_keeps_the_last_good_theta() -> None:
    chosen = experiment()
    chosen.oracle.hypergradient = FaultyGradient({4})
    seen: list[Mapping[str, Tensor]] = []

    class Witness(Listener):
        def aborted(self, theta: Theta, reason: str) -> None:
            seen.append(theta)

    with pytest.raises(NumericalError, match=r"step 4: samples .*an injected fault"):
        chosen.run([Witness()])
    assert len(seen) == 1
    three = experiment(budget={"steps": 3}).run()
    assert all(torch.equal(seen[0][name], value) for name, value in three.last.items())


def test_a_method_that_cannot_shorten_its_steps_is_refused() -> None:
    with pytest.raises(RecipeError, match="cannot shorten its steps"):
        experiment(on_divergence="shrink-step", sampler="full", upper_optimizer={"name": "hoag"})
