"""What a run keeps of its warm starts: in full, in half precision, for one step; and nothing once it has finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bltoolbox import assemble, resume, run
from bltoolbox.config.recipe import Recipe, load_recipe
from bltoolbox.errors import RecipeError
from bltoolbox.training.checkpoint import read_checked

#: Computations after which runs stop: within their first steps, and within later ones.
BUDGETS = {"isgd": [25, 40, 60, 100], "maid": [300, 500, 900]}
METHODS = {
    "isgd": ["sampler={name: epoch, size: 2}", "upper_optimizer={name: isgd, step: 5e-3, tol: 0.1}"],
    "maid": ["sampler=full", "upper_optimizer={name: maid, tol: 0.5}"],
}


def recipe(method: str, *words: str) -> Recipe:
    settings = [
        "data={name: dead-leaves, count: 4, size: 16}",
        "evaluation=null",
        "validation.count=0",
        "baseline=null",
        "regularizer={name: foe, filters: 2, kernel_size: 3}",
        "device=cpu",
        "checkpoint.every=0",
        *METHODS[method],
    ]
    return load_recipe("smoke", [*settings, *words])


def files(path: Path) -> list[str]:
    return sorted(file.name.split("-")[0] for file in (path / "checkpoints").glob("*.ckpt"))


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bltoolbox.reports.writer.draw", lambda result, folder: None)


@pytest.mark.parametrize("keeping", ["float16", "none"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_stops_within_steps_continues_exactly(method: str, keeping: str, tmp_path: Path) -> None:
    kept = f"checkpoint={{every: 0, warm_starts: {keeping}, keep_finished: true}}"
    budgets = BUDGETS[method]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = run(recipe(method, kept, f"budget={{computations: {budgets[-1]}}}"), out=whole)
    run(recipe(method, kept, f"budget={{computations: {budgets[0]}}}"), out=parts)
    for budget in budgets[1:]:
        grown = resume(parts, [f"budget.computations={budget}"])
    assert result.steps > 1
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert all(torch.equal(grown.last[name], value) for name, value in result.last.items())
    assert grown.cost == result.cost


def test_rounded_and_dropped_warm_starts_lead_to_the_same_loss(tmp_path: Path) -> None:
    """They save time and do not decide where a run goes."""
    losses, iterations = {}, {}
    for keeping in ("full", "float16", "none"):
        chosen = [f"checkpoint.warm_starts={keeping}", "budget={steps: 6}", "upper_optimizer.tol=1e-3"]
        result = run(recipe("isgd", *chosen))
        losses[keeping] = torch.tensor([record["loss"] for record in result.history])
        iterations[keeping] = result.cost.lower_iterations
    assert torch.allclose(losses["float16"], losses["full"], rtol=1e-3)
    assert torch.allclose(losses["none"], losses["full"], rtol=1e-3)
    assert iterations["none"] > iterations["full"], "every step starts cold"


def test_without_warm_starts_a_checkpoint_has_one_batch(tmp_path: Path) -> None:
    run(
        recipe("isgd", "checkpoint={every: 0, warm_starts: none, keep_finished: true}", "budget={steps: 5}"),
        out=tmp_path,
    )
    held = [read_checked(file) for file in (tmp_path / "checkpoints").glob("warm-*.ckpt")]
    rows = {name: len(part["ids"]) for parts in held for name, part in parts.items()}
    assert all(count <= 2 for count in rows.values())
    experiment = assemble(recipe("isgd", "checkpoint.warm_starts=none"))
    assert experiment.oracle.solutions.count == 0, "no room for the data set"


def test_half_precision_halves_a_checkpoint(tmp_path: Path) -> None:
    sizes = {}
    for keeping in ("full", "float16"):
        out = tmp_path / keeping
        run(
            recipe(
                "isgd", f"checkpoint={{warm_starts: {keeping}, keep_finished: true}}", "budget={steps: 2}"
            ),
            out=out,
        )
        held = [read_checked(file) for file in (out / "checkpoints").glob("warm-*.ckpt")]
        sizes[keeping] = sum(
            part["rows"].nbytes for parts in held for name, part in parts.items() if name != "lipschitz"
        )
    assert sizes["float16"] == sizes["full"] / 2 > 0


class TestFinished:
    """A run that has finished."""

    def test_it_leaves_no_warm_starts_unless_asked(self, tmp_path: Path) -> None:
        run(recipe("isgd", "budget={steps: 2}"), out=tmp_path / "plain")
        assert files(tmp_path / "plain") == ["state"]
        run(recipe("isgd", "budget={steps: 2}", "checkpoint.keep_finished=true"), out=tmp_path / "kept")
        assert files(tmp_path / "kept").count("state") == 2 and "warm" in files(tmp_path / "kept")

    def test_a_larger_budget_continues_from_a_cold_start_and_reports_it(self, tmp_path: Path) -> None:
        tight = ["upper_optimizer.tol=1e-3", "budget={steps: 4}"]
        whole = run(recipe("isgd", *tight))
        run(recipe("isgd", *tight, "budget={steps: 2}"), out=tmp_path / "run")
        result = resume(tmp_path / "run", ["budget.steps=4"])
        assert result.steps == 4 and "solves start cold" in (tmp_path / "run/log.txt").read_text()
        losses = [torch.tensor([record["loss"] for record in one.history]) for one in (whole, result)]
        assert torch.allclose(*losses, rtol=1e-3)
        assert torch.equal(losses[0][:2], losses[1][:2]), "what was logged before is as it was"

    def test_iterates_are_kept(self, tmp_path: Path) -> None:
        run(recipe("isgd", "budget={steps: 2}", "hypergradient=bome"), out=tmp_path)
        assert "warm" in files(tmp_path)


@pytest.mark.parametrize(("section", "name"), [("hypergradient", "bome"), ("upper_optimizer", "single-loop")])
@pytest.mark.parametrize(("keeping", "verb"), [("float16", "rounds"), ("none", "drops")])
def test_methods_that_iterate_on_warm_starts_refuse(section: str, name: str, keeping: str, verb: str) -> None:
    sentence = f"warm_starts: {keeping} {verb} what {section} '{name}' iterates on from step to step"
    with pytest.raises(RecipeError, match=f"{sentence}; use warm_starts: full, or another {section}"):
        recipe("isgd", f"{section}={name}", f"checkpoint.warm_starts={keeping}")
