"""The convergence theorem, on a problem whose constants are known and on a recipe.

    h_i = ½(x − θ − b_i)ᵀD(x − θ − b_i),    g_i = (s/2)‖x − c_i‖²

so x̂_i = θ + b_i, f_i = (s/2)‖θ − a_i‖² with a_i = c_i − b_i, and ∇f_i − ∇f = s(ā − a_i) for every θ: L = s, A = 0,
B = 1 and C = κs²·1/m Σ‖a_i − ā‖². With an exact adjoint system z − ∇f_v is s times the mean error of the solutions.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import pytest
import torch
from commands import caller
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.gd import GradientDescent
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Batch, Counter, Rows, Theta
from bltoolbox.bilevel.roles import Problem
from bltoolbox.bilevel.tasks import Tasks, TensorTasks
from bltoolbox.errors import UsageError
from bltoolbox.testing.convergence_bound import ExpectedSmoothness, order_of, sampling_factor, tightest
from bltoolbox.testing.exact_gradients import ExactGradients, Gradients
from bltoolbox.testing.theory import Setting, Theory, Trajectory, evaluate
from bltoolbox.testing.theory_runs import Bench, measure, steepness

torch.set_num_threads(1)

S, M, D = 2.0, 6, 3
CURVATURE = torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
SHIFTS, TARGETS = torch.randn(2, M, D, dtype=torch.float64, generator=GENERATOR)
CENTRES = TARGETS - SHIFTS
VARIANCE = S**2 * float((CENTRES - CENTRES.mean(0)).square().sum(1).mean())


@dataclass(frozen=True)
class Shifted(Lower):
    ids: Tensor
    theta: Theta
    shift: Tensor
    counter: Counter = field(default_factory=Counter)

    bounded = True

    @property
    def mu(self) -> Tensor:  # type: ignore[override]
        return CURVATURE.min().expand(len(self.ids))

    @property
    def lipschitz(self) -> Tensor:
        return CURVATURE.max().expand(len(self.ids))

    def start(self) -> Tensor:
        return torch.zeros_like(self.shift)

    def energy(self, x: Tensor) -> Tensor:
        return 0.5 * (CURVATURE * (x - self.theta["w"] - self.shift).square()).sum(1)

    def take(self, index: Tensor) -> Self:
        return replace(self, ids=self.ids[index], shift=self.shift[index])


@dataclass(frozen=True)
class Distance(Upper):
    target: Tensor
    lipschitz: float = S
    infimum: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        return S / 2 * (x - self.target).square().sum(1)

    def take(self, index: Tensor) -> Distance:
        return replace(self, target=self.target[index])


class Known(Problem):
    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": torch.full((D,), 2.0, dtype=torch.float64)}

    def tasks(self, split: str, like: Tensor) -> Tasks:
        def bind(ids: Tensor, theta: Theta, counter: Counter, rows: Rows) -> tuple[Lower, Upper]:
            return Shifted(ids, theta, rows["shift"], counter), Distance(rows["target"])

        return TensorTasks({"shift": SHIFTS, "target": TARGETS}, bind, (D,))


def bench(steps: int = 12) -> Bench:
    problem = Known()
    oracle = BilevelOracle(problem, problem.tasks("training", torch.zeros(())), GradientDescent(), CGIFT())
    return Bench("known", oracle, problem.init_params(GENERATOR), M, steps)


@pytest.fixture(scope="module")
def theory() -> Theory:
    settings = [Setting(1.0, 1, 0.01), Setting(0.2, 3, 0.01)]
    settings += [Setting(1.0, M, accuracy) for accuracy in (0.3, 0.1, 0.03)]
    *_, result = measure(bench(), [*settings, Setting(1.0, M, 0.3, decay=1.0)], runs=2)
    assert isinstance(result, Theory)
    return result


def test_exact_gradients_are_those_of_the_closed_form() -> None:
    made = bench()
    exact = ExactGradients(made.source, M, made.scales)
    for theta in (made.theta, {"w": torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64)}):
        gradients = exact.at(theta)
        torch.testing.assert_close(gradients.rows, S * (theta["w"] - CENTRES), rtol=1e-5, atol=1e-5)
        value = float(S / 2 * (theta["w"] - CENTRES).square().sum(1).mean())
        assert gradients.value == pytest.approx(value, rel=1e-11), "the error of x̃ enters squared"
        assert gradients.variance == pytest.approx(VARIANCE, rel=1e-5)


def test_the_second_moment_of_batches_is_the_enumerated_one() -> None:
    from itertools import combinations

    rows = S * (torch.ones(D, dtype=torch.float64) - CENTRES)
    for size in (1, 2, 5, 6):
        batches = [rows[list(ids)].mean(0).square().sum() for ids in combinations(range(M), size)]
        expected = rows.mean(0).square().sum() + sampling_factor(M, size) * VARIANCE
        torch.testing.assert_close(torch.stack(batches).mean(), expected)


def test_measured_constants_are_the_known_ones(theory: Theory) -> None:
    assert theory.lipschitz == pytest.approx(S, rel=1e-4)
    for curve in theory.curves:
        factor = sampling_factor(M, curve.setting.batch)
        assert curve.offset == pytest.approx(factor * VARIANCE, rel=1e-4)
        assert curve.slope == pytest.approx(0, abs=1e-9)
        # The first estimate of the curvature is doubled, so that the steps are half of the longest.
        assert curve.applies and curve.step == pytest.approx(curve.setting.step / (8 * S), rel=1e-3)


def test_the_bound_holds_and_its_floor_follows_the_accuracy(theory: Theory) -> None:
    assert theory.holds and all(curve.looseness >= 1 for curve in theory.curves)
    fixed = [c for c in theory.curves if c.setting.batch == M and not c.setting.decay]
    for curve in fixed:  # ‖z − ∇f‖ ≤ sε, for solutions and adjoints that are ε away
        scales = bench().scales
        size = S * curve.setting.accuracy * scales.distance + curve.setting.accuracy * scales.slope * 10
        assert 0 < curve.error <= size**2
        assert curve.floor[0] == curve.floor[-1]
    assert theory.error_order == pytest.approx(2, abs=0.5)
    summable = theory.curves[-1]
    assert summable.floor[-1] < 0.5 * summable.floor[4] < summable.floor[0]


def test_the_step_decides_which_lipschitz_constant_is_needed() -> None:
    """On f = −cos θ a step over a whole period has a vanishing secant, and the descent lemma still needs L = 1/π."""

    def at(angle: float) -> Gradients:
        return Gradients(-math.cos(angle), torch.tensor([[math.sin(angle)]], dtype=torch.float64))

    def needed(start: float, step: float) -> float:
        return steepness(at(start), at(start + step), torch.tensor([step], dtype=torch.float64))

    assert needed(math.pi / 2, -2 * math.pi) == pytest.approx(1 / math.pi)
    assert needed(0.0, 1e-3) == pytest.approx(1.0, rel=1e-5)
    assert needed(0.0, 0.0) == 0.0


@dataclass(frozen=True)
class Parabolas:
    """f_i = (s_i/2)(θ − a_i)², batches of one, an error of fixed length that opposes ∇f; means by enumeration."""

    slopes: tuple[float, ...] = (1.0, 2.0, 6.0)
    centres: tuple[float, ...] = (-1.0, 0.5, 0.8)

    def gradient(self, i: int, theta: float) -> float:
        return self.slopes[i] * (theta - self.centres[i])

    def mean(self, theta: float) -> float:
        return sum(self.gradient(i, theta) for i in range(3)) / 3

    @property
    def lipschitz(self) -> float:
        return sum(self.slopes) / 3

    @property
    def minimiser(self) -> float:
        return sum(s * a for s, a in zip(self.slopes, self.centres, strict=True)) / sum(self.slopes)

    def constants(self, slope: float) -> ExpectedSmoothness:
        """C = max_θ V − 2A(f − f_inf), a concave parabola in θ for A large enough."""
        spread = sum((s - self.lipschitz) ** 2 for s in self.slopes) / 3
        at = self.minimiser
        noise = [self.gradient(i, at) for i in range(3)]
        linear = 2 * sum(n * (s - self.lipschitz) for n, s in zip(noise, self.slopes, strict=True)) / 3
        concave = slope * self.lipschitz - spread
        assert concave > 0
        offset = sum(n * n for n in noise) / 3 + linear**2 / (4 * concave)
        return ExpectedSmoothness(self.lipschitz, slope, offset)

    def squares(self, start: float, step: float, error: float, count: int) -> list[float]:
        """E‖∇f(θ_t)‖² over all 3^t sequences of batches."""
        thetas, means = [start], []
        for _ in range(count):
            means.append(sum(self.mean(theta) ** 2 for theta in thetas) / len(thetas))
            thetas = [
                theta - step * (self.gradient(i, theta) - math.copysign(error, self.mean(theta)))
                for theta in thetas
                for i in range(3)
            ]
        return means


@pytest.mark.parametrize("error", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_the_bound_holds_for_every_start_when_all_batches_are_enumerated(
    error: float, fraction: float
) -> None:
    problem = Parabolas()
    for slope in (1.2, 2.0, 8.0):
        constants = problem.constants(slope * problem.lipschitz)
        step = fraction * constants.longest_step()
        for away in (0.0, 0.05, 0.5, 3.0):
            start = problem.minimiser + away
            gap = problem.lipschitz / 2 * away**2
            squares = problem.squares(start, step, error, 8)
            for count in range(1, 9):
                bound = constants.fixed(step, gap, error**2, count)
                assert min(squares[:count]) <= bound.total


def test_no_part_of_the_bound_can_be_left_out() -> None:
    problem = Parabolas()
    constants = problem.constants(2 * problem.lipschitz)
    step, error = 0.1 * constants.longest_step(), 1.0
    # An error as long as ∇f cancels it, so that θ drifts by the batches alone: min E‖∇f‖² stays near ‖e‖².
    away = error / problem.lipschitz
    gap, stuck = problem.lipschitz / 2 * away**2, problem.minimiser + away
    bound, left = constants.fixed(step, gap, error**2, 8), min(problem.squares(stuck, step, error, 8))
    assert 0.9 * error**2 < left < bound.error
    # Near the minimiser, with exact solutions, only the noise of batches is left.
    squares = problem.squares(problem.minimiser, 10 * step, 0.0, 8)
    assert 0 < squares[-1] < constants.fixed(10 * step, 0.0, 0.0, 8).noise
    assert constants.fixed(10 * step, 0.0, 0.0, 8).start == 0


def test_the_bound_of_a_known_sequence_is_sharp_to_its_constants() -> None:
    """For gradient descent on a quadratic, ‖∇f_t‖² = (1 − αL)^{2t}‖∇f_0‖² and δ = ‖∇f‖²/(2L)."""
    lipschitz, count = 2.0, 12
    step = 1 / (4 * lipschitz)
    squares = [8.0 * (1 - step * lipschitz) ** (2 * t) for t in range(count + 1)]
    values = tuple(square / (2 * lipschitz) for square in squares)
    run = Trajectory(tuple(squares[:-1]), values, (0.0,) * count, (0.0,) * count, lipschitz)
    result = evaluate("quadratic", 4, count, [(Setting(1.0, 4, 0.1), step, [run])])
    assert result.holds
    for t, right in enumerate(result.curves[0].right, start=1):
        assert right == pytest.approx(4 * result.gap / (step * t))


def test_a_bound_that_is_too_small_is_noticed() -> None:
    run = Trajectory((5.0, 5.0), (1.0, 1.0, 1.0 - 1e-9), (0.0, 0.0), (0.0, 0.0), 1.0)
    result = evaluate("stuck", 4, 2, [(Setting(1.0, 4, 0.1), 0.1, [run])])
    assert not result.holds
    long = evaluate("stuck", 4, 2, [(Setting(1.0, 4, 0.1), 0.3, [run])])
    assert not long.curves[0].applies and long.holds


def test_errors_with_a_finite_sum_vanish_like_one_over_t() -> None:
    constants = ExpectedSmoothness(lipschitz=1.0, slope=0.0, offset=0.0)
    floors = [
        constants.scheduled(0.1, 1.0, [1 / (t + 1) ** 2 for t in range(count)]).error for count in (100, 400)
    ]
    assert floors[0] / floors[1] == pytest.approx(4, rel=0.05)
    assert constants.fixed(0.1, 1.0, 1.0, 100).error == pytest.approx(2.4)


def test_the_tightest_pair_holds_at_all_points() -> None:
    points = [(0.0, 1.0), (1.0, 2.5), (4.0, 9.0)]
    for step in (1e-3, 1e-1):
        pair = tightest(points, 0.5, 1.0, step, 4.0, 50)
        assert all(0.5 * v <= 2 * pair.slope * delta + pair.offset + 1e-12 for delta, v in points)
    assert order_of([0.1, 0.2, 0.4], [1.0, 4.0, 16.0]) == pytest.approx(2)
    assert order_of([0.1], [1.0]) is None and math.isclose(sampling_factor(5, 5), 0)


def test_large_problems_are_refused_in_one_sentence() -> None:
    made = bench()
    made.theta["w"] = torch.zeros(30_000, dtype=torch.float64)
    with pytest.raises(UsageError, match="known has 30,000 parameters, too many to compute ∇f"):
        Bench("known", made.source, made.theta, M, 4)
    assert made.batch([1, 2]) == Batch([1, 2], [M / 2, M / 2])


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    call, figure = caller("theory", capfd), tmp_path / "figure.svg"
    size = ["problem.features=4", "problem.tasks=4", "sampler.size=2"]
    quick = ["--tasks", "4", "--steps", "4", "--runs", "1", "-o", str(figure)]
    result = call("ml/few-shot", *size, *quick, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["holds"] and report["tasks"] == 4 and figure.exists()
    assert {"c2", "c3", "c4", "c5"} == set(report["curves"][0]["constants"])
    assert call("ml/few-shot", *quick).returncode == 2  # the figure exists
    refused = call("denoise", "-o", str(tmp_path / "other.png"))
    assert refused.returncode == 2 and "27,648 unknowns per task, too many" in refused.stderr
    assert call("-o", str(tmp_path / "other.png")).returncode == 2
