"""Lower-level solvers on problems with known answers: optimality, accuracy, independence of the batch, constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.lower_solvers.mm_lbfgs import MajorisedLBFGS
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Status, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import norm
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.testing import Gain, Tikhonov


class Unsure(Gain):
    """The identity that does not know how convex it is."""

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> float:
        return 0.0


def uncertified(regularizer: Regularizer) -> Regularizer:
    """The same regularizer without a Lipschitz constant."""
    base = type(regularizer)
    hidden = type(f"Uncertified{base.__name__}", (base,), {"lipschitz": lambda self, theta, shape: None})
    regularizer.__class__ = hidden
    return regularizer


PRIORS: dict[str, Callable[[], Regularizer]] = {
    "foe": small_foe,
    "tv": small_tv,
    "quadratic": lambda: Tikhonov(weight=100, condition=100),
}
#: Solver, how the regularizer is presented, operator: every path through the solvers.
PATHS: dict[str, tuple[type[LowerSolver], Callable[[Regularizer], Regularizer], type[Gain]]] = {
    "agd": (AGD, lambda prior: prior, Gain),
    "agd-backtracking": (AGD, uncertified, Gain),
    "agd-unknown-mu": (AGD, lambda prior: prior, Unsure),
    "agd-backtracking-unknown-mu": (AGD, uncertified, Unsure),
    "mm": (MemoryGradient, lambda prior: prior, Gain),
    "mm-lbfgs": (MajorisedLBFGS, lambda prior: prior, Gain),
}
every_path = pytest.mark.parametrize("path", PATHS)
every_prior = pytest.mark.parametrize("prior", PRIORS)


def make(path: str, prior: str, y: Tensor, **options: object) -> tuple[LowerSolver, Lower]:
    solver, present, operator = PATHS[path]
    return solver(), lower_level(present(PRIORS[prior]()), y, operator(), **options)


@every_path
@every_prior
class TestAccuracy:
    def test_residual_is_the_gradient_norm_at_the_returned_x(self, path: str, prior: str) -> None:
        for dtype, tol, rounding in ((torch.float64, 1e-8, 1e-14), (torch.float32, 1e-2, 1e-6)):
            y = noisy(3).to(dtype)
            solver, lower = make(path, prior, y)
            solution = solve(solver, lower, lower.start(), tol, limit=20_000)
            assert set(solution.status) == {Status.CONVERGED}
            assert solution.x.dtype == dtype
            assert (solution.residual <= tol).all()
            scale = float(lower.lipschitz.max()) if lower.bounded else 1
            recomputed = norm(lower.gradient(solution.x))
            torch.testing.assert_close(solution.residual, recomputed, rtol=1e-4, atol=100 * rounding * scale)

    def test_no_perturbation_improves_the_energy(self, path: str, prior: str) -> None:
        solver, lower = make(path, prior, noisy(2))
        x = solve(solver, lower, lower.start(), 1e-9, limit=20_000).x
        for k, size in enumerate((1e-1, 1e-2, 1e-3, 1e-4)):
            d = normal(*x.shape, seed=k)
            assert (lower.energy(x + size * d) > lower.energy(x)).all()

    def test_a_sample_alone_equals_the_same_sample_in_a_mixed_batch(self, path: str, prior: str) -> None:
        y = noisy(4) * torch.tensor([1.0, 0.01, 3.0, 0.3], dtype=torch.float64).view(-1, 1, 1, 1)
        solver, lower = make(path, prior, y)
        # mm on a quadratic is conjugate gradients: it stops before rounding has taken its directions from each other.
        tol = 1e-2 if (path, prior) == ("mm", "quadratic") else 1e-6
        together = solve(solver, lower, torch.zeros_like(y), tol, limit=20_000)
        assert len(set(together.iterations.tolist())) > 1, "the batch is meant to be of mixed difficulty"
        for i in range(4):
            one = lower.take(torch.tensor([i]))
            alone = solve(solver, one, torch.zeros_like(one.y), tol, limit=20_000)
            assert alone.iterations.tolist() == together.iterations[i : i + 1].tolist()
            torch.testing.assert_close(alone.x, together.x[i : i + 1], rtol=0, atol=1e-12)

    def test_a_start_at_the_minimiser_costs_nothing(self, path: str, prior: str) -> None:
        solver, lower = make(path, prior, noisy(2))
        x = solve(solver, lower, lower.start(), 1e-9, limit=20_000).x
        again = solve(solver, lower, x, 1e-8)
        assert again.iterations.tolist() == [0, 0]
        assert torch.equal(again.x, x)


@every_path
@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_solution_of_a_quadratic_is_the_closed_form(path: str, ridge: float) -> None:
    y = noisy(3)
    solver, lower = make(path, "quadratic", y, strong_convexity=ridge)
    found = solve(solver, lower, lower.start(), 1e-10, limit=50_000).x
    curvature = lower.gradient(torch.ones_like(y)) + y  # (1 + e^θ d + ridge) · 1
    torch.testing.assert_close(found, y / curvature, rtol=0, atol=1e-10)
    if not ridge:
        exact = lower.problem.regularizer.solution(lower.at.prepared["regularizer"], y)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


@every_path
@every_prior
@pytest.mark.parametrize("constraint", ["none", "box"])
def test_distance_to_the_minimiser_is_at_most_residual_over_mu(
    path: str, prior: str, constraint: str
) -> None:
    if constraint == "box" and path.startswith("mm"):
        pytest.skip("mm has no constraint")
    y = noisy(3, noise=0.3)
    solver, lower = make(path, prior, y, constraint=constraint)
    exact = solve(solver, lower, lower.start(), 1e-11, limit=50_000).x
    for tol in (1.0, 0.1, 1e-2, 1e-4):
        solution = solve(solver, lower, torch.zeros_like(y), tol)
        assert (norm(solution.x - exact) <= solution.residual + 1e-10).all()  # μ ≥ 1 for A = I
        known = lower.mu > 0
        assert (norm(solution.x - exact) <= solution.distance + 1e-10)[known].all()
        assert torch.isnan(solution.distance[~known]).all()


@pytest.mark.parametrize("path", ["agd", "agd-unknown-mu", "mm"])
def test_iterations_grow_like_the_root_of_the_condition(path: str) -> None:
    counts = []
    for condition in (1e2, 1e4):
        prior = Tikhonov(weight=condition, condition=condition)
        lower = lower_level(prior, noisy(1), PATHS[path][2]())
        solution = solve(PATHS[path][0](), lower, torch.zeros_like(lower.y), 1e-8, limit=50_000)
        counts.append(int(solution.iterations[0]))
    # Ten times as many; plain gradient descent would take a hundred times.
    assert counts[1] < 25 * counts[0]


@pytest.mark.parametrize("prior", ["foe", "tv", "quadratic"])
def test_mm_never_increases_the_energy(prior: str) -> None:
    solver, lower = make("mm", prior, noisy(3, noise=0.3))
    state = solver.init(lower, torch.zeros_like(lower.y), {})
    energy = lower.energy(state.x)
    for _ in range(60):
        state = solver.step(lower, state)
        before, energy = energy, lower.energy(state.x)
        assert (energy <= before + 1e-13 * before.abs()).all()


@pytest.mark.parametrize("path", [path for path in PATHS if not path.startswith("mm")])
@pytest.mark.parametrize("prior", ["foe", "tv"])
@pytest.mark.parametrize(("constraint", "low", "high"), [("box", 0.0, 1.0), ("nonnegative", 0.0, None)])
class TestConstraints:
    def solved(self, path: str, prior: str, constraint: str) -> tuple[Lower, Tensor]:
        solver, lower = make(path, prior, noisy(3, noise=0.6), constraint=constraint)
        solution = solve(solver, lower, lower.start(), 1e-10, limit=20_000)
        assert set(solution.status) == {Status.CONVERGED}
        return lower, solution.x

    def test_optimality_conditions(
        self, path: str, prior: str, constraint: str, low: float, high: float | None
    ) -> None:
        lower, x = self.solved(path, prior, constraint)
        gradient = lower.gradient(x)
        assert x.min() >= low and (high is None or x.max() <= high)
        at_low, at_high = x == low, (x == high) if high is not None else torch.zeros_like(x, dtype=torch.bool)
        assert at_low.any() and (high is None or at_high.any()), "the constraint is meant to be active"
        assert (gradient[at_low] >= -1e-10).all()
        assert (gradient[at_high] <= 1e-10).all()
        assert gradient[~(at_low | at_high)].abs().max() <= 1e-10

    def test_agreement_with_plain_projected_gradient(
        self, path: str, prior: str, constraint: str, low: float, high: float | None
    ) -> None:
        lower, x = self.solved(path, prior, constraint)
        _, reference = make("agd", prior, lower.y)
        assert reference.bounded
        point = torch.zeros_like(x)
        for _ in range(5000):
            previous = point
            point = (point - reference.gradient(point) / reference.lipschitz.view(-1, 1, 1, 1)).clamp(
                low, high
            )
            if (point - previous).abs().max() < 1e-13:
                break
        torch.testing.assert_close(x, point, rtol=0, atol=1e-8)


def counted(base: type[Regularizer], *methods: str) -> tuple[type[Regularizer], dict[str, int]]:
    """A subclass that counts the samples each method is given."""
    counts = dict.fromkeys(methods, 0)

    def wrap(name: str) -> Callable[..., Tensor]:
        def method(self: Regularizer, theta: Theta, x: Tensor, *rest: object) -> Tensor:
            counts[name] += len(x)
            return getattr(base, name)(self, theta, x, *rest)

        return method

    return type("Counted", (base,), {name: wrap(name) for name in methods}), counts


@pytest.mark.parametrize("base", [FieldOfExperts, TotalVariation])
class TestFinishedSamplesStopCosting:
    def lower(self, base: type[Regularizer], *methods: str) -> tuple[Lower, dict[str, int]]:
        regularizer, counts = counted(base, *methods)
        y = noisy(5) * torch.tensor([1.0, 1e-3, 5.0, 0.1, 1e-6], dtype=torch.float64).view(-1, 1, 1, 1)
        prior = regularizer(nu=0.05, weight=0.05, **({} if base is TotalVariation else {"filters": 2}))
        return lower_level(prior, y, theta=initial(prior)), counts

    def test_agd_takes_one_gradient_a_sample_and_iteration(self, base: type[Regularizer]) -> None:
        lower, counts = self.lower(base, "gradient")
        solution = solve(AGD(), lower, torch.zeros_like(lower.y), 1e-6, limit=5000)
        assert len(set(solution.iterations.tolist())) > 2
        assert counts["gradient"] == int(solution.iterations.sum()) + len(lower.y)

    def test_mm_takes_one_analysis_and_one_synthesis_a_sample_and_iteration(
        self, base: type[Regularizer]
    ) -> None:
        lower, counts = self.lower(base, "analyse", "synthesise", "gradient")
        base.gradient(lower.problem.regularizer, lower.at.prepared["regularizer"], lower.y[:1])
        own = dict(counts)  # what a gradient costs: TV's uses the same two methods
        counts.update(dict.fromkeys(counts, 0))
        solution = solve(MemoryGradient(), lower, torch.zeros_like(lower.y), 1e-6, limit=5000)
        assert len(set(solution.iterations.tolist())) > 2
        assert len(lower.y) <= counts["gradient"] <= 2 * len(lower.y), "the check before a sample may leave"
        for method in ("analyse", "synthesise"):
            steps = counts[method] - own[method] * counts["gradient"]
            assert int(solution.iterations.sum()) + len(lower.y) <= steps
            assert steps <= int(solution.iterations.sum()) + 2 * len(lower.y)
