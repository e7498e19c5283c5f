"""Valid constants of a filter bank under φ_ν(t) = √(t² + ν²) − ν, for certified error bounds.

With t = C_j x, |φ''| ≤ 1/ν, |φ'''| ≤ 0.8587/ν² and |(tφ'')'| ≤ 1/ν. A response changes by at most e‖c_j‖‖Δx‖ at one
pixel, where e ≤ 2 accounts for pixels that a kernel sees repeatedly at a mirrored border (e = 1 without mirroring), so

    L_H ≤ ‖Σ_j a_j (0.8587/ν_j²) e‖c_j‖ C_jᵀC_j‖

The columns of B: a_j C_jᵀφ'(t_j) for a log-weight, their sum for the log-scale, −a_j C_jᵀ(t_j φ''(t_j)) for a
log ν, and for a change δ_j of a kernel a_j[C_δᵀφ'(t_j) + C_jᵀ(φ''(t_j) ⊙ C_δ x)], where ‖C_δ u‖² ≤ ‖δ‖² Σ_s ‖u
shifted by s‖². Each block is bounded separately, and the squares are added. The kernel block of L_B contains
φ'''·(patch of x), so it is valid only on a ball: the norm of a patch there is at most the largest at its centre plus e
times its radius.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.filters import Boundary, FilterBank, extend, norm_bound
from blt_builtins.regularizers.mirrored_norm import mirrored_norm
from bltoolbox.plugin import Constants, norm

__all__ = ["THIRD", "Bank", "bank_constants", "mirrored_norm"]

#: max |φ'''| ν², attained at t = ν/2.
THIRD = 0.8587


@dataclass(frozen=True)
class Bank:
    """Kernels (J, C, K, K), weights a_j and smoothings ν_j (both (J,)) under a boundary rule.

    ``stretch`` is the largest factor between a kernel's coordinates in θ and its pixels; ``shared`` means that all ν_j
    are one parameter.
    """

    kernels: Tensor
    weights: Tensor
    nu: Tensor
    boundary: Boundary
    stretch: float
    shared: bool

    @property
    def repeats(self) -> float:
        """The e of the module docstring."""
        return 2.0 if self.boundary == "symmetric" else 1.0


def bank_constants(bank: Bank, x: Tensor, radius: Tensor) -> Constants:
    """L_H, L_B and ‖B‖ of each sample, on the ball of ``radius`` around x."""
    kernels, a, nu = bank.kernels, bank.weights, bank.nu
    lengths = kernels.flatten(1).norm(dim=1)
    hessian = norm_bound(kernels, a * THIRD / nu.square() * bank.repeats * lengths, bank.boundary)
    single = torch.stack(
        [norm_bound(kernel.unsqueeze(0), torch.ones_like(nu[:1]), bank.boundary) for kernel in kernels]
    )
    patches = _patches(bank, x)
    longest = patches.amax(1).sqrt() + bank.repeats * radius
    energy = patches.sum(1).sqrt()
    return Constants(
        hessian_lipschitz=hessian.expand_as(radius),
        mixed_lipschitz=_mixed_lipschitz(bank, single, longest),
        mixed_norm=_mixed_norm(bank, single, x, energy),
    )


def _patches(bank: Bank, x: Tensor) -> Tensor:
    """‖patch‖² seen by a kernel at each position, (B, P)."""
    size = bank.kernels.shape[-1]
    return F.unfold(extend(x, size, bank.boundary), size).square().sum(1)


def _shift_bound(bank: Bank) -> float:
    """‖C_δ‖ ≤ this·‖δ‖: one unit for each of the C·K² entries of a kernel, and twice that if the border is mirrored."""
    return bank.repeats * bank.kernels[0].numel() ** 0.5


def _mixed_lipschitz(bank: Bank, single: Tensor, longest: Tensor) -> Tensor:
    a, nu = bank.weights, bank.nu
    by_weight = (a * single / nu).square().sum()
    by_scale = norm_bound(bank.kernels, a / nu, bank.boundary).square()
    by_smoothing = by_scale if bank.shared else by_weight
    shifts = _shift_bound(bank)
    root = single.sqrt()
    flat = 2 * shifts * root / nu
    curved = longest.unsqueeze(1) * THIRD / nu.square() * single
    by_kernel = (a * bank.stretch * (flat + curved)).square().sum(1)
    return (by_weight + by_scale + by_smoothing + by_kernel).sqrt()


def _mixed_norm(bank: Bank, single: Tensor, x: Tensor, energy: Tensor) -> Tensor:
    a, nu = bank.weights, bank.nu
    t = FilterBank(bank.kernels, bank.boundary).correlate(x)
    root = torch.rsqrt(t.square() + nu.square().view(1, -1, 1, 1))
    slope = t * root
    bend = t * nu.square().view(1, -1, 1, 1) * root.pow(3)
    by_weight, weight_sum = _columns(bank, slope, x)
    by_nu, nu_sum = _columns(bank, bend, x)
    sizes = slope.square().sum((2, 3)).sqrt()
    by_kernel = (
        (a * bank.stretch * (_shift_bound(bank) * sizes + single.sqrt() / nu * energy.unsqueeze(1)))
        .square()
        .sum(1)
    )
    return (by_weight + weight_sum + (nu_sum if bank.shared else by_nu) + by_kernel).sqrt()


def _columns(bank: Bank, responses: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j ‖a_j C_jᵀu_j‖² and ‖Σ_j a_j C_jᵀu_j‖² of each sample."""
    squares, total = torch.zeros_like(x[:, 0, 0, 0]), torch.zeros_like(x)
    for j, weight in enumerate(bank.weights):
        single = FilterBank(bank.kernels[j : j + 1] * weight, bank.boundary)
        column = single.adjoint(responses[:, j : j + 1].contiguous(), x.shape[1:])
        squares = squares + norm(column).square()
        total = total + column
    return squares, norm(total).square()
