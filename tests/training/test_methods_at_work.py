"""Runs with methods whose effort is a number of iterations: what is logged, resumed and evaluated."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bltoolbox import resume, run
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Counter, Status
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.testing.reference import reference_solve
from bltoolbox.training.assemble import assemble

LOOP = {"name": "single-loop", "step": 1e-2, "iterations": 2}
#: Methods that keep something of each sample, each with a partner that it needs.
RUNS: dict[str, dict[str, Any]] = {
    "in turn": {"upper_optimizer": LOOP},
    "simultaneous": {"upper_optimizer": LOOP | {"order": "simultaneous"}},
    "f2sa": {"hypergradient": "f2sa"},
    "f2sa, central, steps": {
        "hypergradient": {"name": "f2sa", "difference": "central"},
        "upper_optimizer": LOOP,
    },
    "bome": {"hypergradient": "bome"},
    "saba": {"hypergradient": "saba"},
    "shine": {"hypergradient": {"name": "shine", "refinement": 1}, "lower_solver": "lbfgs"},
}


def recipe(steps: int, changes: dict[str, Any]) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 5, "size": 12},
        "evaluation": {"name": "dead-leaves", "count": 1, "size": 12, "seed": 5},
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "sampler": {"name": "epoch", "size": 2},
        "upper_optimizer": {"name": "isgd", "step": 1e-3, "tol": 0.1},
        "validation": {"count": 1, "checks": 1},
        "budget": {"steps": steps},
        "checkpoint": {"keep_finished": True},
        "dtype": "float64",
    }
    return recipe_from_dict(settings | changes)


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = run(recipe(6, RUNS[name]), out=tmp_path / "whole")
    run(recipe(3, RUNS[name]), out=tmp_path / "half")
    half = resume(tmp_path / "half", ["budget.steps=6"])
    assert whole.steps == half.steps == 6 and whole.cost.computations == half.cost.computations
    start = assemble(recipe(6, RUNS[name])).theta
    for part, value in whole.last.items():
        assert torch.equal(value, half.last[part])
    assert any(not torch.equal(value, start[part]) for part, value in whole.last.items())


def test_residuals_are_logged_and_reaching_the_count_is_no_failure(tmp_path: Path) -> None:
    result = run(recipe(4, RUNS["in turn"]), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.status == "budget spent" and len(lines) == 4
    for k, line in enumerate(lines, start=1):
        assert line["lower_residual"] > 0.01 and line["adjoint_residual"] > 0
        # Two samples with two iterations each, of both kinds.
        assert line["lower_iterations"] == line["linear_iterations"] == 4 * k


def test_evaluation_solves_to_its_own_accuracy() -> None:
    """The PSNR is that of the minimiser, not that of the two iterations that training takes."""
    settings = recipe(2, RUNS["in turn"] | {"evaluation_tol": 1e-6})
    result, experiment = run(settings, out=None), assemble(settings)
    assert experiment.evaluation is not None and result.evaluation is not None
    lower, upper = experiment.evaluation.at(result.model.theta, Counter()).on([0])

    def psnr(x: Tensor) -> float:
        return -10 * math.log10(float(upper.value(x.clamp(0, 1))[0]) / x[0].numel())

    best = reference_solve(lower, lower.start(), 1e-8)
    short = solve(experiment.oracle.solver, lower, lower.start(), 0.0, limit=2, ending=Status.STEPS).x
    assert result.evaluation.mean() == pytest.approx(psnr(best), abs=1e-3)
    assert abs(psnr(short) - psnr(best)) > 0.1
