"""The two-dimensional cosine transform of batches of images, for operators that cosines diagonalise.

    X_uv = Σ_hw x_hw cos(π(h + ½)u/H) cos(π(w + ½)v/W)

By one real Fourier transform V of the image with its even pixels first and its odd pixels behind them in reverse
order: with a = e^{−iπu/2H} and b = e^{−iπv/2W},

    Z_uv = b (a V_uv + ā V_{−u,v})/2 = X_uv − i X_{u,W−v}

so that half of the plane of Z contains all coefficients. (On a CPU this is as fast as products with cosine matrices for
images of 64², and much faster for larger ones.) The orthonormal transform is a multiple of this one in each
frequency; so for a function f of the frequency, inverse(f · transform(x)) is the same symmetric operator with either.

Reference: Makhoul, *A fast cosine transform in one and two dimensions*, IEEE Trans. ASSP 1980.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import ConstantsByKey


@dataclass(frozen=True)
class Cosines:
    """The transform of images of one size; Z is stored as pairs of real numbers, (B, C, H, ⌊W/2⌋ + 1, 2)."""

    height: int
    width: int

    def transform(self, x: Tensor) -> Tensor:
        """Z of images (B, C, H, W)."""
        spectrum = torch.fft.rfft2(_even_first(_even_first(x.contiguous(), 2), 3))
        plus, minus = _TWIDDLES[self.height, self.width].like(spectrum)[:2]
        mirrored = torch.cat([spectrum[:, :, :1], spectrum[:, :, 1:].flip(2)], dim=2)
        return torch.view_as_real(torch.addcmul(plus * spectrum, minus, mirrored))

    def inverse(self, coefficients: Tensor) -> Tensor:
        """The images of Z, channels last."""
        packed = torch.view_as_complex(coefficients.contiguous())
        plus, minus = _TWIDDLES[self.height, self.width].like(packed)[2:]
        mirrored = torch.cat([torch.zeros_like(packed[:, :, :1]), packed[:, :, 1:].flip(2)], dim=2)
        spectrum = torch.addcmul(plus * packed, minus, mirrored)
        return _interleaved(torch.fft.irfft2(spectrum, s=(self.height, self.width)))

    def arrange(self, values: Tensor) -> Tensor:
        """A function (…, H, W) of the frequency in the order of Z, to multiply it."""
        count = self.width // 2 + 1
        behind = torch.cat([values[..., :1], values.flip(-1)[..., : count - 1]], dim=-1)
        return torch.stack([values[..., :count], behind], dim=-1)


def _even_first(x: Tensor, dim: int) -> Tensor:
    """Entries 0, 2, 4, … of a dimension, followed by …, 5, 3, 1."""
    length = x.shape[dim]
    index = [slice(None)] * dim
    even, odd = x[(*index, slice(0, length, 2))], x[(*index, slice(1, length, 2))]
    return torch.cat([even, odd.flip(dim)], dim=dim)


def _interleaved(x: Tensor) -> Tensor:
    """The inverse of ``_even_first`` in both dimensions of images, channels last."""
    count, channels, height, width = x.shape
    out = x.new_empty(count, height, width, channels).permute(0, 3, 1, 2)
    rows, columns = (height + 1) // 2, (width + 1) // 2
    out[:, :, ::2, ::2] = x[:, :, :rows, :columns]
    out[:, :, 1::2, ::2] = x[:, :, rows:, :columns].flip(2)
    out[:, :, ::2, 1::2] = x[:, :, :rows, columns:].flip(3)
    out[:, :, 1::2, 1::2] = x[:, :, rows:, columns:].flip(2, 3)
    return out


def _twiddles(size: tuple[int, int]) -> Tensor:
    """ab/2 and āb/2 for the transform, conjugate a times conjugate b and −i times that for its inverse."""
    height, width = size
    u = torch.arange(height, dtype=torch.float64).unsqueeze(1) / height
    v = torch.arange(width // 2 + 1, dtype=torch.float64) / width
    modulus = torch.ones_like(u + v)
    both, mirrored = (torch.polar(modulus, -math.pi / 2 * phase) for phase in (v + u, v - u))
    return torch.stack([both / 2, mirrored / 2, both.conj(), -1j * both.conj()])


_TWIDDLES = ConstantsByKey(_twiddles, kept=4)
