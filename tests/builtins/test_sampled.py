"""Learned sampling: admissible patterns, the penalty, hypergradients, and what a binary pattern leaves out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import normal, small_tv

from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.data_terms.sampled import SampledLeastSquares, binary_pattern, by_frequency
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.operators.mri import MRI
from bltoolbox import load_recipe, run
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.evaluation import solve_cold
from bltoolbox.restoration.metrics import METRICS
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import smooth_images, variational
from bltoolbox.testing.conformance import check_component, select
from bltoolbox.testing.recipe_check import check_recipe
from bltoolbox.training.assemble import assemble
from bltoolbox.training.baseline import tune

FULL = MRI(acceleration=1)
SHAPE = (1, 8, 10)
TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "color=gray",
    "noise=0.02",
    "operator={name: mri, acceleration: 1}",
    "strong_convexity=0.01",
    "regularizer={name: foe, filters: 3, kernel_size: 3, nu: 0.05}",
    "lower_solver=mm",
    "sampler={name: epoch, size: 3}",
    "upper_optimizer={name: isgd, step: 0.05}",
    "budget={steps: 4}",
    "device=cpu",
    "checkpoint.every=0",
]


def problem(term: SampledLeastSquares | LeastSquares, operator: MRI = FULL) -> Variational:
    return replace(variational(operator, small_tv(), strong_convexity=0.01), data_term=term)


def lower_at(term: SampledLeastSquares, s: torch.Tensor, y: torch.Tensor) -> Lower:
    prior = small_tv().init_params(SHAPE, keyed_generator("theta"))
    return problem(term).at(join(regularizer=prior, data_term={"sampling": s}), SHAPE).on(y)


def measurements() -> torch.Tensor:
    x = smooth_images(2, SHAPE).double()
    return FULL.apply(x, {}, {}) + 0.05 * normal(2, 2, *SHAPE[1:])


@pytest.mark.parametrize("pattern", ["columns", "lines", "points"])
@pytest.mark.parametrize("options", [{}, {"center": 3}, {"count": 5, "binary": True}])
def test_conforms(pattern: str, options: dict[str, object]) -> None:
    registry = load_registry()
    (component,) = select(registry, "data_term/sampled-least-squares")
    outcomes = check_component(component, registry, {"pattern": pattern, **options})
    assert [one for one in outcomes if one.status == "failed"] == []


@pytest.mark.parametrize(("shape", "center"), [((1, 6), 1), ((1, 7), 3), ((5, 1), 2), ((2, 3), 1)])
def test_the_binary_pattern_is_the_nearest_one(shape: tuple[int, int], center: int) -> None:
    s, count = torch.rand(shape, dtype=torch.float64, generator=keyed_generator("s")), 4
    lowest = by_frequency(s)[:center].tolist()
    patterns = []
    for chosen in itertools.combinations(range(s.numel()), count):
        if set(lowest) <= set(chosen):
            pattern = torch.zeros(s.numel(), dtype=s.dtype)
            pattern[list(chosen)] = 1
            patterns.append(pattern.view(shape))
    nearest = min(patterns, key=lambda pattern: float((pattern - s).square().sum()))
    assert torch.equal(binary_pattern(s, count, center), nearest)


def test_equal_weights_give_the_lowest_frequencies() -> None:
    theta = SampledLeastSquares(count=3, binary=True).init_params(SHAPE, keyed_generator("theta"))
    assert theta["sampling"].flatten().tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_the_box_and_the_fixed_center() -> None:
    term = SampledLeastSquares(center=3)
    s = torch.tensor([[-1.0, 0.2, 0.5, 2.0, 0.3]])
    assert term.project({"sampling": s})["sampling"].tolist() == [[1, 1, 0.5, 1, 1]]
    assert term.project_gradient({"sampling": s})["sampling"].tolist() == [[0, 0, 0.5, 2, 0]]
    penalty = term.penalty({"sampling": torch.tensor([[1, 1, 0.5, 0.25, 1]], dtype=torch.float64)})
    assert penalty is not None
    assert float(penalty) == pytest.approx(0.1 * (0.5 + 0.25 + 0.25 + 0.1875))


@pytest.mark.parametrize(
    "options", ["pattern: columns", "pattern: lines, center: 3", "pattern: points", "count: 5, binary: true"]
)
def test_hypergradient_against_finite_differences(options: str) -> None:
    recipe = load_recipe("smoke", [*TINY, f"data_term={{name: sampled-least-squares, {options}}}"])
    found = check_recipe(recipe, load_registry(), samples=2)
    assert found.passed, found.verdict
    moves = "binary" not in options
    assert any(row.direction == "data_term.sampling" for row in found.rows) == moves


def test_a_column_that_is_off_can_return() -> None:
    """The derivative of ⟨∇h, q⟩ in s_k is ⟨(t − y)_k, (Aq)_k⟩, also at s_k = 0."""
    y, q = measurements(), normal(2, *SHAPE, seed=5)
    s = torch.tensor([[1.0, 0, 0, 1, 0, 1, 0, 0, 0, 0]], dtype=torch.float64)
    x = smooth_images(2, SHAPE).double()
    z = lower_at(SampledLeastSquares(), s, y).mixed(x, q, torch.ones(2, dtype=torch.float64))
    expected = ((FULL.apply(x, {}, {}) - y) * FULL.apply(q, {}, {})).sum((0, 1, 2))
    torch.testing.assert_close(z["data_term.sampling"][0], expected)
    assert float(expected[1].abs()) > 0


def test_what_is_not_used_is_not_known() -> None:
    term, y = SampledLeastSquares(), measurements()
    s = torch.tensor([[1.0, 0.5, 0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.float64)
    other = y.clone()
    other[..., 2:9] = 7
    one, two = lower_at(term, s, y), lower_at(term, s, other)
    assert torch.equal(one.start(), two.start())
    x = [solve_cold(AGD(), lower, 1e-9, 20_000).x for lower in (one, two)]
    torch.testing.assert_close(*x, rtol=0, atol=1e-8)


def test_a_binary_pattern_is_the_mask_of_the_operator(tmp_path: Path) -> None:
    s = binary_pattern(torch.rand(1, 10, dtype=torch.float64, generator=keyed_generator("s")), 4)
    np.save(tmp_path / "mask.npy", s.expand(8, 10).numpy())
    masked = problem(LeastSquares(), MRI(mask=str(tmp_path / "mask.npy")))
    prior = join(regularizer=small_tv().init_params(SHAPE, keyed_generator("theta")))
    y = measurements()
    expected = solve_cold(AGD(), masked.at(prior, SHAPE).on(s * y), 1e-9, 20_000).x
    found = solve_cold(AGD(), lower_at(SampledLeastSquares(), s, y), 1e-9, 20_000).x
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data_term={name: sampled-least-squares, binary: true}"], "needs count"),
        (["data_term={name: sampled-least-squares, count: 2, center: 3}"], "less than the 3 of center"),
        (["data_term={name: sampled-least-squares, center: 0}"], "at least 1"),
        (["data_term={name: sampled-least-squares, count: 17}"], "17 columns cannot be measured"),
        (
            ["data_term=sampled-least-squares", "baseline=tv"],
            "set count, the number of columns.*leave baseline out",
        ),
        (
            ["data_term=sampled-least-squares", "evaluation={name: photos, size: 32}"],
            r"images of 16×16 pixels, not of 32×32; use evaluation images of that size",
        ),
    ],
)
def test_refused_before_a_run(words: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        run(load_recipe("smoke", [*TINY, *words]))


def test_measurements_that_are_missing_are_refused() -> None:
    with pytest.raises(BltError, match=r"only zeros.*acceleration: 1"):
        run(load_recipe("smoke", [*TINY, "operator.acceleration=4", "data_term=sampled-least-squares"]))


def test_from_a_learned_pattern_to_a_binary_one(tmp_path: Path) -> None:
    term = "name: sampled-least-squares, sparsity: 0.05, count: 6, center: 3"
    first = run(load_recipe("smoke", [*TINY, f"data_term={{{term}}}"]), out=tmp_path / "first")
    s = first.theta["data_term.sampling"]
    assert s.shape == (1, 16) and float(s.min()) >= 0 and float(s.max()) <= 1
    assert s[0, [0, 1, 15]].tolist() == [1, 1, 1]
    assert len(set(s.flatten().tolist())) > 2, "nothing was learned"
    words = [*TINY, f"data_term={{{term}, binary: true}}", f"init={tmp_path / 'first'}"]
    second = run(load_recipe("smoke", words))
    assert torch.equal(second.theta["data_term.sampling"], binary_pattern(s, 6, 3))
    assert not torch.equal(second.theta["regularizer.kernels"], first.theta["regularizer.kernels"])


def test_a_baseline_measures_the_lowest_frequencies_and_tunes_only_its_regularizer() -> None:
    """It has the same number of columns, whatever was learned: the reference is what one would do without learning."""
    settings = [
        *TINY,
        "data_term={name: sampled-least-squares, count: 5, sparsity: 0.05}",
        "evaluation={name: dead-leaves, count: 1, size: 16, seed: 3}",
        "baseline=tv",
    ]
    experiment = assemble(load_recipe("smoke", settings))
    assert experiment.baseline is not None
    baseline, theta = experiment.baseline
    assert theta["data_term.sampling"].nonzero()[:, 1].tolist() == [0, 1, 2, 14, 15]
    options = {"tol": 1e-2, "chunk": 6, "limit": 500, "metric": METRICS["psnr"]}
    tuned = tune(baseline, theta, experiment.train.samples, experiment.oracle.solver, **options).theta  # type: ignore[arg-type]
    assert torch.equal(tuned["data_term.sampling"], theta["data_term.sampling"])
    assert not torch.equal(tuned["regularizer.log_weight"], theta["regularizer.log_weight"])
