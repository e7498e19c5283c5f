"""Smoothed total variation: its formula and constants; test_half_quadratic has the rest."""

from __future__ import annotations

import pytest
import torch
from helpers import hessian, initial, small_tv
from torch import Tensor

from blt_builtins.regularizers.tv import TotalVariation
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
    def test_lipschitz_constant_is_a_true_bound(self, coupling: str, channels: int) -> None:
        tv, theta, _ = case(coupling, channels)
        shape = (channels, 7, 9)
        # The curvature a/ν is attained everywhere at x = 0, so the largest eigenvalue there is the constant.
        true = torch.linalg.eigvalsh(hessian(tv, theta, torch.zeros(shape, dtype=torch.float64))).max()
        # ‖D‖² = 8 cos²(…) is 5 % short of 8 at 7×9.
        assert true <= tv.lipschitz(theta, shape) <= 1.1 * true
