"""Symbols: what convolutions and differences do to each frequency of a mirrored image.

    Σ_s a_s cos(ω₁s₁) cos(ω₂s₂),        ω = (πu/H, πv/W),   u = 0 … H − 1,   v = 0 … W − 1

a is the autocorrelation of a kernel, or of two channels of one; the product of cosines is the even part of e^{iω·s} in
both directions. Exact where the kernel is even or odd in each direction and the border is mirrored, and a good
approximation elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bltoolbox.plugin import ConstantsByKey


def even_lags(kernels: Tensor) -> Tensor:
    """The autocorrelations of kernels (…, C, K, L) between all pairs of channels, summed over the signs of the lag:
    (…, C, C, K, L) for lags from 0 to K − 1 and L − 1."""
    rows, columns = kernels.shape[-2:]
    spectrum = torch.fft.fft2(kernels, s=(2 * rows, 2 * columns))
    products = spectrum.unsqueeze(-3) * spectrum.unsqueeze(-4).conj()
    return _even(_even(torch.fft.ifft2(products).real, -2), -1)


def _even(lags: Tensor, dim: int) -> Tensor:
    """a_s + a_{−s} for s > 0 and a_0, from a line of lags in the order of Fourier transforms."""
    size = lags.shape[dim] // 2
    behind = lags.narrow(dim, size + 1, size - 1).flip(dim)
    first, others = lags.narrow(dim, 0, 1), lags.narrow(dim, 1, size - 1)
    return torch.cat([first, others + behind], dim)


def bank_symbol(lags: Tensor, weights: Tensor, shape: Sequence[int]) -> Tensor:
    """Σ_j w_j Σ_s a_js cos cos for the lags (J, C, C, K, L) of filters and weights (B, J): (B, C, C, H, W)."""
    # Like the products below, the same for a sample in every batch.
    mixed = torch.bmm(weights.unsqueeze(1), lags.flatten(1).expand(len(weights), -1, -1))
    return cosine_sums(mixed.view(len(weights), *lags.shape[1:]), shape)


def cosine_sums(lags: Tensor, shape: Sequence[int]) -> Tensor:
    """Σ_s a_s cos(ω₁s₁) cos(ω₂s₂) for lags (…, K, L) and images of ``shape`` (C, H, W): (…, H, W)."""
    height, width = shape[-2:]
    # A product per sample and block: one for all would round differently with the number of samples.
    blocks = lags.reshape(-1, *lags.shape[-2:])
    rows, columns = (
        _WAVES[length, count].like(lags).expand(len(blocks), -1, -1)
        for length, count in ((height, lags.shape[-2]), (width, lags.shape[-1]))
    )
    return torch.bmm(torch.bmm(rows, blocks), columns.mT).view(*lags.shape[:-2], height, width)


def difference_symbols(shape: Sequence[int], like: Tensor) -> Tensor:
    """The symbols of horizontal and vertical differences without any across the border, (2, H, W): exact."""
    lags = torch.zeros(2, 2, 2, dtype=like.dtype, device=like.device)
    lags[:, 0, 0] = 2.0
    lags[0, 0, 1] = lags[1, 1, 0] = -2.0
    return cosine_sums(lags, shape)


def separate_channels(symbols: Tensor) -> Tensor:
    """Blocks (B, C, C, H, W) of channels that do not mix, from their symbols (B, C, H, W)."""
    return torch.diag_embed(symbols.movedim(1, -1), dim1=1, dim2=2)


def _waves(size: tuple[int, int]) -> Tensor:
    """cos(πus/length), (length, count)."""
    length, count = size
    u, s = torch.arange(length, dtype=torch.float64), torch.arange(count, dtype=torch.float64)
    return torch.cos(math.pi / length * u.unsqueeze(1) * s)


_WAVES = ConstantsByKey(_waves)
