"""Quasi-Newton steps under a majorant: B in compact form, descent without a line search, fewer iterations than `mm`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers import lower_level, noisy, normal
from torch import Tensor

from blt_builtins.lower_solvers.lbfgs import LBFGSState, _product
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.lower_solvers.mm_lbfgs import MajorisedLBFGS, weighted_square
from blt_builtins.lower_solvers.secants import Secants, flat, image
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.tensors import dot
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.testing import smooth_images

COUNT, LENGTH, PAIRS = 3, 30, 4


def pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of a quadratic energy; the third one of the second sample has negative curvature."""
    root = normal(LENGTH, LENGTH, seed=seed)
    hessian = root @ root.mT / LENGTH + torch.eye(LENGTH, dtype=root.dtype)
    s = normal(COUNT, PAIRS + 2, LENGTH, seed=seed + 1)
    y = s @ hessian
    y[1, 3] *= -1
    return s, y


def secants(s: Tensor, y: Tensor) -> Secants:
    built = Secants.first(s[:, 0], y[:, 0])
    for j in range(1, s.shape[1]):
        built = built.append(s[:, j], y[:, j], PAIRS)
    return built


def test_product_is_the_two_loop_recursion() -> None:
    s, y = pairs()
    built, v = secants(s, y).scaled(torch.clone), normal(COUNT, LENGTH, seed=5)
    s, y = s[:, -PAIRS:], y[:, -PAIRS:]
    sy = (s * y).sum(2)
    rho = torch.where(sy > 0, 1 / sy, 0.0)
    scale = sy[:, -1] / y[:, -1].square().sum(1)
    state = LBFGSState(v, v, v, v, s, y, rho, scale)
    torch.testing.assert_close(built.product(v, torch.clone), _product(state, v), rtol=1e-10, atol=1e-12)


def test_product_is_symmetric_and_meets_the_newest_secant() -> None:
    s, y = pairs()
    weights = 0.5 + torch.rand(LENGTH, dtype=s.dtype, generator=torch.Generator().manual_seed(0))

    def inverse(rows: Tensor) -> Tensor:
        return rows / weights

    built = secants(s, y).scaled(inverse)
    torch.testing.assert_close(built.product(y[:, -1], inverse), s[:, -1], rtol=1e-9, atol=1e-11)
    u, v = normal(COUNT, LENGTH, seed=6), normal(COUNT, LENGTH, seed=7)
    by_u, by_v = built.product(u, inverse), built.product(v, inverse)
    torch.testing.assert_close(dot(u, by_v), dot(by_u, v), rtol=1e-10, atol=1e-12)
    assert (dot(u, by_u) > 0).all()


def test_pairs_of_no_use_change_nothing() -> None:
    s, y = pairs()
    built = Secants.first(s[:, 0], y[:, 0])
    worse = built.append(s[:, 1], -y[:, 1], PAIRS)
    v = normal(COUNT, LENGTH, seed=5)
    torch.testing.assert_close(worse.product(v, torch.clone), built.product(v, torch.clone))
    assert worse.curved.all()
    assert not Secants.first(s[:, 0], -y[:, 0]).curved.any()


def test_rows_are_images() -> None:
    x = normal(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    assert torch.equal(image(flat(x), x), x)
    assert flat(x).data_ptr() == x.data_ptr()


def test_weighted_squares() -> None:
    a, w = normal(2, 4, 150, 90), normal(2, 4, 150, 90, seed=1).abs()
    torch.testing.assert_close(weighted_square(a, w), (w * a * a).sum((1, 2, 3)))
    torch.testing.assert_close(weighted_square(a, None), (a * a).sum((1, 2, 3)))


def stiff(operator: Operator, prior: Regularizer) -> Lower:
    """Filters on crops of a ramp with an edge: far from a multiple of the identity."""
    y = operator.apply(smooth_images(3, (3, 24, 20)).double(), {}, {}) + 0.1 * normal(3, 3, 24, 20)
    return lower_level(prior, y, operator, strong_convexity=0.01)


def priors() -> list[Regularizer]:
    return [
        FieldOfExperts(filters=6, kernel_size=3, nu=0.01, weight=0.05),
        WeaklyConvexExperts(filters=6, kernel_size=3, nu=0.01, weight=0.05),
    ]


@pytest.mark.parametrize("preconditioner", ["none", "spectral"])
@pytest.mark.parametrize("prior", priors(), ids=["foe", "wcfoe"])
@pytest.mark.parametrize("operator", [Identity(), Blur(size=5, sigma=1.0)], ids=["identity", "blur"])
def test_every_step_decreases_the_energy(operator: Operator, prior: Regularizer, preconditioner: str) -> None:
    lower, solver = stiff(operator, prior), MajorisedLBFGS(preconditioner=preconditioner)  # type: ignore[arg-type]
    state = solver.init(lower, lower.start(), {})
    energies = [lower.energy(state.x)]
    for _ in range(15):
        state = solver.step(lower, state)
        energies.append(lower.energy(state.x))
    rounding = 1e-13 * energies[0]
    assert all(bool((after <= before + rounding).all()) for before, after in pairwise(energies))
    torch.testing.assert_close(state.t, lower.composite().forward(state.x)[0])  # type: ignore[union-attr]


@pytest.mark.parametrize("operator", [Identity(), Blur(size=5, sigma=1.0)], ids=["identity", "blur"])
def test_the_minimiser_of_mm_in_fewer_iterations(operator: Operator) -> None:
    lower = stiff(operator, priors()[0])
    mm = MemoryGradient(preconditioner="spectral")
    slow, fast = (solve(solver, lower, lower.estimate(), 1e-6) for solver in (mm, mm.quick()))
    assert (slow.x - fast.x).flatten(1).norm(dim=1).max() < 2e-6 / 0.01
    assert fast.iterations.double().mean() < 0.75 * slow.iterations.double().mean()


def test_samples_with_and_without_a_preconditioner_share_a_batch() -> None:
    """P pays for the first two samples only; each takes the steps that it takes alone."""
    y = torch.cat([stiff(Identity(), priors()[0]).y[:2], noisy(1, (3, 24, 20)) * 30])
    lower = lower_level(FieldOfExperts(filters=6, kernel_size=3, nu=0.1, weight=0.05), y, Identity())
    solver = MajorisedLBFGS()
    together = solve(solver, lower, lower.start(), 1e-6)
    for i in range(3):
        alone = lower.take(torch.tensor([i]))
        single = solve(solver, alone, alone.start(), 1e-6)
        assert single.iterations.tolist() == together.iterations[i : i + 1].tolist()
        torch.testing.assert_close(single.x, together.x[i : i + 1], rtol=0, atol=1e-8)
