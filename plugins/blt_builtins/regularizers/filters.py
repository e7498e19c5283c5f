"""Filter banks: correlation of an image with small kernels under a boundary rule, its exact adjoint and its norm.

    (Cx)_j = Σ_c k_jc ⋆ E x_c,        Cᵀt = Eᵀ Σ_j k_jᵀ t_j

E extends the image beyond its border: not at all (`valid`: responses only where the kernel fits), by zeros,
periodically, or mirrored. For every rule the adjoint is exact: ⟨Cx, t⟩ = ⟨x, Cᵀt⟩ up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.borders import extended, folded, line_source, margins
from blt_builtins.regularizers.phases import (
    ADJOINT_COLOUR,
    ADJOINT_GRAY,
    ADJOINT_MANY,
    CORRELATING,
    MANY,
    Phases,
    fastest,
)
from blt_builtins.symbols import bank_symbol, even_lags
from bltoolbox.plugin import image_layout

#: Bytes of the patches of images that are made at once.
_PATCHES = 2**28

Boundary = Literal["valid", "zero", "periodic", "symmetric"]


def zero_mean(kernels: Tensor) -> Tensor:
    """Without the mean of each channel of each kernel, so that flat images have no response."""
    return kernels - kernels.mean((-2, -1), keepdim=True)


def unit_norm(kernels: Tensor) -> Tensor:
    """Kernels (J, C, K, K), each divided by its norm."""
    return kernels / kernels.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


class Analysis(Protocol):
    """A linear map C from images to responses, with its exact adjoint: a filter bank or several in turn."""

    def correlate(self, x: Tensor) -> Tensor: ...

    def adjoint(self, t: Tensor, shape: Sequence[int]) -> Tensor: ...

    def symbol(self, curvature: Tensor, shape: Sequence[int]) -> Tensor: ...


@dataclass(frozen=True)
class FilterBank:
    """Kernels (J, C, K, K) under a boundary rule, prepared once for both convolutions."""

    kernels: Tensor
    boundary: Boundary

    @property
    def size(self) -> int:
        return self.kernels.shape[-1]

    def correlate(self, x: Tensor) -> Tensor:
        """C x: (B, J, H', W'), with H' = H − K + 1 if `valid` and H otherwise."""
        return self._correlating(extend(x, self.size, self.boundary))

    def adjoint(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Cᵀ t, images of ``shape`` (C, H, W)."""
        if t.device.type != "cpu" and (self.boundary == "symmetric" or self.boundary == "periodic"):
            framed = F.conv2d(t, self._flipped, padding=self.size)
            return folded(framed, (self.size, self.size), self.boundary)
        # A convolution with flipped kernels adds in a fixed order, which a transposed one may not do on a GPU.
        full = self._transposing(t, self.size - 1)  # on the whole support
        if self.boundary == "valid":
            return full
        if self.boundary == "zero":
            before = (self.size - 1) // 2
            return full[:, :, before : before + shape[1], before : before + shape[2]]
        if self.boundary == "symmetric" and min(shape[1:]) >= self.size // 2:
            return image_layout(_fold(full, self.size))
        for dim in (2, 3):
            source = line_source(shape[dim - 1], self.size, self.boundary).beside(full)
            empty = full.new_zeros(*full.shape[:dim], shape[dim - 1], *full.shape[dim + 1 :])
            full = empty.index_add_(dim, source, full)
        return image_layout(full)

    def symbol(self, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        """Σ_j w_j C_jᵀC_j by frequency for weights (B, J), see ``Regularizer.symbol``."""
        return bank_symbol(self._lags, curvature, shape)

    @cached_property
    def _lags(self) -> Tensor:
        return even_lags(self.kernels)

    @cached_property
    def _correlating(self) -> Phases:
        return fastest(self.kernels, CORRELATING, 0, "correlate")

    @cached_property
    def _transposing(self) -> Phases:
        channels = self.kernels.shape[1]
        several = ADJOINT_COLOUR if channels < MANY else ADJOINT_MANY
        forms = ADJOINT_GRAY if channels == 1 else several
        return fastest(self._flipped, forms, self.size - 1, "transpose")

    @cached_property
    def _flipped(self) -> Tensor:
        """The kernels of Cᵀ, (C, J, K, K)."""
        return image_layout(self.kernels.flip(2, 3).transpose(0, 1))


@dataclass(frozen=True)
class FilterHessian:
    """v ↦ Σ_j C_jᵀ[ψ_j''(C_j x) ⊙ C_j v], with the curvature stored."""

    bank: Analysis
    shape: tuple[int, ...]
    curvature: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        return self.bank.adjoint(self.bank.correlate(v).mul_(self.curvature), self.shape)

    def take(self, index: Tensor) -> FilterHessian:
        """The Hessian of some of the samples."""
        return FilterHessian(self.bank, self.shape, self.curvature[index])


def too_large(kernel_size: int, shape: Sequence[int]) -> str | None:
    """A message if the kernels do not fit into images of ``shape``, else None."""
    if min(shape[1:]) >= kernel_size:
        return None
    return (
        f"kernel_size {kernel_size} is larger than the {shape[1]}×{shape[2]} images;"
        f" use a kernel_size of at most {min(shape[1:])} or larger images"
    )


def extend(x: Tensor, size: int, boundary: Boundary) -> Tensor:
    """E x: the image extended for kernels of ``size`` centred on every pixel (unchanged for `valid`)."""
    if boundary == "valid":
        return x
    if boundary == "zero":
        before, after = margins(size)
        return F.pad(x, (before, after, before, after))
    if x.device.type != "cpu":
        return extended(x, (size, size), boundary)
    if boundary == "symmetric" and min(x.shape[2:]) >= size // 2:
        return _mirror(x, size)
    rows = line_source(x.shape[2], size, boundary).beside(x)
    columns = line_source(x.shape[3], size, boundary).beside(x)
    return image_layout(x[:, :, rows][:, :, :, columns])


def _mirror(x: Tensor, size: int) -> Tensor:
    """The mirrored extension by copies of strips, in a third of the time of gathering pixels by index."""
    before, after = margins(size)
    height, width = x.shape[2:]
    out = image_layout(
        x.new_empty(len(x), height + size - 1, width + size - 1, x.shape[1]).permute(0, 3, 1, 2)
    )
    inner = out.narrow(3, before, width)
    inner.narrow(2, before, height).copy_(x)
    for image, dim, length in ((inner, 2, height), (out, 3, width)):
        image.narrow(dim, 0, before).copy_(image.narrow(dim, before, before).flip(dim))
        image.narrow(dim, before + length, after).copy_(
            image.narrow(dim, before + length - after, after).flip(dim)
        )
    return out


def _fold(image: Tensor, size: int) -> Tensor:
    """The adjoint of ``_mirror``, in place: values beyond a border are added to the pixels that they repeat."""
    before, after = margins(size)
    for dim in (3, 2):
        length = image.shape[dim] - size + 1
        image.narrow(dim, before, before).add_(image.narrow(dim, 0, before).flip(dim))
        beyond = image.narrow(dim, before + length, after).flip(dim)
        image.narrow(dim, before + length - after, after).add_(beyond)
        image = image.narrow(dim, before, length)
    return image


def norm_bound(kernels: Tensor, weights: Tensor, boundary: Boundary) -> Tensor:
    """A valid upper bound on ‖Σ_j w_j C_jᵀC_j‖ for images of any size, without power iteration.

    The bank is a compression of convolution on ℤ², whose norm is the maximum over frequencies of
    λ_max(Σ_j w_j ĉ_j ĉ_j^H). That is a trigonometric polynomial of degree K − 1 in each variable, so its
    maximum on an N×N grid is at least cos(π(K−1)/N)² times the true one (Ehlich & Zeller 1964). For mirrored images,
    the bound is that of the parity parts of the kernels.
    """
    bank, weights = kernels.double(), weights.double()
    if boundary == "symmetric" and bank.shape[-1] % 2 == 0:
        bank = F.pad(bank, (1, 0, 1, 0))  # centre the kernel on the pixel of its response
    size = bank.shape[-1]
    grid = max(128, 2 ** math.ceil(math.log2(16 * max(size - 1, 1))))
    gram = _parity_gram(bank, weights, grid) if boundary == "symmetric" else _gram(bank, weights, grid)
    # A step that was far too long overflows here; LAPACK would raise, whereas the solver's guard explains the cause.
    finite = torch.isfinite(gram.abs()).all()
    bound = _largest_eigenvalue(torch.where(finite, gram, 0)) / math.cos(math.pi * (size - 1) / grid) ** 2
    return torch.where(finite, bound, torch.inf).to(kernels.dtype)


def _gram(kernels: Tensor, weights: Tensor, grid: int) -> Tensor:
    """Σ_j w_j ĉ_j ĉ_j^H on one half of the grid, since the other is its conjugate: (P, C, C)."""
    spectrum = torch.fft.rfft2(kernels * weights.sqrt().view(-1, 1, 1, 1), s=(grid, grid))
    return torch.einsum("jcuv,jduv->uvcd", spectrum, spectrum.conj()).flatten(0, 1)


def _parity_gram(kernels: Tensor, weights: Tensor, grid: int) -> Tensor:
    """The same for a bank whose norm on ℤ² bounds that of the given bank on mirrored images.

    An image mirrored at both borders is periodic, with twice the side lengths, and even. On it, the even and odd parts
    π of a kernel give even and odd responses, each with exactly a quarter of its energy on the image itself.
    So for any α with Σ_π 1/α_jπ = 1,

        ‖Cx‖² = Σ_j ‖Σ_π c_j^π ⋆ x‖² ≤ Σ_jπ α_jπ ‖c_j^π ⋆ x‖² ≤ ‖(√α_jπ c_j^π)‖²_{ℤ²} ‖x‖²

    A kernel of one parity, such as a cosine, has α = 1 and loses nothing; α_jπ ∝ 1/‖c_j^π‖ otherwise. The spectrum of
    a part is real up to a phase (a cosine or sine transform about the centre) and even, so a quarter of the grid is
    enough.
    """
    size = kernels.shape[-1]
    place = torch.arange(size, dtype=kernels.dtype, device=kernels.device) - size // 2
    angles = torch.arange(grid // 2 + 1, dtype=kernels.dtype, device=kernels.device) * (2 * math.pi / grid)
    angles = angles.unsqueeze(1) * place
    waves = torch.stack([angles.cos(), angles.sin()])
    spectrum = torch.einsum("jcpq,aup,bvq->jabcuv", kernels, waves, waves).flatten(0, 2)
    parts = kernels.unsqueeze(1)
    for dim in (3, 4):
        parts = torch.cat([parts + parts.flip(dim), parts - parts.flip(dim)], dim=1) / 2
    # (even, even), (odd, even), (even, odd), (odd, odd) in rows and columns; the spectrum has the two middle ones
    # swapped.
    norms = parts.flatten(2).norm(dim=2)[:, [0, 2, 1, 3]]
    alpha = norms.sum(1, keepdim=True) / norms.clamp_min(torch.finfo(norms.dtype).tiny)
    # A part that is zero stays zero whatever its factor.
    alpha = torch.where(norms > 0, alpha, 0.0)
    scaled = spectrum * (weights.unsqueeze(1) * alpha).sqrt().view(-1, 1, 1, 1)
    return torch.einsum("jcuv,jduv->uvcd", scaled, scaled).flatten(0, 1)


def _largest_eigenvalue(matrices: Tensor) -> Tensor:
    """Of positive semidefinite matrices (P, C, C), the largest eigenvalue of all."""
    return (matrices.abs() if matrices.shape[-1] == 1 else torch.linalg.eigvalsh(matrices)).max()


def correlation_gradients(t: Tensor, image: Tensor, size: int) -> Tensor:
    """Σ_p t_{ijp} (Ex)_{ic,p+s} of each sample i: what each kernel entry sees; shape (B, J, C, K, K)."""
    count = t[0, 0].numel() * image.shape[1] * size * size * t.element_size()
    # On a CPU one sample at a time is as fast; on a GPU as many as fit have fewer launches.
    several = 1 if t.device.type == "cpu" else max(1, _PATCHES // count)
    rows = [
        row.flatten(2) @ F.unfold(part, size).mT
        for row, part in zip(t.split(several), image.split(several), strict=True)
    ]
    products = rows[0] if len(rows) == 1 else torch.cat(rows)
    return products.unflatten(2, (image.shape[1], size, size))


def mirrored_source(length: int, size: int, device: torch.device) -> Tensor:
    """For each position of a line that is mirrored for kernels of ``size``, the pixel that it repeats."""
    return line_source(length, size, "symmetric").value.to(device)
