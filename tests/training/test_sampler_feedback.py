"""What samplers see of a step: the right numbers in the order of the batch, on any number of ranks, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flat, initial, oracle_for, small_foe
from processes import on_ranks
from test_penalty import interrupt
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.samplers.importance import Importance
from bltoolbox.bilevel.records import Accuracy, Batch, Counter
from bltoolbox.bilevel.tensors import norm
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, NumericalError
from bltoolbox.restoration.theta import join
from bltoolbox.training.assemble import assemble
from bltoolbox.training.driver import resume_in, run_in
from bltoolbox.training.resume import reopen
from bltoolbox.training.run_dir import RunDirectory

TIGHT = Accuracy(1e-10)
WANTS = ("loss", "slope", "gradient")


def recipe(by: str = "loss", **changes: object) -> Recipe:
    settings: dict[str, object] = {
        "data": {"name": "dead-leaves", "count": 9, "size": 12},
        "dtype": "float64",
        "color": "gray",
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "lower_solver": "mm",
        "upper_optimizer": {"name": "isgd", "step": 5e-3, "tol": 0.1},
        "sampler": {"name": "importance", "size": 4, "by": by},
        "validation": {"count": 0},
        "checkpoint": {"every": 0.0},
        "chunk": 2,
        "budget": {"steps": 8},
    }
    return recipe_from_dict(settings | changes)


class TestOracle:
    @pytest.mark.parametrize("wants", WANTS)
    def test_gives_one_number_per_sample_in_the_order_of_the_batch(self, wants: str) -> None:
        oracle, theta = (
            oracle_for(small_foe(), count=5, chunk=2, wants=wants),
            join(regularizer=initial(small_foe())),
        )
        batch = Batch([4, 0, 3], [0.5, 2.0, 1.0])
        seen = oracle.on(batch).hypergradient(theta, TIGHT, TIGHT).seen
        assert list(seen) == [wants] and seen[wants].dtype == torch.float64
        torch.testing.assert_close(
            seen[wants], torch.tensor([expected(wants, i) for i in batch.ids]).double()
        )

    def test_gives_nothing_where_nobody_observes_and_costs_nothing(self) -> None:
        costs = []
        for wants in (None, "loss", "slope", "gradient"):
            oracle, theta = oracle_for(small_foe(), wants=wants), join(regularizer=initial(small_foe()))
            result = oracle.on(Batch([0, 2], [1.0, 1.0])).hypergradient(theta, TIGHT, TIGHT)
            assert bool(result.seen) == (wants is not None)
            costs.append(oracle.cost)
        assert costs[0] == costs[1] == costs[2]
        # A mixed derivative for each of the two samples.
        assert (costs[3] - costs[0]).as_dict() == {
            name: 2 * (name == "mixed_products") for name in costs[0].as_dict()
        }


def expected(wants: str, sample: int) -> float:
    """By an oracle of one sample: z with weight m is ∇f_i."""
    oracle, theta = oracle_for(small_foe(), count=5), join(regularizer=initial(small_foe()))
    result = oracle.on(Batch([sample], [5.0])).hypergradient(theta, TIGHT, TIGHT)
    if wants == "gradient":
        return float(flat(result.gradient).norm())
    x = oracle.solutions.get([sample], torch.zeros(1, *oracle.tasks.shape, dtype=torch.float64))
    _, upper = oracle.tasks.at(theta, Counter()).on([sample])
    return float(upper.value(x) if wants == "loss" else norm(upper.gradient(x)))


class Spy(Importance):
    """Importance sampling that writes down what it sees."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[tuple[list[int], list[float]]] = []

    def observe(self, state: Any, batch: Batch, seen: Any) -> dict[str, Any]:
        self.log.append((list(batch.ids), seen[self.wants].tolist()))
        return super().observe(state, batch, seen)


def spied(one: Recipe, ranks: Ranks = ALONE, **options: Any) -> tuple[Any, Spy]:
    experiment = assemble(one, ranks=ranks)
    spy = Spy(size=4, **options)
    experiment.sampler = spy
    return experiment, spy


class TestRun:
    def test_observes_once_per_step_what_the_loss_is_made_of(self) -> None:
        experiment, spy = spied(recipe())
        m = len(experiment.train)
        batches: list[Batch] = []
        next_batch = spy.next

        def recorded(state: Any) -> Any:
            batch, after = next_batch(state)
            batches.append(batch)
            return batch, after

        spy.next = recorded  # type: ignore[method-assign]
        history = experiment.run().history
        assert len(spy.log) == len(history) == 8
        for record, batch, (ids, losses) in zip(history, batches, spy.log, strict=False):
            assert ids == list(batch.ids)
            mean = sum(v * g for v, g in zip(batch.weights, losses, strict=True)) / m
            assert record["loss"] == pytest.approx(mean, rel=1e-12)

    def test_of_several_hypergradients_the_last_one_counts(self) -> None:
        one = recipe(
            upper_optimizer={"name": "maid", "tol": 3.0, "adjoint_tol": 3.0},
            sampler="full",
            budget={"steps": 1},
        )
        experiment = assemble(one)
        experiment.oracle.wants = "loss"
        seen: list[Any] = []
        answers: list[Tensor] = []
        hypergradient = experiment.oracle._note

        def noted(answer: Any) -> Any:
            if hasattr(answer, "seen"):
                answers.append(answer.seen["loss"])
            return hypergradient(answer)

        experiment.oracle._note = noted  # type: ignore[method-assign]
        full = type(experiment.sampler)
        observing = type(
            "Observing", (full,), {"observe": lambda self, s, b, rows: seen.append(rows["loss"]) or dict(s)}
        )
        experiment.sampler = observing()
        experiment.run()
        assert len(answers) > 1 and len(seen) == 1
        assert torch.equal(seen[0], answers[-1]) and not torch.equal(seen[0], answers[0])

    def test_failed_steps_are_not_observed(self) -> None:
        experiment, spy = spied(recipe(on_divergence="skip-batch"))
        solve, calls = experiment.oracle.solve, [0]

        def failing(chunk: Any, effort: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                raise NumericalError("a NaN")
            return solve(chunk, effort)

        experiment.oracle.solve = failing
        result = experiment.run()
        assert len(spy.log) == len(result.history) == 8
        assert result.history[-1]["recoveries"] == 1

    @pytest.mark.parametrize("by", WANTS)
    def test_the_same_draws_and_numbers_on_two_ranks(self, by: str, tmp_path: Path) -> None:
        def work(ranks: Ranks) -> list[Any]:
            experiment, spy = spied(recipe(by), ranks, by=by)
            result = experiment.run()
            return [spy.log, flat(result.last).tolist()]

        (log, theta), (first, second) = work(ALONE), on_ranks(tmp_path, 2, work)
        assert first == second, "bit for bit"
        assert [ids for ids, _ in first[0]] == [ids for ids, _ in log]
        for (_, found), (_, wanted) in zip(first[0], log, strict=True):
            assert found == pytest.approx(wanted, rel=1e-9)
        assert first[1] == pytest.approx(theta, rel=1e-9)

    @pytest.mark.parametrize(("call", "by"), [(3, "loss"), (5, "gradient")])
    def test_resume_is_exact(self, call: int, by: str, tmp_path: Path) -> None:
        # Two calls a step: a hypergradient, and at first some values.
        one = recipe(by, upper_optimizer={"name": "isgd-ls", "tol": 0.1, "every": 2}, budget={"steps": 4})
        run_in(RunDirectory(tmp_path / "whole"), assemble(one))
        experiment = assemble(one)
        interrupt(experiment.oracle, call)
        with pytest.raises(KeyboardInterrupt):
            run_in(RunDirectory(tmp_path / "cut"), experiment)
        with reopen(tmp_path / "cut", [], load_registry()) as reopened:
            resume_in(reopened.directory, reopened.experiment)
        whole, cut = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut"))
        assert whole == cut


def refused(**changes: Any) -> str:
    with pytest.raises(BltError) as error:
        assemble(recipe(**changes))
    return str(error.value)


def test_gradient_norms_need_an_adjoint() -> None:
    assert (
        "importance needs the gradient norm of each sample, but hypergradient 'one-step' computes no adjoint"
        in refused(by="gradient", hypergradient="one-step")
    )
    assert not OneStep.gives_adjoint and CGIFT.gives_adjoint
    assemble(recipe("slope", hypergradient="one-step"))


def test_an_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Importance, "wants", property(lambda self: "psnr", lambda self, by: None))
    assert "wants is 'psnr', but must be loss, slope or gradient" in refused()
