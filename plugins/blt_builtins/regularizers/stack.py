"""Filter banks one after the other: large kernels as compositions of small ones.

    C = C_L ⋯ C_1,        Cᵀ = C_1ᵀ ⋯ C_Lᵀ

Each C_l is a ``FilterBank`` without bias or nonlinearity, with its own extension of the border; so C is linear and Cᵀ
exact. Away from the border C is one bank of ``composed`` kernels with the side 1 + Σ_l (K_l − 1); at periodic and
`valid` borders it is so everywhere, and has the norm of that bank. At other borders the norm is that on a small image,
plus what larger images add (``local_norm``); the product of the norms of all layers was 35 times too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.filters import Boundary, FilterBank, norm_bound
from blt_builtins.regularizers.mirrored_norm import lipschitz_bound, local_norm


@dataclass(frozen=True)
class Stack:
    """C = C_L ⋯ C_1, prepared once for both directions."""

    layers: tuple[FilterBank, ...]

    def correlate(self, x: Tensor) -> Tensor:
        """C x."""
        for bank in self.layers:
            x = bank.correlate(x)
        return x

    def adjoint(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Cᵀ t, images of ``shape`` (C, H, W)."""
        shapes = [tuple(shape)]
        for bank in self.layers[:-1]:
            shapes.append(_responses(bank, shapes[-1]))
        for bank, seen in zip(reversed(self.layers), reversed(shapes), strict=True):
            t = bank.adjoint(t, seen)
        return t

    def symbol(self, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        """Σ_j w_j C_jᵀC_j by frequency for weights (B, J), see ``Regularizer.symbol``."""
        return self._composed.symbol(curvature, shape)

    @cached_property
    def _composed(self) -> FilterBank:
        return FilterBank(composed([bank.kernels for bank in self.layers]), self.layers[-1].boundary)


def composed(layers: Sequence[Tensor]) -> Tensor:
    """The kernels (J, C, K, K) that are ``layers`` of kernels (J_l, J_{l−1}, K_l, K_l), one after the other."""
    kernels = layers[0]
    for after in layers[1:]:
        # Σ_u a(u) k(s − u), a convolution: correlations with k, then with a, add up their lags.
        kernels = F.conv2d(kernels.transpose(0, 1), after.flip(2, 3), padding=after.shape[-1] - 1)
        kernels = kernels.transpose(0, 1)
    return kernels


def stacked_bound(
    layers: Sequence[Tensor], weights: Tensor, boundary: Boundary, shape: Sequence[int]
) -> Tensor:
    """An upper bound of ‖Σ_j w_j C_jᵀC_j‖ for images of ``shape``, weights w_j ≥ 0 of the last layer.

    At a mirrored or dark border, what ``mirrored_norm`` says of one bank holds for several with the side of the
    composed kernels: a response depends on no pixel farther away than half of it.
    """
    if len(layers) == 1:
        return lipschitz_bound(layers[0], weights, boundary, shape)
    whole = norm_bound(composed(layers), weights, "periodic")
    if boundary in ("valid", "periodic") or not bool(torch.isfinite(whole) & (whole > 0)):
        return whole
    with torch.no_grad():
        unit = whole.double()
        scaled = [*layers[:-1], layers[-1] * (weights / unit).sqrt().view(-1, 1, 1, 1)]
        stacks = {
            dtype: Stack(tuple(FilterBank(kernels.to(dtype), boundary) for kernels in scaled))
            for dtype in (torch.float32, torch.float64)
        }

        def product(x: Tensor) -> Tensor:
            return stacks[x.dtype].adjoint(stacks[x.dtype].correlate(x), x.shape[1:]).contiguous()

        size = 1 + sum(kernels.shape[-1] - 1 for kernels in layers)
        return (local_norm(product, size, shape, weights.device) * unit).to(whole.dtype)


def unfitting(sizes: Sequence[int], channels: Sequence[int]) -> str | None:
    """A message if sides and channels between layers are not those of a stack, else None."""
    if len(channels) != len(sizes) - 1:
        return (
            f"channels {list(channels)} do not fit {len(sizes)} layers; give {len(sizes) - 1} numbers, one"
            " between any two layers"
        )
    even = [size for size in sizes if size % 2 == 0]
    if len(sizes) > 1 and even:
        return f"layers of even side {even[0]} have no centre; use {even[0] - 1} or {even[0] + 1} in a stack"
    return None


def initial_layers(first: Tensor, channels: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Layers after ``first`` that see its responses unchanged at first, then through smooth cosines.

    A response of a layer is one of the layer before, correlated with a pixel, or from the second response to the same
    on with cosines of growing frequency. Composed kernels have unit norm.
    """
    layers = [first]
    for count, size in zip(channels, sizes, strict=True):
        patterns = _patterns(size, -(-count // len(layers[-1])))
        kernels = torch.zeros(count, len(layers[-1]), size, size, dtype=torch.float64)
        for j in range(count):
            repetition, seen = divmod(j, len(layers[-1]))
            kernels[j, seen] = patterns[repetition]
        lengths = composed([*layers, kernels]).flatten(1).norm(dim=1)
        layers.append(kernels / lengths.view(-1, 1, 1, 1))
    return layers


def _patterns(size: int, count: int) -> Tensor:
    """A single pixel, then products of cosines, smoothest first, (count, K, K)."""
    place = (torch.arange(size, dtype=torch.float64) + 0.5) * (torch.pi / size)
    pairs = sorted(
        ((i, j) for i in range(size) for j in range(size)), key=lambda ij: (ij[0] ** 2 + ij[1] ** 2, ij)
    )
    pixel = torch.zeros(size, size, dtype=torch.float64)
    pixel[size // 2, size // 2] = 1.0
    waves = [torch.outer((i * place).cos(), (j * place).cos()) for i, j in pairs]
    return torch.stack([(pixel, *waves)[k % (len(waves) + 1)] for k in range(count)])


def _responses(bank: FilterBank, shape: Sequence[int]) -> tuple[int, ...]:
    lost = bank.size - 1 if bank.boundary == "valid" else 0
    return (len(bank.kernels), *(side - lost for side in shape[1:]))
