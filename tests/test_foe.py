"""Field of Experts: derivatives, adjoint, certified constants and majorant, for every boundary rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import BOUNDARIES, directions, flat, hessian, initial, normal, slope, slope_theta, small_foe
from torch import Tensor

from blt_builtins.regularizers.filters import FilterBank
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.tensors import dot, keyed_generator
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


def autograd_energy_gradient(foe: FieldOfExperts, theta: dict[str, Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(foe.energy(theta, x).sum(), x, create_graph=True)[0]


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
    def test_gradient(self, boundary: str, channels: int) -> None:
        foe, theta, x = case(boundary, channels)
        gradient, d = foe.gradient(theta, x), normal(*x.shape)
        expected = super(FieldOfExperts, foe).gradient(theta, x)  # autograd of the energy
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
        differences = slope(lambda x: foe.energy(theta, x), x, d, 1e-4)
        torch.testing.assert_close(dot(gradient, d), differences, rtol=1e-7, atol=1e-9)

    def test_hessian_product(self, boundary: str, channels: int) -> None:
        foe, theta, x = case(boundary, channels)
        v = normal(*x.shape)
        product = foe.linearize(theta, x)(v)
        expected = super(FieldOfExperts, foe).linearize(theta, x)(v)  # double backward of the energy
        torch.testing.assert_close(product, expected, rtol=1e-10, atol=1e-11)
        differences = slope(lambda x: foe.gradient(theta, x), x, v, 1e-4)
        torch.testing.assert_close(product, differences, rtol=1e-6, atol=1e-8)

    def test_pairing_is_the_gradient_against_q(self, boundary: str, channels: int) -> None:
        foe, theta, x = case(boundary, channels)
        q = normal(*x.shape)
        expected = dot(autograd_energy_gradient(foe, theta, x).detach(), q)
        torch.testing.assert_close(foe.pairing(theta, x, q), expected, rtol=1e-10, atol=1e-12)

    @every_basis
    @pytest.mark.parametrize("smoothing", ["shared", "per-filter"])
    def test_derivative_of_the_pairing_in_theta(
        self, boundary: str, channels: int, basis: str, smoothing: str
    ) -> None:
        foe, theta, x = case(boundary, channels, basis=basis, smoothing=smoothing)
        q = normal(*x.shape)
        leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
        pairing = dot(autograd_energy_gradient(foe, leaves, x), q)
        each = foe.pairing_gradients(theta, x, q)
        for i in range(len(x)):
            rows = torch.autograd.grad(pairing[i], list(leaves.values()), retain_graph=True)
            for name, row in zip(leaves, rows, strict=True):
                torch.testing.assert_close(each[name][i], row, rtol=1e-9, atol=1e-11)
        for d in directions(theta, 2):
            differences = slope_theta(lambda theta: foe.pairing(theta, x, q), theta, d)
            found = [flat({name: part[i] for name, part in each.items()}) @ flat(d) for i in (0, 1)]
            torch.testing.assert_close(torch.stack(found), differences, rtol=1e-7, atol=1e-8)

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

    def test_hessian_is_symmetric_and_positive_semidefinite(self, boundary: str, channels: int) -> None:
        foe, theta, x = case(boundary, channels)
        matrix = hessian(foe, theta, x[0])
        torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12 * float(matrix.norm()))
        assert torch.linalg.eigvalsh(matrix).min() >= -1e-12 * matrix.norm()

    def test_synthesis_is_the_exact_adjoint_of_analysis(self, boundary: str, channels: int) -> None:
        for size in (2, 3, 5):
            foe, theta, x = case(boundary, channels, kernel_size=size)
            t = foe.analyse(theta, x)
            u = normal(*t.shape)
            left, right = dot(t, u), dot(x, foe.synthesise(theta, u, x.shape[1:]))
            scale = t.flatten(1).norm(dim=1) * u.flatten(1).norm(dim=1)
            assert ((left - right).abs() <= 1e-12 * scale).all()


@every_boundary
def test_energy_is_convex_along_segments(boundary: str) -> None:
    foe, theta, x = case(boundary)
    ends = x, x + 0.5 * normal(*x.shape)
    e0, e1 = (foe.energy(theta, end) for end in ends)
    for t in torch.linspace(0.05, 0.95, 19).tolist():
        between = foe.energy(theta, (1 - t) * ends[0] + t * ends[1])
        assert (between < (1 - t) * e0 + t * e1).all()


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


@every_boundary
def test_gradient_is_synthesis_of_majorant_times_analysis(boundary: str) -> None:
    foe, theta, x = case(boundary)
    t = foe.analyse(theta, x)
    expected = foe.synthesise(theta, foe.majorant(theta, t) * t, x.shape[1:])
    torch.testing.assert_close(foe.gradient(theta, x), expected, rtol=1e-11, atol=1e-13)


@every_boundary
def test_part_of_a_linearisation_is_the_linearisation_of_the_part(boundary: str) -> None:
    foe, theta, _ = case(boundary)
    x, v, index = smooth_images(4, (3, 8, 9)).double(), normal(4, 3, 8, 9), torch.tensor([3, 1])
    part = foe.linearize(theta, x).take(index)  # type: ignore[attr-defined]
    torch.testing.assert_close(
        part(v[index]), foe.linearize(theta, x[index])(v[index]), rtol=1e-13, atol=1e-14
    )


@every_boundary
def test_memory_layout_does_not_change_the_result_and_inputs_stay_untouched(boundary: str) -> None:
    foe, theta, x = case(boundary)
    q = normal(*x.shape)
    kept = [value.clone() for value in (x, q, *theta.values())]

    def everything(x: Tensor, q: Tensor) -> list[Tensor]:
        t = foe.analyse(theta, x)
        each = foe.pairing_gradients(theta, x, q)
        return [
            foe.energy(theta, x),
            foe.gradient(theta, x),
            foe.linearize(theta, x)(q),
            foe.pairing(theta, x, q),
            foe.majorant(theta, t),
            foe.synthesise(theta, t, x.shape[1:]),
            *each.values(),
        ]

    last = everything(*(v.to(memory_format=torch.channels_last) for v in (x, q)))
    for plain, other in zip(everything(x, q), last, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(now, then) for now, then in zip((x, q, *theta.values()), kept, strict=True))


@every_boundary
def test_float32_stays_float32_and_near_float64(boundary: str) -> None:
    foe, theta, x = case(boundary)
    small = {name: value.float() for name, value in theta.items()}
    q = normal(*x.shape)
    pairs = [
        (foe.energy(small, x.float()), foe.energy(theta, x)),
        (foe.gradient(small, x.float()), foe.gradient(theta, x)),
        (foe.linearize(small, x.float())(q.float()), foe.linearize(theta, x)(q)),
        (foe.pairing(small, x.float(), q.float()), foe.pairing(theta, x, q)),
        (foe.lipschitz(small, x.shape[1:]), foe.lipschitz(theta, x.shape[1:])),
    ]
    for single, double in pairs:
        assert single.dtype == torch.float32
        assert (single - double).norm() <= 1e-5 * double.norm()
