"""The spectral preconditioner against dense matrices: cosine transform, symbols, definiteness, and what uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import cuda_stand_in as stand_in
import pytest
import torch
from helpers import BOUNDARIES, SHAPE, initial, lower_level, noisy, normal, small_foe, small_tv
from torch import Tensor

from blt_builtins.data_terms.huber import Huber
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.mm import MemoryGradient, MMState
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.composed import Composed
from blt_builtins.operators.downsampling import Downsampling
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.mri import MRI
from blt_builtins.regularizers.crr import ConvexRidge
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.tikhonov import Tikhonov
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Ask, Rows
from bltoolbox.bilevel.tensors import dot, take
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.cosines import CosineProducts, Cosines, FastCosines
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.small_blocks import inverted
from bltoolbox.restoration.variational import join
from bltoolbox.testing import smooth_images
from bltoolbox.testing.problems import SquaredDistance

TINY = (3, 6, 5)
REGULARIZERS: dict[str, Callable[[], Regularizer]] = {
    **{f"foe-{boundary}": lambda boundary=boundary: small_foe(boundary) for boundary in BOUNDARIES},
    "wcfoe": lambda: WeaklyConvexExperts(filters=3, kernel_size=3),
    "crr": lambda: ConvexRidge(filters=3, kernel_size=3),
    "tv": small_tv,
    "tv-separate": lambda: small_tv("separate"),
    "tikhonov": Tikhonov,
}
OPERATORS: dict[str, Callable[[], Operator]] = {
    "identity": Identity,
    "blur": lambda: Blur(size=3, sigma=0.7),
    "asymmetric": lambda: Blur([[0.5, 0.3], [0.1, 0.1]]),
    "composed": lambda: Composed([Blur(size=3, sigma=0.5), Blur(size=3, sigma=0.6)]),
}


def cosine_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II, one cosine per row."""
    k = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (k + 0.5) * k.unsqueeze(1))
    return basis / basis.norm(dim=1, keepdim=True)


def dense(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The matrix of a linear map of one image; columns are computed one at a time."""
    columns = []
    for unit in torch.eye(like[0].numel(), dtype=like.dtype):
        columns.append(product(unit.view_as(like)).flatten())
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("sides", [(6, 8), (5, 7), (6, 5), (5, 6), (1, 4), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [CosineProducts, FastCosines])
def test_cosine_transform(kind: type[Cosines], sides: tuple[int, int], dtype: torch.dtype) -> None:
    """inverse(f · transform(x)) is Cᵀ f C with the orthonormal cosines of both directions."""
    plan, x = kind(*sides), normal(2, 3, *sides, dtype=dtype)
    factor = 0.1 + normal(*sides, seed=1, dtype=dtype).square()
    rows, columns = (cosine_matrix(side).to(dtype) for side in sides)
    expected = rows.T @ (factor * (rows @ x @ columns.T)) @ columns
    tol = 1e-5 if dtype is torch.float32 else 1e-12
    assert (plan.inverse(plan.transform(x)) - x).abs().max() < tol
    assert (plan.inverse(plan.transform(x) * plan.arrange(factor)) - expected).abs().max() < tol


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_inverses_of_blocks(channels: int) -> None:
    roots, identity = normal(2, channels, channels, 5), torch.eye(channels).view(1, channels, channels, 1)
    blocks = torch.einsum("bckp,bdkp->bcdp", roots, roots) + 0.1 * identity
    expected = torch.linalg.inv(blocks.movedim(-1, 1)).movedim(1, -1)
    assert (inverted(blocks.clone()) - expected).abs().max() < 1e-10
    with stand_in.device():
        there = inverted(stand_in.move(blocks))
    assert (stand_in.back(there) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_symbol_of_a_filter_bank(boundary: str) -> None:
    """Against its definition, by complex exponentials: ½Re[G(ω₁, ω₂) + G(ω₁, −ω₂)]."""
    foe = small_foe(boundary)
    theta, weights = initial(foe, TINY), normal(2, 3, seed=3).square()
    amplitudes = (theta["log_scale"] + theta["log_weights"]).exp()
    kernels = foe.kernels(theta) * amplitudes.view(-1, 1, 1, 1)
    place = torch.arange(3, dtype=torch.float64)
    symbol = foe.symbol(foe.prepare(theta), weights, TINY)
    for u, v in ((0, 0), (1, 2), (5, 4)):
        total = torch.zeros(2, 3, 3, dtype=torch.float64)
        for sign in (1, -1):
            phase = math.pi * (u / 6 * place.unsqueeze(1) + sign * v / 5 * place)
            spectrum = (kernels * torch.polar(torch.ones_like(phase), phase)).sum((2, 3))
            gram = torch.einsum("jc,jd->jcd", spectrum, spectrum.conj()).real
            total += torch.einsum("bj,jcd->bcd", weights, gram) / 2
        assert (symbol[:, :, :, u, v] - total).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("regularizer", "operator"),
    [*((name, "blur") for name in REGULARIZERS), *(("foe-symmetric", name) for name in OPERATORS)],
)
def test_symmetric_and_positive_definite(regularizer: str, operator: str, dtype: torch.dtype) -> None:
    y = noisy(1, TINY).to(dtype)
    lower = lower_level(REGULARIZERS[regularizer](), y, OPERATORS[operator]())
    preconditioner = lower.linearize(y).preconditioner(always=True)
    assert preconditioner is not None
    matrix = dense(preconditioner.apply, y).double()
    assert (matrix - matrix.T).abs().max() < (1e-4 if dtype is torch.float32 else 1e-12) * matrix.abs().max()
    assert torch.linalg.eigvalsh((matrix + matrix.T) / 2).min() > 0


@pytest.mark.parametrize(
    ("regularizer", "operator"),
    [
        (Tikhonov(), Identity()),
        (Tikhonov(), Blur(size=3, sigma=0.7)),
        (Tikhonov(of="identity"), Composed([Blur(size=3, sigma=0.5), Blur(size=3, sigma=0.6)])),
        (TotalVariation(weight=1e5, nu=1e4), Identity()),
    ],
)
def test_exact_where_cosines_diagonalise(regularizer: Regularizer, operator: Operator) -> None:
    """For constant curvatures and symmetric kernels at mirrored borders P is the Hessian."""
    y = noisy(1, TINY)
    lower = lower_level(regularizer, y, operator, strong_convexity=0.01)
    hessian = lower.linearize(y)
    preconditioner = hessian.preconditioner(always=True)
    assert preconditioner is not None
    product = dense(lambda v: preconditioner.apply(hessian.hvp(v)), y)
    # The floor of P is 1e-4 of its largest entry.
    assert (product - torch.eye(len(product))).abs().max() < 0.02


def test_exact_for_even_filters_at_mirrored_borders() -> None:
    """A Laplacian per channel under a potential of (almost) constant curvature."""
    foe = small_foe("symmetric", filters=3, basis="pixel", nu=1e4, weight=1e4)
    theta = initial(foe, TINY) | {"log_weights": torch.zeros(3, dtype=torch.float64)}
    laplacian = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], dtype=torch.float64)
    theta["kernels"] = torch.eye(3, dtype=torch.float64).view(3, 3, 1, 1) * laplacian
    y = noisy(1, TINY)
    hessian = lower_level(foe, y, Identity(), theta).linearize(y)
    preconditioner = hessian.preconditioner(always=True)
    assert preconditioner is not None
    product = dense(lambda v: preconditioner.apply(hessian.hvp(v)), y)
    assert (product - torch.eye(len(product))).abs().max() < 0.02


def test_rows_do_not_depend_on_their_batch() -> None:
    y = noisy(3)
    lower, index = lower_level(small_foe("symmetric"), y, Blur(size=3)), torch.tensor([2, 0])
    whole = lower.linearize(y).preconditioner(always=True)
    rows = lower.take(index).linearize(y[index]).preconditioner(always=True)
    assert whole is not None and rows is not None
    r = normal(3, *y.shape[1:], seed=5)
    expected = whole.apply(r)[index]
    assert (rows.apply(r[index]) - expected).abs().max() < 1e-12
    assert (take(whole, index).apply(r[index]) - expected).abs().max() < 1e-12


def test_curvature_of_the_data_term_counts() -> None:
    """Where it is larger, P is larger: ⟨r, P⁻¹r⟩ falls."""
    y, r = noisy(1), normal(1, *SHAPE, seed=6)
    problem = lower_level(small_foe("symmetric"), y, Identity()).problem
    theta, parts = join(regularizer=initial(small_foe("symmetric"))), []
    for delta in (0.1, 10.0):
        lower = replace(problem, data_term=Huber(delta)).at(theta, SHAPE).on(y)
        preconditioner = lower.linearize(y).preconditioner(always=True)
        assert preconditioner is not None
        parts.append(float(dot(r, preconditioner.apply(r))))
    assert parts[0] < 0.5 * parts[1]


@pytest.mark.parametrize(
    "operator", [MRI(acceleration=2), Downsampling(), Composed([Blur(), Downsampling()])]
)
def test_none_without_a_symbol(operator: Operator) -> None:
    x = noisy(1, (1, 12, 12))
    y = operator.apply(x, {}, {})
    problem = lower_level(small_foe("symmetric"), x, Identity()).problem
    theta = {f"regularizer.{name}": value for name, value in initial(small_foe(), (1, 12, 12)).items()}

    lower = replace(problem, operator=operator, strong_convexity=0.1).at(theta, (1, 12, 12)).on(y)
    assert lower.linearize(x).preconditioner() is None
    with pytest.raises(
        NumericalError, match="mm is set to preconditioner: spectral, but this lower level has none"
    ):
        solve(MemoryGradient(preconditioner="spectral"), lower, lower.start(), 1e-2)
    with pytest.raises(NumericalError, match="cg-ift is set to preconditioner: spectral"):
        ask = Ask(lower, SquaredDistance(x), x, x, lower.mu, Accuracy(1e-2))
        CGIFT(preconditioner="spectral").estimate(ask)
    solve(MemoryGradient(), lower, lower.start(), 1.0)


def stiff(operator: Operator) -> Lower:
    """Learned filters on crops of a ramp with an edge: far from a multiple of the identity."""
    foe = FieldOfExperts(filters=6, kernel_size=3, nu=0.01, weight=0.05 if operator.identity else 0.02)
    y = operator.apply(smooth_images(3, (3, 24, 20)).double(), {}, {}) + 0.1 * normal(3, 3, 24, 20)
    return lower_level(foe, y, operator, strong_convexity=0.01)


@pytest.mark.parametrize("operator", [Identity(), Blur(size=5, sigma=1.0)])
def test_conjugate_gradients(operator: Operator) -> None:
    """The same solution to the requested residual, in fewer iterations."""
    lower = stiff(operator)
    x = solve(MemoryGradient(), lower, lower.estimate(), 1e-2).x
    rhs, hessian, counts = normal(3, *lower.shape, seed=7), lower.linearize(x), {}
    tol = torch.full_like(lower.mu, 1e-6)
    for preconditioning in ("none", "spectral"):
        method = ConjugateGradients("test", preconditioning)  # type: ignore[arg-type]
        q, residual, count = solve_linear(method, hessian, rhs, torch.zeros_like(rhs), tol, 2000)
        assert (residual <= tol).all()
        assert (residual - (rhs - hessian.hvp(q)).flatten(1).norm(dim=1)).abs().max() < 1e-12
        counts[preconditioning] = count.double().mean()
    assert counts["spectral"] < 0.8 * counts["none"]


def test_negative_curvature_is_noticed() -> None:
    wcfoe = WeaklyConvexExperts(filters=3, kernel_size=3, curvature=0.99)
    lower = lower_level(wcfoe, noisy(1, (3, 8, 8)), Blur(size=5, sigma=2.0))
    rhs, zero = normal(1, 3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    hessian = lower.linearize(0.3 * normal(1, 3, 8, 8, seed=1))
    assert torch.linalg.eigvalsh(dense(hessian.hvp, zero)).min() < 0
    method, tol = ConjugateGradients("cg-ift", "spectral"), torch.full_like(lower.mu, 1e-9)
    with pytest.raises(NumericalError, match="non-positive curvature"):
        solve_linear(method, hessian, rhs, zero, tol, 1000)


@pytest.mark.parametrize("operator", [Identity(), Blur(size=5, sigma=1.0)])
def test_memory_gradient(operator: Operator) -> None:
    """The same minimiser in fewer iterations, with a decreasing energy."""
    lower = stiff(operator)
    plain, faster = (
        solve(MemoryGradient(preconditioner=choice), lower, lower.start(), 1e-6)  # type: ignore[arg-type]
        for choice in ("none", "spectral")
    )
    assert (faster.residual <= 1e-6).all() and (plain.residual <= 1e-6).all()
    assert (plain.x - faster.x).flatten(1).norm(dim=1).max() < 2e-6 / 0.01
    assert faster.iterations.double().mean() < 0.85 * plain.iterations.double().mean()
    solver = MemoryGradient(preconditioner="spectral")
    state = solver.init(lower, lower.start(), {})
    energies = [lower.energy(state.x)]
    for _ in range(12):
        state = solver.step(lower, state)
        energies.append(lower.energy(state.x))
    assert all(bool((after <= before).all()) for before, after in pairwise(energies))


@pytest.mark.parametrize("operator", [Identity(), Blur(size=5, sigma=1.0)])
def test_estimate_is_closer_to_the_minimiser(operator: Operator) -> None:
    lower = stiff(operator)
    x = solve(MemoryGradient(), lower, lower.start(), 1e-6).x
    near, far = ((point - x).flatten(1).norm(dim=1) for point in (lower.estimate(), lower.start()))
    assert (near < 0.6 * far).all()
    rows = lower.take(torch.tensor([1])).estimate()
    assert (rows - lower.estimate()[1:2]).abs().max() < 1e-12


def test_estimate_is_exact_for_a_quadratic_energy() -> None:
    y = noisy(2, TINY)
    lower = lower_level(Tikhonov(), y, Identity(), strong_convexity=0.5)
    assert lower.gradient(lower.estimate()).abs().max() < 1e-3 * lower.gradient(lower.start()).abs().max()


def test_used_where_it_pays() -> None:
    """Whether P is used is decided for each sample by itself, and stays so when it is renewed."""
    lower, y = lower_level(Tikhonov(weight=2.0), noisy(3), Identity()), noisy(3)
    weights = torch.ones(3, 2, *SHAPE, dtype=y.dtype) * torch.tensor([1.0, 1e-3, 1.0]).view(3, 1, 1, 1, 1)
    composite = lower.composite()
    assert composite is not None
    chosen = composite.preconditioner((2 * weights, 1.0))
    assert chosen is not None
    assert chosen.used.tolist() == [True, False, True]  # type: ignore[attr-defined]
    assert (chosen.apply(y)[1] - y[1]).abs().max() < 1e-12
    assert (chosen.apply(y)[0] - y[0]).abs().max() > 0.1
    newer = composite.preconditioner((3 * weights.flip(0), 1.0), True)
    renewed = chosen.renewed(newer)
    assert (renewed.apply(y)[1] - y[1]).abs().max() < 1e-12
    assert newer is not None
    assert torch.equal(renewed.apply(y)[0], newer.apply(y)[0])
    assert composite.preconditioner((1e-3 * weights, 1.0)) is None
    total_variation = lower_level(small_tv(), y, Identity()).linearize(y)
    assert total_variation.preconditioner() is None, "its products are cheaper"
    assert total_variation.preconditioner(always=True) is not None


class Hasty(MemoryGradient):
    """Claims half of its residual, and prefers no preconditioner for samples that have to continue."""

    begun = False

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> MMState:
        self.preconditioner, self.begun = ("none" if self.begun else "spectral"), True
        state = super().init(lower, x0, kept)
        self.preconditioner = "spectral"
        return state

    def step(self, lower: Lower, state: MMState) -> MMState:
        after = super().step(lower, state)
        return replace(after, residual=after.residual / 2)


def test_samples_that_are_restarted_may_have_no_preconditioner_of_their_own() -> None:
    lower = stiff(Identity())
    solution = solve(Hasty(), lower, lower.start(), 1e-6)
    assert (lower.gradient(solution.x).flatten(1).norm(dim=1) <= 1e-6).all()
