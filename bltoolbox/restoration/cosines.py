"""The two-dimensional cosine transform of batches of images, for operators that cosines diagonalise.

    X_uv = Σ_hw x_hw cos(π(h + ½)u/H) cos(π(w + ½)v/W)

Small images: by products with the matrices of cosines, one per direction, whose operands lie in memory as they come: no
copies, and two launches on a GPU. Large ones: by one real Fourier transform V of the image with its even pixels first
and its odd pixels behind them in reverse order: with a = e^{−iπu/2H} and b = e^{−iπv/2W},

    Z_uv = b (a V_uv + ā V_{−u,v})/2 = X_uv − i X_{u,W−v}

so that half of the plane of Z contains all coefficients. The orthonormal transform, which products compute, is a
multiple of this one in each frequency; so for a function f of the frequency, inverse(f · transform(x)) is the same
symmetric operator with either.

Reference: Makhoul, *A fast cosine transform in one and two dimensions*, IEEE Trans. ASSP 1980.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import ConstantsByKey

#: The longest side for which products are faster, on a CPU (a pair for eight colour images of 96²: 1.9 ms, by Fourier
#: transforms 2.0 ms; of 64²: 0.6 and 0.9 ms) and elsewhere, where launches decide.
_SHORT, _SHORT_ON_DEVICE = 96, 256


@dataclass(frozen=True)
class Cosines(ABC):
    """A transform of images of one size, with coefficients (B, C, *order) in an order of its own."""

    height: int
    width: int

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """The coefficients of images (B, C, H, W)."""

    @abstractmethod
    def inverse(self, coefficients: Tensor) -> Tensor:
        """The images of coefficients, channels last."""

    @abstractmethod
    def arrange(self, values: Tensor) -> Tensor:
        """A function (…, H, W) of the frequency in the order of coefficients, to multiply them: a new tensor."""

    def mixed(self, blocks: Tensor, coefficients: Tensor) -> Tensor:
        """The products of blocks (B, C, C, *order) and coefficients (B, C, *order)."""
        out = torch.empty_like(coefficients)
        torch.mul(blocks[:, :, 0], coefficients[:, :1], out=out)
        for channel in range(1, coefficients.shape[1]):
            out.addcmul_(blocks[:, :, channel], coefficients[:, channel : channel + 1])
        return out


def cosines(height: int, width: int, device: torch.device) -> Cosines:
    """The faster transform."""
    short = _SHORT if device.type == "cpu" else _SHORT_ON_DEVICE
    kind = CosineProducts if max(height, width) <= short else FastCosines
    return kind(height, width)


class CosineProducts(Cosines):
    """By matrices; coefficients lie in memory as (B, W, C, H)."""

    def transform(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        rows, columns = self._matrices(x)
        image = x.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        lines = torch.bmm(image.mT, rows.mT).view(count, width, channels * height)
        return torch.bmm(columns, lines).view(count, width, channels, height).transpose(1, 2)

    def inverse(self, coefficients: Tensor) -> Tensor:
        count, channels, width, height = coefficients.shape
        rows, columns = self._matrices(coefficients)
        lines = torch.bmm(columns.mT, coefficients.transpose(1, 2).reshape(count, width, channels * height))
        image = torch.bmm(rows.mT, lines.view(count, width * channels, height).mT)
        return image.view(count, height, width, channels).permute(0, 3, 1, 2)

    def arrange(self, values: Tensor) -> Tensor:
        return values.mT.clone(memory_format=torch.contiguous_format)

    def mixed(self, blocks: Tensor, coefficients: Tensor) -> Tensor:
        if blocks.device.type == "cpu":
            return super().mixed(blocks, coefficients)
        # In two launches, and a sum that lies in memory as coefficients do.
        products = blocks.permute(0, 3, 1, 2, 4) * coefficients.transpose(1, 2).unsqueeze(2)
        return products.sum(3).transpose(1, 2)

    def _matrices(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of rows and columns, repeated for each image without a copy."""
        rows, columns = (_COSINES[side].like(x).expand(len(x), -1, -1) for side in (self.height, self.width))
        return rows, columns


class FastCosines(Cosines):
    """By Fourier transforms; Z is stored as pairs of real numbers, (B, C, H, ⌊W/2⌋ + 1, 2)."""

    def transform(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(_even_first(_even_first(x.contiguous(), 2), 3))
        plus, minus = _TWIDDLES[self.height, self.width].like(spectrum)[:2]
        mirrored = torch.cat([spectrum[:, :, :1], spectrum[:, :, 1:].flip(2)], dim=2)
        return torch.view_as_real(torch.addcmul(plus * spectrum, minus, mirrored))

    def inverse(self, coefficients: Tensor) -> Tensor:
        packed = torch.view_as_complex(coefficients.contiguous())
        plus, minus = _TWIDDLES[self.height, self.width].like(packed)[2:]
        mirrored = torch.cat([torch.zeros_like(packed[:, :, :1]), packed[:, :, 1:].flip(2)], dim=2)
        spectrum = torch.addcmul(plus * packed, minus, mirrored)
        return _interleaved(torch.fft.irfft2(spectrum, s=(self.height, self.width)))

    def arrange(self, values: Tensor) -> Tensor:
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


def _cosine_matrix(length: int) -> Tensor:
    """The orthonormal cosine transform of lines, one cosine per row."""
    place = torch.arange(length, dtype=torch.float64)
    matrix = torch.cos(math.pi / length * (place + 0.5) * place.unsqueeze(1))
    return matrix / matrix.norm(dim=1, keepdim=True)


_TWIDDLES, _COSINES = ConstantsByKey(_twiddles, kept=4), ConstantsByKey(_cosine_matrix)
