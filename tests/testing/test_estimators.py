"""Error of hypergradient components against their cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import caller

from bltoolbox.bilevel.records import Accuracy
from bltoolbox.bilevel.tensors import theta_norm
from bltoolbox.config.block import Block
from bltoolbox.config.recipe import Recipe, load_recipe
from bltoolbox.config.registry import Registry, load_registry
from bltoolbox.reports.compare.estimators import front
from bltoolbox.testing.estimators import ErrorCurve, Point, _Bench, compare_estimators

torch.set_num_threads(1)

TINY = ["data={name: dead-leaves, count: 5, size: 12}", "validation.count=1", "sampler.size=2"]

PLUGIN = """
from bltoolbox.plugin import Component, hookimpl


@hookimpl
def blt_components():
    return [Component("hypergradient", "threefold", f"{__name__}:Threefold", "z times three.")]


def __getattr__(name):
    if name != "Threefold":
        raise AttributeError(name)
    from dataclasses import replace

    from blt_builtins.hypergradients.cg_ift import CGIFT

    class Threefold(CGIFT):
        exact = False

        def estimate(self, ask):
            found = super().estimate(ask)
            return replace(found, gradient={name: 3 * part for name, part in found.gradient.items()})

    return Threefold
"""


def curves(recipe: Recipe, registry: Registry, *names: str) -> list[ErrorCurve]:
    blocks = [Block("hypergradient", name) for name in names]
    return list(list(compare_estimators(recipe, registry, blocks, tasks=2))[-1].curves)


def test_errors_fall_and_costs_grow_with_the_accuracy() -> None:
    registry = load_registry()
    exact, series, biased = curves(
        load_recipe("smoke", TINY, registry), registry, "cg-ift", "neumann", "one-step"
    )
    for curve in (exact, series):
        steps = [point for point in curve.points if point.setting.startswith("accuracy")]
        assert steps[-1].error < 1e-4 < 0.1 < steps[0].error * 10
        assert [point.cost for point in steps] == sorted(point.cost for point in steps)
    assert exact.cost_to(0.01) < series.cost_to(0.01)
    assert biased.cost_to(0.1) is None and biased.best is not None and biased.best.error > 0.5


def test_a_declared_limit_is_followed() -> None:
    registry = load_registry()
    (curve,) = curves(load_recipe("smoke", TINY, registry), registry, "unrolled")
    errors = [point.error for point in curve.points if point.setting.startswith("steps")]
    assert len(errors) == 3 and errors == sorted(errors, reverse=True)


def test_calls_add_up_and_repetitions_do_not() -> None:
    """``amigo`` iterates on x itself, but its limit does not say how often."""
    registry = load_registry()
    recipe = load_recipe(
        "ml/logistic", ["problem.data={examples: 80, features: 4, relevant: 2}", "problem.blocks=2"]
    )
    simultaneous, amortised = curves(recipe, registry, "soba", "amigo")
    for curve in (simultaneous, amortised):
        assert [point.setting.rpartition(", ")[2] for point in curve.points] == [
            "5 calls",
            "20 calls",
            "80 calls",
        ]
    # One block of two: half a gradient, half a Hessian product and half a mixed derivative in each call.
    assert [point.cost for point in simultaneous.points] == pytest.approx([7.5, 30, 120])
    assert [point.cost for point in amortised.points] == sorted(point.cost for point in amortised.points)


def test_a_wrong_estimator_is_seen(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(PLUGIN)
    registry = load_registry([tmp_path / "wrong.py"])
    (curve,) = curves(load_recipe("smoke", TINY, registry), registry, "threefold")
    assert curve.points[-1].error == pytest.approx(2, rel=1e-3)


NONSMOOTH = ["regularizer=tv-nonsmooth", "lower_solver=pdhg", "hypergradient=piggyback"]


def test_without_a_hessian_the_reference_is_the_limit_of_the_recipes_own() -> None:
    """It is the derivative of f, and the errors against it fall."""
    registry = load_registry()
    recipe = load_recipe("smoke", [*TINY, *NONSMOOTH], registry)
    (curve,) = curves(recipe, registry, "piggyback")
    assert [point.error for point in curve.points[:6:2]] == sorted(
        (point.error for point in curve.points[:6:2]), reverse=True
    )
    assert curve.points[-1].error < 1e-4 < curve.points[0].error
    bench = _Bench(recipe, registry, 2)
    oracle, step = bench.oracle(bench.source.hypergradient, 0).on(bench.batch), 1e-3
    length = theta_norm(bench.exact.values())
    ahead, behind = (
        {name: value + sign * step * bench.exact[name] / length for name, value in bench.theta.items()}
        for sign in (1, -1)
    )
    accuracy = Accuracy(1e-6 * bench.scales.distance)
    rise = oracle.value(ahead, accuracy).value - oracle.value(behind, accuracy).value
    assert rise / (2 * step) == pytest.approx(length, rel=1e-3)


def test_one_that_does_not_fit_is_explained() -> None:
    registry = load_registry()
    recipe = load_recipe(
        "denoise-maid", ["data={name: dead-leaves, count: 3, size: 12}", "validation.count=1"]
    )
    (curve,) = curves(recipe, registry, "one-step")
    assert not curve.points and "needs an error bound" in curve.note


def test_evaluation_images_of_the_recipe_do_not_matter() -> None:
    registry = load_registry()
    recipe = load_recipe("smoke", [*TINY, "validation.evaluation=true"], registry)
    (curve,) = curves(recipe, registry, "cg-ift")
    assert curve.points[-1].error < 1e-4


def test_the_front_leaves_out_what_a_cheaper_setting_beats() -> None:
    assert front([(3, 0.1), (1, 0.5), (2, 0.7), (4, 0.2)]) == ([1, 3], [0.5, 0.1])


def test_costs_are_those_of_the_cheapest_setting() -> None:
    points = tuple(Point("", error, cost, 0.0) for error, cost in ((0.05, 9.0), (0.09, 4.0), (0.5, 1.0)))
    curve = ErrorCurve("a", points)
    assert curve.cost_to(0.1) == 4 and curve.cost_to(0.01) is None and curve.best is points[0]


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blt, figure = caller("estimators", capfd), str(tmp_path / "errors.png")
    words = ["smoke", *TINY, "--tasks", "1", "-o", figure]
    result = blt(*words, "-e", "cg-ift", "-e", "{name: neumann, terms: 3}", "--json")
    assert result.returncode == 0
    facts = json.loads(result.stdout)
    assert [curve["name"] for curve in facts["curves"]] == ["cg-ift", "neumann (terms 3)"]
    assert (tmp_path / "errors.png").stat().st_size > 1000
    assert "--force" in blt(*words).stderr
    assert "'nothing' is not a registered hypergradient" in blt(*words, "--force", "-e", "nothing").stderr
    assert "no parameter 'term'" in blt(*words, "--force", "-e", "{name: neumann, term: 3}").stderr
