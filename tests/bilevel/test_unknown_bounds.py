"""A bound that nobody knows is unknown: it is no zero, certifies nothing, and solvers and methods do without it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import noisy
from test_conformance_catches import outcomes_of
from torch import Tensor

from blt_builtins.hypergradients.minres import MINRES
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.gd import GradientDescent
from blt_builtins.operators.blur import Blur
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Bound, Rows, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.config.recipe import recipe_from_dict
from bltoolbox.config.registry import load_registry
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Gain, full_batch, make_oracle, smooth_images
from bltoolbox.testing.problems import variational
from bltoolbox.training.assemble import assemble

SHAPE = (1, 6, 7)


class Waves(Regularizer):
    """R = c Σ cos(ωx): as far from convex as cω², which it does not say."""

    convex: ClassVar[bool] = False

    def __init__(self, size: float = 0.4, frequency: float = 3.0) -> None:
        self.size, self.frequency = size, frequency

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_size": torch.full((1,), math.log(self.size), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return theta["log_size"].exp() * (self.frequency * x).cos().flatten(1).sum(1)


class KnownWaves(Waves):
    """The same, with its constants."""

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor | float | None:
        return -(theta["log_size"].exp() * self.frequency**2).squeeze()

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return (theta["log_size"].exp() * self.frequency**2).squeeze()


class Convex(Regularizer):
    """R = ½‖x‖², which says nothing but that it is convex."""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_size": torch.zeros(1, dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return 0.5 * theta["log_size"].exp() * x.square().flatten(1).sum(1)


class SilentConvex(Convex):
    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> None:
        return None


class SilentGain(Gain):
    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[None, Bound]:
        return None, super().spectrum(theta, shape, context)[1]


def mu_of(operator: Operator, regularizer: Regularizer, ridge: float = 0.0) -> Tensor:
    theta = join(regularizer=regularizer.init_params((1, 16, 16), torch.Generator()))
    problem = variational(operator, regularizer, strong_convexity=ridge)
    return problem.at(theta, SHAPE).on(noisy(2, SHAPE)).mu


@pytest.mark.parametrize(
    ("operator", "regularizer", "ridge", "expected"),
    [
        (Gain(), Waves(), 0.0, -math.inf),
        (Gain(), Waves(), 10.0, -math.inf),
        (Gain(), KnownWaves(), 0.0, 1 - 3.6),
        (Gain(), KnownWaves(), 3.0, 4 - 3.6),
        (Gain(), Convex(), 0.0, 1.0),
        (Gain(), SilentConvex(), 0.0, 1.0),
        (SilentGain(), Convex(), 0.0, 0.0),
        (SilentGain(), Waves(), 0.5, -math.inf),
        (Blur(), Convex(), 0.5, 0.5),
    ],
)
def test_mu_adds_what_is_known(
    operator: Operator, regularizer: Regularizer, ridge: float, expected: float
) -> None:
    mu = mu_of(operator, regularizer, ridge)
    assert mu.shape == (2,)
    torch.testing.assert_close(mu, torch.full_like(mu, expected))


def oracle_of(regularizer: Regularizer, **options: Any) -> Any:
    return make_oracle(smooth_images(3, SHAPE), regularizer, AGD(), MINRES(), bound="certified", **options)


@pytest.mark.parametrize("regularizer", [Waves(), KnownWaves()])
def test_nothing_is_certified_where_h_is_not_convex(regularizer: Regularizer) -> None:
    oracle = oracle_of(regularizer)
    theta = join(regularizer=regularizer.init_params((1, 16, 16), torch.Generator()))
    lower = oracle.problem.at(theta, SHAPE).on(oracle.tasks.samples.batch(range(3)).y)
    flat = lower.linearize(torch.zeros_like(lower.y)).hvp(torch.ones_like(lower.y))
    assert float(flat.max()) < 0, "h is meant not to be convex"
    result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-3), Accuracy(1e-3), bound=True)
    assert not result.value.certified
    assert result.certificate["distance_kind"] == "gradient norm"
    assert result.certificate["bound_kind"] == "estimated"
    value = oracle.on(full_batch(oracle)).value(theta, Accuracy(1e-3))
    assert not value.certified and value.upper == math.inf, "an upper bound would need μ"
    distances = solve(AGD(), lower, lower.start(), 1e-6).distance
    assert distances.isnan().all()


def test_a_known_weak_convexity_certifies_what_a_ridge_makes_up_for() -> None:
    oracle = oracle_of(KnownWaves(), strong_convexity=4.0)
    theta = join(regularizer=KnownWaves().init_params((1, 16, 16), torch.Generator()))
    result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-3), Accuracy(1e-3))
    assert result.value.certified and result.certificate["distance_kind"] == "certified"


@pytest.mark.parametrize("solver", [AGD(), GradientDescent()])
@pytest.mark.parametrize("regularizer", [Waves(), KnownWaves()])
def test_solvers_do_without_mu(solver: LowerSolver, regularizer: Regularizer) -> None:
    theta = join(regularizer=regularizer.init_params((1, 16, 16), torch.Generator()))
    lower = variational(Gain(), regularizer).at(theta, SHAPE).on(noisy(4, SHAPE))
    found = solve(solver, lower, lower.start(), 1e-8, limit=5000)
    assert float(lower.residual(found.x).max()) <= 1e-8
    assert bool((lower.energy(found.x) <= lower.energy(lower.start())).all())


def test_an_infinite_lipschitz_constant_is_no_constant() -> None:
    class Unbounded(Convex):
        def lipschitz(self, theta: Theta, shape: Sequence[int]) -> float:
            return math.inf

    theta = join(regularizer=Convex().init_params((1, 16, 16), torch.Generator()))
    lower = variational(Gain(), Unbounded()).at(theta, SHAPE).on(noisy(2, SHAPE))
    assert not lower.bounded and bool(torch.isinf(lower.lipschitz).all())
    found = solve(AGD(), lower, lower.start(), 1e-8)
    torch.testing.assert_close(found.x, lower.y / 2, rtol=0, atol=1e-7)


WAVES = """
    convex = False
    def energy(self, theta, x): return theta["log_weight"].exp() * (3 * x).cos().flatten(1).sum(1)
"""
CLAIMS = {
    "−ρ that is too good": ("def strong_convexity(self, theta, shape): return -4.0", "strong_convexity"),
    "0": ("def strong_convexity(self, theta, shape): return 0.0", "strong_convexity"),
    "L that forgets negative curvature": (
        "def energy(self, theta, x): return -2 * x.square().flatten(1).sum(1) * theta['log_weight'].exp()\n"
        "    def lipschitz(self, theta, shape): return 1.0",
        "lipschitz",
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_check_catches_false_claims_of_regularizers_that_are_not_convex(tmp_path: Path, claim: str) -> None:
    body, what = CLAIMS[claim]
    status, message = outcomes_of(tmp_path, "regularizer", WAVES + "    " + body)[f"{what} is a valid bound"]
    assert status == "failed" and f"{what}" in message and "eigenvalue -" in message


def test_check_passes_true_claims_and_skips_unknown_ones(tmp_path: Path) -> None:
    known = WAVES + (
        "    def strong_convexity(self, theta, shape): return -9 * theta['log_weight'].exp()\n"
        "    def lipschitz(self, theta, shape): return 9 * theta['log_weight'].exp()"
    )
    found = outcomes_of(tmp_path, "regularizer", known)
    for what in ("strong_convexity", "lipschitz"):
        assert found[f"{what} is a valid bound"][0] == "passed", found
    unknown = outcomes_of(tmp_path, "regularizer", WAVES)
    assert unknown["strong_convexity is a valid bound"] == ("skipped", "no bound is known")


def test_a_run_with_a_regularizer_that_says_nothing_warns_and_certifies_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "waves.py"
    source = Path(__file__).read_text(encoding="utf-8")
    body = source[source.index("class Waves(") : source.index("class KnownWaves(")]
    head = (
        "import math\nfrom collections.abc import Sequence\nfrom typing import ClassVar\n"
        "import torch\nfrom torch import Tensor\n"
        "from bltoolbox.plugin import Component, hookimpl, Regularizer, Theta\n\n"
        "@hookimpl\ndef blt_components():\n"
        "    return [Component('regularizer', 'waves', f'{__name__}:Waves', 'Waves.')]\n\n\n"
    )
    file.write_text(head + body, encoding="utf-8")
    registry = load_registry([file])
    recipe = recipe_from_dict(
        {
            "data": {"name": "dead-leaves", "count": 3, "size": 16},
            "regularizer": {"name": "waves", "size": 0.4},
            "hypergradient": "minres",
            "upper_optimizer": {"name": "isgd", "step": 1e-4},
            "sampler": "full",
            "validation": {"count": 0},
            "budget": {"steps": 2},
        },
        registry=registry,
    )
    with caplog.at_level(logging.WARNING):
        experiment = assemble(recipe, registry)
    assert any("'waves' is not convex" in one.getMessage() for one in caplog.records)
    assert {one["distance_kind"] for one in experiment.run().history} == {"gradient norm"}
