"""The finite-sum problem of the tests: its formulas agree with its definition, and its blocks are unbiased."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Counter
from bltoolbox.testing.finite_sum import QuadraticSum, SumLower, SumTasks, SumUpper, quadratic_sum
from bltoolbox.testing.reference import reference_solve

THETA = {"theta": torch.linspace(-0.4, 0.5, 5, dtype=torch.float64)}
Sums = QuadraticSum


def bound(sums: QuadraticSum) -> tuple[SumLower, SumUpper]:
    return SumTasks(sums).at(THETA, Counter()).on(range(len(sums.b)))


def test_the_closed_forms_are_those_of_the_energies() -> None:
    sums = quadratic_sum()
    lower, upper = bound(sums)
    x = reference_solve(lower, lower.start(), 1e-13)
    assert torch.allclose(sums.solution(THETA), x, atol=1e-12)
    assert torch.allclose(sums.value(THETA), upper.value(x), rtol=1e-12)

    def each(theta: Tensor) -> Tensor:
        return sums.value({"theta": theta})

    slopes = torch.autograd.functional.jacobian(each, THETA["theta"])
    assert torch.allclose(sums.value_gradient(THETA), slopes, rtol=1e-10)


def test_every_task_has_the_same_minimiser() -> None:
    sums = quadratic_sum()
    assert float(sums.value_gradient({"theta": sums.best}).abs().max()) < 1e-13
    assert bool((sums.value({"theta": sums.best}) < sums.value(THETA)).all())
    assert bool((sums.value({"theta": sums.best}) > 1e-3).all()), "the blocks of the loss disagree"


def test_the_blocks_differ() -> None:
    sums = quadratic_sum()
    for part in (sums.a, sums.d, sums.b, sums.t, sums.rho):
        assert float((part[:, :1] - part[:, 1:]).flatten(2).norm(dim=2).min() if part.ndim > 2 else 1) > 0.01


def mean_over_blocks(whole: SumLower | SumUpper, of: Callable[..., Tensor]) -> Tensor:
    count = len(whole.sums.b)
    return torch.stack([of(whole.block(torch.full((count,), j))) for j in range(whole.blocks)]).mean(0)


W = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64)


@pytest.mark.parametrize(
    "of",
    [
        lambda h, x, q: h.energy(x),
        lambda h, x, q: h.gradient(x),
        lambda h, x, q: h.linearize(x).hvp(q),
        lambda h, x, q: h.mixed(x, q, W)["theta"],
        lambda h, x, q: h.theta_gradient(x, W)["theta"],
    ],
    ids=["energy", "gradient", "Hessian", "mixed", "theta"],
)
def test_the_mean_over_blocks_is_the_sum(of: Callable[[Lower, Tensor, Tensor], Tensor]) -> None:
    lower, _ = bound(quadratic_sum())
    x, q = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean = mean_over_blocks(lower, lambda block: of(block, x, q))
    assert torch.allclose(mean, of(lower, x, q), rtol=1e-12)


def test_the_mean_over_blocks_of_the_loss_is_the_loss() -> None:
    _, upper = bound(quadratic_sum())
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for of in (
        lambda g: g.value(x),
        lambda g: g.gradient(x),
        lambda g: g.theta_gradient(x, W)["theta"],
    ):
        assert torch.allclose(mean_over_blocks(upper, of), of(upper), rtol=1e-12)


def test_the_step_of_a_block_is_valid_for_all_blocks() -> None:
    lower, _ = bound(quadratic_sum())
    largest = torch.linalg.eigvalsh(lower.sums.a + torch.diag_embed(THETA["theta"].exp() * lower.sums.d))
    assert torch.allclose(lower.block_lipschitz, largest[..., -1].amax(1), rtol=1e-12)
    assert bool((lower.block_lipschitz > lower.lipschitz).all())
