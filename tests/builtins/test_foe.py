"""Field of Experts: its formula, parameters, borders and certified constants; test_half_quadratic has the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import BOUNDARIES, hessian, initial, normal, small_foe
from torch import Tensor

from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.testing import smooth_images

every_boundary = pytest.mark.parametrize("boundary", BOUNDARIES)
every_basis = pytest.mark.parametrize("basis", ["dct", "pixel"])
gray_and_colour = pytest.mark.parametrize("channels", [1, 3])
every_size = pytest.mark.parametrize("size", [2, 3, 4])


def case(
    boundary: str, channels: int = 3, **options: object
) -> tuple[FieldOfExperts, dict[str, Tensor], Tensor]:
    foe = small_foe(boundary, **{"smoothing": "per-filter"} | options)
    theta = initial(foe, (channels, 8, 9))
    theta["log_smoothing"] = theta["log_smoothing"] + 0.3 * normal(len(theta["log_smoothing"]), seed=1)
    return foe, theta, smooth_images(2, (channels, 8, 9)).double()


@pytest.mark.parametrize(("smoothing", "count"), [("shared", 1482), ("per-filter", 1491)])
def test_the_paper_s_regularizer_has_as_many_parameters_as_the_paper_says(smoothing: str, count: int) -> None:
    foe = FieldOfExperts(filters=10, kernel_size=7, smoothing=smoothing)  # type: ignore[arg-type]
    theta = foe.init_params((3, 8, 8), keyed_generator(0))
    assert sum(value.numel() for value in theta.values()) == count


def test_energy_is_the_formula() -> None:
    foe, theta, x = case("valid")
    kernels, expected = foe.kernels(theta), torch.zeros(2, dtype=torch.float64)
    for j in range(foe.filters):
        a = (theta["log_scale"] + theta["log_weights"][j]).exp()
        nu = theta["log_smoothing"][j].exp()
        for row in range(8 - 2):
            for column in range(9 - 2):
                t = (x[:, :, row : row + 3, column : column + 3] * kernels[j]).sum((1, 2, 3))
                expected += a * ((t**2 + nu**2).sqrt() - nu)
    torch.testing.assert_close(foe.energy(theta, x), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("boundary", "mode"), [("zero", "constant"), ("periodic", "wrap"), ("symmetric", "symmetric")]
)
@every_size
def test_boundary_rule_extends_the_image_as_its_name_says(boundary: str, mode: str, size: int) -> None:
    foe, theta, x = case(boundary, kernel_size=size)
    before, after = (size - 1) // 2, size // 2
    room = ((0, 0), (0, 0), (before, after), (before, after))
    padded = torch.from_numpy(np.pad(x.numpy(), room, mode=mode))  # type: ignore[call-overload]
    expected = torch.nn.functional.conv2d(padded, foe.kernels(theta))
    found = FilterBank(foe.kernels(theta), foe.boundary).correlate(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_both_coordinates_describe_the_same_kernels() -> None:
    foe, pixel = (
        FieldOfExperts(filters=5, kernel_size=3, start="random", basis=basis) for basis in ("dct", "pixel")
    )
    mine, theirs = (one.init_params((3, 8, 8), keyed_generator(4)) for one in (foe, pixel))
    torch.testing.assert_close(foe.kernels(mine), theirs["kernels"], rtol=1e-12, atol=1e-14)


@every_boundary
@gray_and_colour
class TestDerivatives:
    @every_basis
    def test_pairing_gradients_are_linear_and_differentiable_in_q(
        self, boundary: str, channels: int, basis: str
    ) -> None:
        foe, theta, x = case(boundary, channels, basis=basis)
        q, r = normal(*x.shape, seed=1).requires_grad_(), normal(*x.shape, seed=2)
        total = sum(part.sum() for part in foe.pairing_gradients(theta, x, q).values())
        (slope_q,) = torch.autograd.grad(total, q)
        expected = sum(part.sum() for part in foe.pairing_gradients(theta, x, r).values())
        torch.testing.assert_close((slope_q * r).sum(), expected, rtol=1e-10, atol=1e-10)


def kernels_of(kind: str, filters: int, channels: int, size: int) -> Tensor:
    """Random kernels, and ones made to be amplified: all alike, constant, or nothing but the highest frequency."""
    if kind == "random":
        return normal(filters, channels, size, size)
    if kind == "alike":
        return normal(1, channels, size, size).repeat(filters, 1, 1, 1)
    if kind == "constant":
        return torch.ones(filters, channels, size, size, dtype=torch.float64)
    sign = (-1.0) ** torch.arange(size, dtype=torch.float64)
    return (sign.unsqueeze(1) * sign).expand(filters, channels, size, size).clone()


@every_boundary
@pytest.mark.parametrize("kind", ["random", "alike", "constant", "alternating"])
@every_size
def test_lipschitz_constant_is_a_true_bound(boundary: str, kind: str, size: int) -> None:
    foe, theta, _ = case(boundary, 2, kernel_size=size, basis="pixel")
    theta["kernels"] = kernels_of(kind, foe.filters, 2, size)
    shape = (2, 10, 11)
    # The curvature φ'' ≤ 1/ν is attained everywhere at x = 0, so the largest eigenvalue there is the constant.
    matrix = hessian(foe, theta, torch.zeros(shape, dtype=torch.float64))
    assert foe.lipschitz(theta, shape) >= torch.linalg.eigvalsh(matrix).max()


@pytest.mark.parametrize(
    ("boundary", "start"),
    [("valid", "random"), ("zero", "random"), ("periodic", "random"), ("symmetric", "dct")],
)
def test_lipschitz_bound_is_sharp_on_large_images(boundary: str, start: str) -> None:
    foe, theta, _ = case(boundary, 1, kernel_size=3, start=start)
    shape = (1, 40, 40)
    product = foe.linearize(theta, torch.zeros(1, *shape, dtype=torch.float64))
    v = normal(1, *shape)
    for _ in range(400):
        v = product(v / v.norm())
    # The Rayleigh quotient of power iteration is a lower bound of the norm.
    assert v.norm() <= foe.lipschitz(theta, shape) <= 1.08 * v.norm()


@every_basis
def test_zero_mean_projection_is_symmetric_idempotent_and_leaves_the_rest_alone(basis: str) -> None:
    foe = small_foe(basis=basis)
    theta = initial(foe)
    a, b = (dict(theta) | {"kernels": normal(*theta["kernels"].shape, seed=k)} for k in (1, 2))
    once = foe.project_gradient(a)
    assert foe.kernels(once).mean((2, 3)).abs().max() < 1e-15
    torch.testing.assert_close(foe.project_gradient(once)["kernels"], once["kernels"], rtol=0, atol=1e-15)
    left = (once["kernels"] * b["kernels"]).sum()
    right = (a["kernels"] * foe.project_gradient(b)["kernels"]).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(once[name], a[name]) for name in theta if name != "kernels")


@every_basis
@pytest.mark.parametrize("start", ["differences", "dct", "random"])
@pytest.mark.parametrize(("filters", "channels"), [(7, 3), (14, 3), (3, 1)])
def test_initial_kernels_are_admissible_and_of_unit_norm(
    start: str, basis: str, filters: int, channels: int
) -> None:
    foe = FieldOfExperts(filters=filters, kernel_size=4, start=start, basis=basis)  # type: ignore[arg-type]
    kernels = foe.kernels(foe.init_params((channels, 8, 8), keyed_generator(0)))
    assert kernels.mean((2, 3)).abs().max() < 1e-14
    torch.testing.assert_close(kernels.flatten(1).norm(dim=1), torch.ones(filters, dtype=torch.float64))


def test_parabola_lies_above_the_potential_and_touches_it() -> None:
    foe = small_foe(filters=1)
    theta = initial(foe, (1, 8, 8))
    # The weight is in the filter: a φ_ν(t) = φ_{aν}(a t).
    nu = (theta["log_scale"] + theta["log_weights"] + theta["log_smoothing"]).exp()
    t = torch.cat([torch.linspace(-2, 2, 401, dtype=torch.float64), nu * torch.linspace(-3, 3, 101)])

    def potential(t: Tensor) -> Tensor:
        return (t**2 + nu**2).sqrt() - nu

    for at in (-1.5, -0.05, 0.0, 0.003, 0.4):
        touching = torch.full((1, 1, 1, 1), at, dtype=torch.float64)
        w = foe.majorant(theta, touching).squeeze()
        parabola = potential(touching.squeeze()) + 0.5 * w * (t**2 - at**2)
        assert (parabola >= potential(t) - 1e-15).all()
        # The slopes agree where they touch: w t = φ'(t).
        torch.testing.assert_close(
            w * at, torch.tensor(at / math.hypot(at, float(nu)), dtype=w.dtype), rtol=1e-12, atol=0
        )
