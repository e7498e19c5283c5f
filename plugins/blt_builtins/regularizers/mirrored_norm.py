"""A tight upper bound of ‖M‖, M = Σ_j w_j C_jᵀC_j, for filters that see a mirrored border.

M couples only pixels closer than K, so its norm on a large image is nearly that on a small one. Let χ_k be the shifts
of a product of two sine windows of N − 2⌊K/2⌋ pixels with norm 1, and A their autocorrelation, so that
Σ_k χ_k(p)χ_k(q) = A(p − q). Every χ_k x fits into an image of N×N with the same M, whether it touches a border or not:

    ⟨x, Mx⟩ = Σ_k ⟨χ_k x, M χ_k x⟩ + Σ_pq M_pq (1 − A(p − q)) x_p x_q ≤ (‖M_N‖ + s) ‖x‖²

    s = max_p Σ_q ‖M_pq‖ (1 − A(p − q))

for all images whose sides are at least N; s is found on a small image, since M is the same at all pixels far from the
border. A side shorter than N is left as it is (A = 1 in that direction).

‖M_N‖ is bounded in one of two ways:

* `lanczos`: k steps from a random start give a Ritz value of at least (1 − ε)‖M_N‖, except for starts of probability
  at most 1.648 √n e^{−(2k−1)√ε} (Kuczyński & Woźniakowski, theorem 4.2), n the dimension. With ε = 0.02, k is chosen
  for a probability of 1e-10: about 100 steps, or 0.1 s. The start does not depend on the filters. (We know √n and the
  exponent from the abstract of the paper. The constant was checked on spectra that are hard for Lanczos, with up to 800
  eigenvalues: failures were at most 0.56 times as frequent as this bound.)
* `cholesky`: λI − M_N ≻ 0 is shown by a block Cholesky factorisation, for a λ 1 % above a Ritz value: 0.8 s for
  colour, 0.1 s for gray. No probability is involved.

Reference: Kuczyński & Woźniakowski, *Estimating the largest eigenvalue by the power and Lanczos algorithms with a
random start*, SIAM J. Matrix Anal. Appl. 1992.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from blt_builtins.regularizers.filters import Boundary, FilterBank, mirrored_source, norm_bound
from bltoolbox.plugin import ConstantsByKey

Certificate = Literal["lanczos", "cholesky"]
#: Images (B, C, H, W) ↦ M of each.
Product = Callable[[Tensor], Tensor]

#: Side N of the image that stands for larger ones, in kernel sizes and at least.
_SIDES, _SMALLEST = 7, 48
#: The largest kernels for which this is worth its cost.
_LARGEST_KERNEL = 11
#: ε and the failure probability of Lanczos.
_RELATIVE, _FAILURE = 0.02, 1e-10
#: What rounding may have changed, relative to the norm; products are in float32 for Lanczos.
_ROUNDING = 1e-4
#: Pixels of an image from which a solve by `agd` gains more than Lanczos costs.
_WORTHWHILE = 64**2
#: Dimensions up to which all eigenvalues are computed.
_DENSE = 300
#: How far above a Ritz value the factorisation is tried, and how often it is raised by as much.
_RAISE, _TRIALS = 0.01, 8


@dataclass(frozen=True)
class _Bound:
    """A norm with what it was computed from: projections and bounds of one θ ask for the same norm in turn."""

    kernels: Tensor
    weights: Tensor
    request: tuple[tuple[int, ...], Certificate]
    value: Tensor

    def answers(self, kernels: Tensor, weights: Tensor, request: tuple[tuple[int, ...], Certificate]) -> bool:
        return self.request == request and _same(self.kernels, kernels) and _same(self.weights, weights)


_LATEST: deque[_Bound] = deque(maxlen=2)


def mirrored_norm(
    kernels: Tensor, weights: Tensor, shape: Sequence[int], certificate: Certificate = "lanczos"
) -> Tensor:
    """An upper bound of ‖Σ_j w_j C_jᵀC_j‖ on mirrored images of ``shape`` (C, H, W), weights w_j ≥ 0.

    Valid for these sides, and where one is larger than ``standing_side``, for all that are at least that; with the
    ``certificate`` of the module docstring. Typically 1.02 to 1.12 times the norm, where ``norm_bound``, which it never
    exceeds, has 1.5 to 3.6; for kernels larger than 11×11 it is that bound. Not differentiable. Infinite where a kernel
    is not finite.
    """
    # All images with longer sides have the same bound.
    largest = standing_side(kernels.shape[-1]) + 1
    request = (shape[0], *(min(side, largest) for side in shape[1:])), certificate
    kernels, weights = kernels.detach(), weights.detach()
    for bound in tuple(_LATEST):
        if bound.answers(kernels, weights, request):
            return bound.value.clone()
    value = _certified(kernels, weights, *request)
    _LATEST.append(_Bound(kernels.clone(), weights.clone(), request, value))
    return value.clone()


def standing_side(kernel_size: int) -> int:
    """The side N of the image that stands for all larger ones."""
    return max(_SMALLEST, _SIDES * kernel_size)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _certified(kernels: Tensor, weights: Tensor, shape: Sequence[int], certificate: Certificate) -> Tensor:
    crude = norm_bound(kernels, weights, "symmetric")
    size = kernels.shape[-1]
    with torch.no_grad():
        scaled = kernels * weights.sqrt().view(-1, 1, 1, 1)
        if size > _LARGEST_KERNEL or min(shape[1:]) < size or not bool(torch.isfinite(crude)):
            return crude
        # Scaled to a norm near 1, so that neither float32 nor the stopping of Lanczos depends on units.
        unit = crude.double().clamp_min(torch.finfo(torch.float64).tiny)
        scaled = scaled.double() / unit.sqrt()
        limit = standing_side(size)
        small = (shape[0], *(min(side, limit) for side in shape[1:]))
        bound = _small_norm(scaled, small, certificate) + _remainder(scaled, shape, limit)
        return torch.minimum(crude, (bound * unit).to(crude.dtype))


def lipschitz_bound(kernels: Tensor, weights: Tensor, boundary: Boundary, shape: Sequence[int]) -> Tensor:
    """An upper bound of ‖Σ_j w_j C_jᵀC_j‖ for steps of length 1/L: ``mirrored_norm`` where it saves more than it costs,
    that is at mirrored borders of images that are not small, else ``norm_bound``."""
    if boundary == "symmetric" and shape[1] * shape[2] >= _WORTHWHILE:
        return mirrored_norm(kernels, weights, shape)
    return norm_bound(kernels, weights, boundary)


def _small_norm(scaled: Tensor, shape: Sequence[int], certificate: Certificate) -> Tensor:
    """A bound of ‖CᵀC‖ on images of exactly ``shape``."""
    dimension = math.prod(shape)
    if dimension <= _DENSE:
        identity = torch.eye(dimension, dtype=torch.float64, device=scaled.device).view(dimension, *shape)
        product = _product(FilterBank(scaled, "symmetric"), identity).reshape(dimension, dimension)
        return torch.linalg.eigvalsh(product)[-1] * (1 + 1e-10)
    bank = FilterBank(scaled.float(), "symmetric")
    ritz = _largest_ritz(partial(_product, bank), shape, scaled.device).double()
    if certificate == "lanczos":
        return _above(ritz)
    return _factorised(scaled, shape, float(ritz))


def _steps(dimension: int) -> int:
    """k such that 1.648 √n e^{−(2k−1)√ε} is at most the failure probability."""
    logarithm = math.log(1.648 * math.sqrt(dimension) / _FAILURE)
    return math.ceil((logarithm / math.sqrt(_RELATIVE) + 1) / 2)


def _product(bank: FilterBank, x: Tensor) -> Tensor:
    return bank.adjoint(bank.correlate(x), x.shape[1:]).contiguous()


def _above(ritz: Tensor) -> Tensor:
    """A norm near 1 is at most this, but for the failure probability."""
    return ritz / (1 - _RELATIVE) + _ROUNDING


def _largest_ritz(product: Product, shape: Sequence[int], device: torch.device) -> Tensor:
    """The largest Ritz value of M in float32 after k steps of Lanczos with full reorthogonalisation."""
    dimension = math.prod(shape)
    steps = _steps(dimension)
    start = torch.randn(dimension, generator=torch.Generator().manual_seed(1992))
    basis = torch.zeros(steps + 1, dimension, device=device)
    basis[0] = (start / start.norm()).to(device)
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    for k in range(steps):
        w = product(basis[k].view(1, *shape)).flatten()
        diagonal.append(basis[k] @ w)
        earlier = basis[: k + 1]
        for _ in range(2):  # once is not enough where the Krylov space is nearly invariant
            w.addmv_(earlier.mT, earlier @ w, alpha=-1)
        beta = w.norm()
        # In an invariant subspace nothing is left but rounding: the next vector is zero, and so is its Ritz value.
        off_diagonal.append(torch.where(beta > 1e-6, beta, 0.0))
        basis[k + 1] = torch.where(beta > 1e-6, w / beta, 0.0)
    sides = torch.stack(off_diagonal[:-1]).double()
    matrix = torch.diag(torch.stack(diagonal).double()) + torch.diag(sides, 1) + torch.diag(sides, -1)
    return torch.linalg.eigvalsh(matrix)[-1]


def _factorised(scaled: Tensor, shape: Sequence[int], ritz: float) -> Tensor:
    """λ for which λI − CᵀC has a Cholesky factorisation."""
    diagonals, couplings = _bands(scaled, shape)
    for trial in range(1, _TRIALS + 1):
        value = ritz * (1 + trial * _RAISE) + 1e-12
        if _positive(value, diagonals, couplings):
            return torch.tensor(value * (1 + 1e-9), dtype=torch.float64, device=scaled.device)
    return torch.tensor(math.inf, dtype=torch.float64, device=scaled.device)


def _positive(value: float, diagonals: list[Tensor], couplings: list[Tensor]) -> bool:
    """Whether λI − M ≻ 0 for a block tridiagonal M: its Schur complements have Cholesky factors."""
    carried: Tensor | float = 0.0
    for k, diagonal in enumerate(diagonals):
        identity = torch.eye(len(diagonal), dtype=diagonal.dtype, device=diagonal.device)
        factor, failed = torch.linalg.cholesky_ex(value * identity - diagonal - carried)
        if bool(failed):
            return False
        if k < len(couplings):
            half = torch.linalg.solve_triangular(factor, couplings[k], upper=False)
            carried = half.mT @ half
    return True


def _bands(scaled: Tensor, shape: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """CᵀC by bands of at least K − 1 rows, each coupled to the next one only."""
    height, width = shape[1:]
    band = max(scaled.shape[-1] - 1, 1)
    firsts = list(range(0, height - band + 1, band))
    bands = [range(*ends) for ends in zip(firsts, [*firsts[1:], height], strict=True)]
    rows, columns = _overlaps(height, scaled), _overlaps(width, scaled)

    def block(one: range, other: range) -> Tensor:
        part = rows[:, :, one.start : one.stop, other.start : other.stop]
        entries = _entries(scaled, part, columns)  # (C, C, rows, rows', W, W)
        return entries.permute(0, 2, 4, 1, 3, 5).reshape(len(scaled[0]) * len(one) * width, -1)

    diagonals = [block(one, one) for one in bands]
    return diagonals, [block(one, other) for one, other in pairwise(bands)]


def _overlaps(length: int, scaled: Tensor) -> Tensor:
    """On a mirrored line, at how many places do entries a and b of a kernel see pixels p and q: (K, K, P, P)."""
    return _OVERLAPS[length, scaled.shape[-1]].like(scaled)


def _made_overlaps(key: tuple[int, int]) -> Tensor:
    length, size = key
    source = mirrored_source(length, size, torch.device("cpu"))
    seen = torch.zeros(length, size, length, dtype=torch.float64)
    for entry in range(size):
        seen[torch.arange(length), entry, source[entry : entry + length]] = 1.0
    return torch.einsum("xap,xbq->abpq", seen, seen)


_OVERLAPS = ConstantsByKey(_made_overlaps, kept=4)


def _entries(scaled: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The entries of CᵀC between pixels, (C, C, P, P', Q, Q'), from what ``_overlaps`` gives for both directions."""
    return torch.einsum("jcau,jdbv,abpq,uvrs->cdpqrs", scaled, scaled, rows, columns)


def _remainder(scaled: Tensor, shape: Sequence[int], limit: int) -> Tensor:
    """s, zero where no side is longer than ``limit``."""
    size, sides = scaled.shape[-1], shape[1:]
    if max(sides) <= limit:
        return torch.zeros((), dtype=torch.float64, device=scaled.device)
    lines = [_Line.of(whole, size, limit) for whole in sides]
    parts = [_overlaps(line.side, scaled)[:, :, line.places] for line in lines]
    kept = [line.kept.to(scaled) for line in lines]
    entries = _entries(scaled, *parts).flatten(0, 1).unflatten(0, (shape[0], shape[0])).abs()
    lost = 1 - kept[0][:, :, None, None] * kept[1]
    return (_block_norms(entries) * lost).sum((1, 3)).max() * (1 + 1e-9)


@dataclass(frozen=True)
class _Line:
    """One direction of the image on which s is found: its side, the places p that differ for M, and A(p − q)."""

    side: int
    places: list[int]
    kept: Tensor

    @classmethod
    def of(cls, whole: int, size: int, limit: int) -> _Line:
        side = min(whole, 3 * size)
        places = _classes(side, size)
        lags = _autocorrelation(limit - 2 * (size // 2), side) if whole > limit else torch.ones(side)
        distance = (torch.arange(side) - torch.tensor(places).unsqueeze(1)).abs()
        return cls(side, places, lags[distance])


def local_norm(product: Product, size: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """An upper bound of ‖M‖ on images of ``shape``, with `lanczos` as above, where only products with M are known.

    M = CᵀC has a norm near 1, couples pixels closer than ``size``, and C sees ``size`` pixels in each direction, half
    of them on each side. ``product`` receives images in float32 or float64.
    """
    limit = standing_side(size)
    small = (shape[0], *(min(side, limit) for side in shape[1:]))
    if math.prod(small) <= _DENSE:
        identity = torch.eye(math.prod(small), dtype=torch.float64, device=device).view(-1, *small)
        return torch.linalg.eigvalsh(product(identity).flatten(1))[-1] * (1 + 1e-10)
    bound = _above(_largest_ritz(product, small, device).double())
    return bound if max(shape[1:]) <= limit else bound + _remainder_of(product, size, shape, device)


def _remainder_of(product: Product, size: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """s from the products of M with single pixels, those of one row at a time."""
    rows, columns = (_Line.of(whole, size, standing_side(size)) for whole in shape[1:])
    kept = columns.kept.to(device).unsqueeze(1)
    places = torch.tensor(columns.places, device=device).repeat(shape[0])
    channel = torch.arange(shape[0], device=device).repeat_interleave(len(columns.places))
    worst = torch.zeros((), device=device)
    for row, kept_in_rows in zip(rows.places, rows.kept.to(device), strict=True):
        pixels = torch.zeros(len(places), shape[0], rows.side, columns.side, device=device)
        pixels[torch.arange(len(places), device=device), channel, row, places] = 1
        blocks = product(pixels).abs().unflatten(0, (shape[0], -1)).transpose(1, 2)
        lost = 1 - kept_in_rows.view(-1, 1) * kept
        worst = torch.maximum(worst, (_block_norms(blocks) * lost).sum((1, 2)).max())
    return worst.double() * (1 + _ROUNDING)


def _classes(side: int, size: int) -> list[int]:
    """Positions on a line that differ for M: those near its ends, and one for all others."""
    if side < 3 * size:
        return list(range(side))
    return [*range(size - 1), side // 2, *range(side - size + 1, side)]


def _block_norms(blocks: Tensor) -> Tensor:
    """Bounds of the spectral norms of blocks of absolute values (C, C, …)."""
    frobenius = torch.linalg.vector_norm(blocks, dim=(0, 1))
    return torch.minimum(frobenius, (blocks.sum(0).amax(0) * blocks.sum(1).amax(0)).sqrt())


def _autocorrelation(length: int, side: int) -> Tensor:
    """A(0), …, A(side − 1) of the sine window of ``length`` pixels with norm 1."""
    window = torch.sin(math.pi * (torch.arange(length, dtype=torch.float64) + 1) / (length + 1))
    window = window / window.norm()
    lags = [window[: length - lag] @ window[lag:] if lag < length else torch.zeros(()) for lag in range(side)]
    return torch.stack([torch.as_tensor(lag, dtype=torch.float64) for lag in lags])
