"""Smoothed total variation: derivatives, adjoint, constants and majorant, channels joint and separate."""

from __future__ import annotations

import pytest
import torch
from helpers import directions, flat, hessian, initial, lower_level, normal, slope, slope_theta, small_tv
from torch import Tensor

from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.tensors import dot
from bltoolbox.testing import smooth_images

every_coupling = pytest.mark.parametrize("coupling", ["joint", "separate"])
gray_and_colour = pytest.mark.parametrize("channels", [1, 3])


def case(coupling: str, channels: int = 3) -> tuple[TotalVariation, dict[str, Tensor], Tensor]:
    tv = small_tv(coupling)
    return tv, initial(tv), smooth_images(2, (channels, 7, 9)).double()


@every_coupling
def test_energy_is_the_formula(coupling: str) -> None:
    tv, theta, x = case(coupling)
    a, nu = theta["log_weight"].exp(), theta["log_smoothing"].exp()
    expected = torch.zeros(2, dtype=torch.float64)
    for row in range(7):
        for column in range(9):
            right = x[:, :, row, column + 1] - x[:, :, row, column] if column < 8 else 0 * x[:, :, 0, 0]
            down = x[:, :, row + 1, column] - x[:, :, row, column] if row < 6 else 0 * x[:, :, 0, 0]
            squared = right**2 + down**2
            squared = squared.sum(1, keepdim=True) if coupling == "joint" else squared
            expected += a * ((squared + nu**2).sqrt() - nu).sum(1)
    torch.testing.assert_close(tv.energy(theta, x), expected, rtol=1e-12, atol=0)


def test_joint_and_separate_agree_on_gray_images() -> None:
    (joint, theta, x), (separate, _, _) = case("joint", 1), case("separate", 1)
    torch.testing.assert_close(joint.energy(theta, x), separate.energy(theta, x), rtol=1e-14, atol=0)


@every_coupling
@gray_and_colour
class TestDerivatives:
    def test_gradient(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        gradient, d = tv.gradient(theta, x), normal(*x.shape)
        expected = super(TotalVariation, tv).gradient(theta, x)  # autograd of the energy
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
        differences = slope(lambda x: tv.energy(theta, x), x, d, 1e-4)
        torch.testing.assert_close(dot(gradient, d), differences, rtol=1e-7, atol=1e-9)

    def test_hessian_product(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        v = normal(*x.shape)
        product = tv.linearize(theta, x)(v)
        expected = super(TotalVariation, tv).linearize(theta, x)(v)  # double backward of the energy
        torch.testing.assert_close(product, expected, rtol=1e-10, atol=1e-12)
        differences = slope(lambda x: tv.gradient(theta, x), x, v, 1e-4)
        torch.testing.assert_close(product, differences, rtol=1e-6, atol=1e-7)

    def test_hessian_is_symmetric_and_positive_semidefinite(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        matrix = hessian(tv, theta, x[0])
        torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12 * float(matrix.norm()))
        assert torch.linalg.eigvalsh(matrix).min() >= -1e-12 * matrix.norm()

    def test_derivative_of_the_pairing_in_theta(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        q = normal(*x.shape)
        torch.testing.assert_close(tv.pairing(theta, x, q), dot(tv.gradient(theta, x), q), rtol=1e-11, atol=0)
        each = tv.pairing_gradients(theta, x, q)
        for d in directions(theta, 2):
            differences = slope_theta(lambda theta: tv.pairing(theta, x, q), theta, d)
            rows = [flat({name: part[i].detach() for name, part in each.items()}) @ flat(d) for i in (0, 1)]
            torch.testing.assert_close(torch.stack(rows), differences, rtol=1e-8, atol=1e-9)

    def test_synthesis_is_the_exact_adjoint_of_analysis(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        t = tv.analyse(theta, x)
        u = normal(*t.shape)
        left, right = dot(t, u), dot(x, tv.synthesise(theta, u, x.shape[1:]))
        scale = t.flatten(1).norm(dim=1) * u.flatten(1).norm(dim=1)
        assert ((left - right).abs() <= 1e-12 * scale).all()

    def test_lipschitz_constant_is_a_true_bound(self, coupling: str, channels: int) -> None:
        tv, theta, _ = case(coupling, channels)
        shape = (channels, 7, 9)
        # The curvature a/ν is attained everywhere at x = 0, so the largest eigenvalue there is the constant.
        true = torch.linalg.eigvalsh(hessian(tv, theta, torch.zeros(shape, dtype=torch.float64))).max()
        # ‖D‖² = 8 cos²(…) is 5 % short of 8 at 7×9.
        assert true <= tv.lipschitz(theta, shape) <= 1.1 * true

    def test_parabola_lies_above_the_energy_and_touches_it(self, coupling: str, channels: int) -> None:
        tv, theta, x = case(coupling, channels)
        t = tv.analyse(theta, x)
        w = tv.majorant(theta, t)
        torch.testing.assert_close(
            tv.synthesise(theta, w * t, x.shape[1:]), tv.gradient(theta, x), rtol=1e-11, atol=1e-13
        )
        for k, scale in enumerate((1e-3, 1e-2, 0.1, 1.0)):
            other = x + scale * normal(*x.shape, seed=k)
            t_other = tv.analyse(theta, other)
            parabola = tv.energy(theta, x) + 0.5 * dot(w, t_other**2 - t**2)
            assert (parabola >= tv.energy(theta, other)).all()


@every_coupling
def test_energy_is_convex_along_segments(coupling: str) -> None:
    tv, theta, x = case(coupling)
    end = x + 0.5 * normal(*x.shape)
    e0, e1 = tv.energy(theta, x), tv.energy(theta, end)
    for t in torch.linspace(0.05, 0.95, 19).tolist():
        assert (tv.energy(theta, (1 - t) * x + t * end) < (1 - t) * e0 + t * e1).all()


@every_coupling
def test_part_of_a_linearisation_is_the_linearisation_of_the_part(coupling: str) -> None:
    tv, _, _ = case(coupling)
    x, v, index = smooth_images(4, (3, 7, 9)).double(), normal(4, 3, 7, 9), torch.tensor([3, 1])
    whole = lower_level(tv, x).linearize(x)
    torch.testing.assert_close(whole.take(index).hvp(v[index]), whole.hvp(v)[index], rtol=1e-13, atol=1e-14)


@every_coupling
def test_memory_layout_does_not_change_the_result_and_inputs_stay_untouched(coupling: str) -> None:
    tv, theta, x = case(coupling)
    q = normal(*x.shape)
    kept = [value.clone() for value in (x, q, *theta.values())]

    def everything(x: Tensor, q: Tensor) -> list[Tensor]:
        t = tv.analyse(theta, x)
        return [
            tv.energy(theta, x),
            tv.gradient(theta, x),
            tv.linearize(theta, x)(q),
            tv.pairing(theta, x, q),
            tv.majorant(theta, t),
            tv.synthesise(theta, t, x.shape[1:]),
        ]

    last = everything(*(v.to(memory_format=torch.channels_last) for v in (x, q)))
    for plain, other in zip(everything(x, q), last, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(now, then) for now, then in zip((x, q, *theta.values()), kept, strict=True))


@every_coupling
def test_float32_stays_float32_and_near_float64(coupling: str) -> None:
    tv, theta, x = case(coupling)
    small, q = {name: value.float() for name, value in theta.items()}, normal(*x.shape)
    pairs = [
        (tv.energy(small, x.float()), tv.energy(theta, x)),
        (tv.gradient(small, x.float()), tv.gradient(theta, x)),
        (tv.linearize(small, x.float())(q.float()), tv.linearize(theta, x)(q)),
        (tv.pairing(small, x.float(), q.float()), tv.pairing(theta, x, q)),
        (tv.lipschitz(small, x.shape[1:]), tv.lipschitz(theta, x.shape[1:])),
    ]
    for single, double in pairs:
        assert single.dtype == torch.float32
        assert (single - double).norm() <= 1e-5 * double.norm()
