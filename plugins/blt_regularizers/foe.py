"""Field of Experts: learned filters under a smoothed absolute value.

    R_θ(x) = e^{θ_0} Σ_j e^{θ_j} Σ_p φ_ν((c_j ⋆ x)_p),        φ_ν(t) = √(t² + ν²) − ν

Convex in x. Parameters: the kernels c_j (zero mean in each channel), the log-weights θ_j, the log-scale θ_0 and
log ν, one for all filters (ten 7×7 filters on three channels: 1482 numbers, the paper's d) or one a filter.
Gradient and Hessian products are analytic: two convolutions each, the curvature φ''(c_j ⋆ x) computed once a
linearisation; the Lipschitz constant is certified.

When to choose it: the paper's regularizer, and the standard choice for learning on images.

References: Roth & Black, *Fields of Experts*, IJCV 2009; Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning with
inexact stochastic gradients*, 2024; Chen, Ranftl & Pock, *Insights into analysis operator learning*, IEEE TIP 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from blt_regularizers.filters import (
    Boundary,
    correlate,
    correlate_adjoint,
    correlation_gradients,
    extend,
    norm_bound,
)
from bltoolbox.interfaces import Regularizer, Theta


class FieldOfExperts(Regularizer):
    """Learned filters under a smoothed absolute value.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border; `valid` looks only where they fit.
        smoothing: one ν shared by all filters, or one per filter.
        nu: initial smoothing ν.
        weight: initial weight e^{θ_0 + θ_j} of a filter of unit norm.
        start: initial kernels, a cosine basis or Gaussian noise.
    """

    def __init__(
        self,
        filters: Annotated[int, Gt(0)] = 10,
        kernel_size: Annotated[int, Ge(2)] = 7,
        boundary: Boundary = "valid",
        smoothing: Literal["shared", "per-filter"] = "shared",
        nu: Annotated[float, Gt(0)] = 0.01,
        weight: Annotated[float, Gt(0)] = 0.02,
        start: Literal["dct", "random"] = "dct",
    ) -> None:
        self.filters = filters
        self.kernel_size = kernel_size
        self.boundary: Boundary = boundary
        self.smoothing = smoothing
        self.nu = nu
        self.weight = weight
        self.start = start

    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (self.filters, channels, self.kernel_size, self.kernel_size)
        if self.start == "dct":
            kernels = cosine_kernels(*shape[:3])
        else:
            kernels = torch.randn(shape, dtype=torch.float64, generator=generator)
            kernels = kernels - kernels.mean((2, 3), keepdim=True)
            kernels = kernels / kernels.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        count = self.filters if self.smoothing == "per-filter" else 1
        return {
            "kernels": kernels,
            "log_weights": torch.zeros(self.filters, dtype=torch.float64),
            "log_scale": torch.full((1,), math.log(self.weight), dtype=torch.float64),
            "log_smoothing": torch.full((count,), math.log(self.nu), dtype=torch.float64),
        }

    def check(self, shape: Sequence[int]) -> str | None:
        if min(shape[1:]) < self.kernel_size:
            return (
                f"kernel_size {self.kernel_size} is larger than the {shape[1]}×{shape[2]} images;"
                f" use a kernel_size of at most {min(shape[1:])} or larger images"
            )
        return None

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        t, nu = correlate(x, theta["kernels"], self.boundary), _maps(theta["log_smoothing"].exp())
        potential = (t.square() + nu.square()).sqrt() - nu
        return potential.sum((2, 3)) @ _amplitudes(theta)

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = correlate(x, theta["kernels"], self.boundary)
        slope = t.square().add_(_nu_squared(theta)).rsqrt_().mul_(t)
        # The weights a_j ride on the kernels of the adjoint: J·C·K² products instead of J·H·W.
        return correlate_adjoint(slope, _weighted_kernels(theta), self.boundary, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        nu_squared = _nu_squared(theta)
        t = correlate(x, theta["kernels"], self.boundary)
        curvature = t.square().add_(nu_squared).pow_(-1.5).mul_(nu_squared)
        return _Hessian(
            theta["kernels"], _weighted_kernels(theta), self.boundary, tuple(x.shape[1:]), curvature
        )

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t, t_q = correlate(torch.cat([x, q]), theta["kernels"], self.boundary).chunk(2)
        slope = t * torch.rsqrt(t.square() + _nu_squared(theta))
        return (slope * t_q).sum((2, 3)) @ _amplitudes(theta)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        kernels, nu_squared, a = theta["kernels"], _nu_squared(theta), _amplitudes(theta)
        x, q = (extend(image, self.kernel_size, self.boundary) for image in (x, q))
        t, t_q = correlate(x, kernels, "valid"), correlate(q, kernels, "valid")
        root = torch.rsqrt(t.square() + nu_squared)
        slope, curvature = t * root, nu_squared * root.pow(3)
        by_weight = (slope * t_q).sum((2, 3)) * a
        # ν ∂φ'/∂ν = −t φ''
        by_smoothing = -(t * curvature * t_q).sum((2, 3)) * a
        by_kernel = correlation_gradients(_maps(a) * curvature * t_q, x, self.kernel_size)
        by_kernel = by_kernel + correlation_gradients(_maps(a) * slope, q, self.kernel_size)
        shared = theta["log_smoothing"].numel() == 1
        return {
            "kernels": by_kernel,
            "log_weights": by_weight,
            "log_scale": by_weight.sum(1, keepdim=True),
            "log_smoothing": by_smoothing.sum(1, keepdim=True) if shared else by_smoothing,
        }

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        weights = _amplitudes(theta) / theta["log_smoothing"].exp()
        return norm_bound(theta["kernels"], weights, self.boundary, shape)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self.project_gradient(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        kernels = gradient["kernels"]
        return dict(gradient) | {"kernels": kernels - kernels.mean((2, 3), keepdim=True)}

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return correlate(x, theta["kernels"], self.boundary)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return correlate_adjoint(t, theta["kernels"], self.boundary, shape)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return t.square().add_(_nu_squared(theta)).rsqrt_().mul_(_maps(_amplitudes(theta)))

    def pictures(self, theta: Theta) -> Tensor:
        kernels = theta["kernels"]
        importance = _amplitudes(theta) * kernels.flatten(1).norm(dim=1)
        return kernels[importance.argsort(descending=True)]


@dataclass(frozen=True)
class _Hessian:
    """v ↦ Σ_j a_j C_jᵀ[φ''(C_j x) ⊙ C_j v], the curvature kept."""

    kernels: Tensor
    weighted: Tensor
    boundary: Boundary
    shape: tuple[int, ...]
    curvature: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        t = correlate(v, self.kernels, self.boundary).mul_(self.curvature)
        return correlate_adjoint(t, self.weighted, self.boundary, self.shape)

    def take(self, index: Tensor) -> _Hessian:
        return _Hessian(self.kernels, self.weighted, self.boundary, self.shape, self.curvature[index])


def cosine_kernels(filters: int, channels: int, size: int) -> Tensor:
    """The first ``filters`` products of a cosine basis of the K×K patch without its constant, and one of the channels.

    Ordered by spatial frequency within each colour direction, the colour directions (mean first, then
    differences) taking turns.
    """
    space = _cosine_basis(size)
    atoms = sorted(
        ((i, j) for i in range(size) for j in range(size) if i + j > 0),
        key=lambda ij: (ij[0] ** 2 + ij[1] ** 2, ij),
    )
    colour = _cosine_basis(channels)
    kernels = [
        torch.einsum("c,h,w->chw", colour[c], space[i], space[j]) for i, j in atoms for c in range(channels)
    ]
    # A bank larger than the basis repeats it; the weights and the data tell the copies apart.
    return torch.stack([kernels[k % len(kernels)] for k in range(filters)])


def _cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II, one vector a row."""
    k = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (k + 0.5) * k.unsqueeze(1))
    return basis / basis.norm(dim=1, keepdim=True)


def _amplitudes(theta: Theta) -> Tensor:
    """a_j = e^{θ_0 + θ_j}."""
    return (theta["log_scale"] + theta["log_weights"]).exp()


def _weighted_kernels(theta: Theta) -> Tensor:
    return theta["kernels"] * _amplitudes(theta).view(-1, 1, 1, 1)


def _nu_squared(theta: Theta) -> Tensor:
    return _maps((2 * theta["log_smoothing"]).exp())


def _maps(values: Tensor) -> Tensor:
    """One value a filter (or one for all), shaped to multiply responses (B, J, H, W)."""
    return values.view(1, -1, 1, 1)
