"""Pooled Fields of Experts: their formula, what they have in common with `foe` and `wcfoe`, and their convexity."""

from __future__ import annotations

import pytest
import torch
from helpers import hessian, normal
from scipy.ndimage import uniform_filter
from torch import Tensor

from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.foe import FieldOfExperts, amplitudes
from blt_builtins.regularizers.pooled import PooledExperts, WeaklyConvexPooledExperts
from blt_builtins.regularizers.weakly_convex import WeaklyConvexExperts
from bltoolbox.bilevel.tensors import keyed_generator

SHAPE = (1, 9, 8)
Pooled = PooledExperts | WeaklyConvexPooledExperts
both = pytest.mark.parametrize("kind", [PooledExperts, WeaklyConvexPooledExperts])


def make(
    kind: type[FieldOfExperts], boundary: str = "symmetric", seed: int = 0, **options: object
) -> tuple[FieldOfExperts, dict[str, Tensor]]:
    """Far from its start: random filters, and every parameter moved."""
    settings = {"filters": 3, "kernel_size": 3, "start": "random", "weight": 0.8} | options
    regularizer = kind(boundary=boundary, **settings)  # type: ignore[arg-type]
    theta = regularizer.init_params(SHAPE, keyed_generator("pooled", seed))
    moved = {
        name: value + 0.3 * normal(*value.shape, seed=seed + k)
        for k, (name, value) in enumerate(theta.items())
    }
    return regularizer, regularizer.project(moved)


@both
@pytest.mark.parametrize("window", [1, 3, 5])
def test_energy_is_the_formula(kind: type[FieldOfExperts], window: int) -> None:
    regularizer, theta = make(kind, pooling=window)
    x = 0.3 * normal(2, *SHAPE)
    a = amplitudes(theta)
    squares = FilterBank(regularizer.kernels(theta), "symmetric").correlate(x).square().numpy()
    averages = torch.from_numpy(uniform_filter(squares, (0, 0, window, window), mode="reflect"))
    shares = torch.softmax(8 * theta["mixing"], 0)
    ratio = (a.unsqueeze(0) / a.unsqueeze(1)).square()
    s = torch.einsum("gj,ijhw->ighw", shares * ratio, averages)

    def smoothed(width: Tensor) -> Tensor:
        width = width.view(-1, 1, 1)
        return (s + width.square()).sqrt() - width

    if isinstance(regularizer, WeaklyConvexPooledExperts):
        nu, omega = regularizer._widths(theta)
        value = smoothed(nu) - regularizer._lost(theta).view(-1, 1, 1) * smoothed(omega)
    else:
        value = smoothed(theta["log_smoothing"].exp())
    expected = (a.view(-1, 1, 1) * value).sum((1, 2, 3))
    torch.testing.assert_close(regularizer.energy(theta, x), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("kind", "plain"), [(PooledExperts, FieldOfExperts), (WeaklyConvexPooledExperts, WeaklyConvexExperts)]
)
def test_without_pooling_it_is_the_model_of_single_responses(
    kind: type[FieldOfExperts], plain: type[FieldOfExperts]
) -> None:
    options = {} if plain is WeaklyConvexExperts else {"smoothing": "per-filter"}
    pooled, theta = make(kind, pooling=1, mixing=0)
    more = {"curvature": 0.9} if plain is WeaklyConvexExperts else {}
    single = plain(3, 3, "symmetric", start="random", **options, **more)  # type: ignore[arg-type]
    assert set(theta) == set(single.init_params(SHAPE, keyed_generator(0)))
    x, v = 0.1 * normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
    for name in ("energy", "gradient"):
        torch.testing.assert_close(getattr(pooled, name)(theta, x), getattr(single, name)(theta, x))
    torch.testing.assert_close(pooled.linearize(theta, x)(v), single.linearize(theta, x)(v))
    torch.testing.assert_close(pooled.lipschitz(theta, SHAPE), single.lipschitz(theta, SHAPE))
    torch.testing.assert_close(pooled.potentials(theta).values, single.potentials(theta).values)


def eigenvalues(regularizer: FieldOfExperts, theta: dict[str, Tensor]) -> tuple[float, float]:
    """The extremes over images of many contrasts."""
    values = [
        torch.linalg.eigvalsh(hessian(regularizer, theta, contrast * normal(*SHAPE, seed=seed)))
        for seed, contrast in enumerate((0.0, 0.01, 0.03, 0.1, 0.3, 1.0))
    ]
    return min(float(value[0]) for value in values), max(float(value[-1]) for value in values)


@pytest.mark.parametrize("boundary", ["valid", "periodic", "symmetric"])
@pytest.mark.parametrize("window", [1, 3])
def test_curvatures_lie_within_their_bounds(boundary: str, window: int) -> None:
    convex, theta = make(PooledExperts, boundary, pooling=window)
    least, most = eigenvalues(convex, theta)
    assert least > -1e-10 and most <= float(convex.lipschitz(theta, SHAPE))
    weakly, theta = make(WeaklyConvexPooledExperts, boundary, pooling=window, flattening=0.9, nu=1e-3)
    least, most = eigenvalues(weakly, theta)
    assert most <= float(weakly.lipschitz(theta, SHAPE))
    assert float(weakly.strong_convexity(theta, SHAPE)) <= least < -0.01, "a bound, and not convex"
    assert float(weakly.strong_convexity(theta, (1, 60, 60))) >= -0.9 - 1e-6, "images of any size"


@both
def test_flat_images_have_finite_derivatives(kind: type[FieldOfExperts]) -> None:
    """√s has none at s = 0."""
    regularizer, theta = make(kind)
    leaves = {name: value.requires_grad_() for name, value in theta.items()}
    x, q = torch.full((1, *SHAPE), 0.5, dtype=torch.float64), normal(1, *SHAPE)
    regularizer.pairing(leaves, x, q).sum().backward()
    assert all(value.grad.isfinite().all() for value in leaves.values() if value.grad is not None)


def test_windows_have_a_centre() -> None:
    message = PooledExperts(pooling=4).check((1, 32, 32))
    assert message is not None and "use 3 or 5" in message
    assert PooledExperts(pooling=5).check((1, 32, 32)) is None
