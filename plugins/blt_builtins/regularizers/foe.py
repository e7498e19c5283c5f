"""Field of Experts: learned filters under a smoothed absolute value.

    R_θ(x) = e^{θ_0} Σ_j e^{θ_j} Σ_p φ_ν((c_j ⋆ x)_p),        φ_ν(t) = √(t² + ν²) − ν

Convex in x. Parameters: the kernels c_j (zero mean in each channel), the log-weights θ_j, the log-scale θ_0 and
log ν, one for all filters (ten 7×7 filters on three channels: 1482 numbers, the paper's d) or one per filter.
Gradient and Hessian products are analytic: two convolutions each, with the curvature φ''(c_j ⋆ x) computed once per
linearisation. The Lipschitz constant is certified; at mirrored borders, from 64×64 pixels on, up to a probability of
1e-10 (``mirrored_norm``).

A kernel is stored as its coefficients κ in a scaled basis, c = Σ_{a,u,v} s_uv κ_auv (colour axis a) ⊗ (cosine u, v)
with s_uv = max(1, √(u²+v²))/3: the same model, in coordinates in which a plain gradient step changes fine detail
faster than a ramp. `basis: pixel` stores the kernel itself.

When to choose it: the paper's regularizer, and the standard choice for learning from images. On small crops the
boundary rule matters: `valid` leaves a frame of K/2 pixels hardly regularised, for which training tries to compensate;
`symmetric` is the better model, and `periodic` is nearly as good, with a smaller Lipschitz constant.

References: Roth & Black, *Fields of Experts*, IJCV 2009; Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning
with inexact stochastic gradients*, 2024; Chen, Ranftl & Pock, *Insights into analysis operator learning*, IEEE TIP
2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from blt_builtins.regularizers.filter_constants import Bank, bank_constants
from blt_builtins.regularizers.filters import (
    Analysis,
    Boundary,
    FilterBank,
    FilterHessian,
    correlation_gradients,
    extend,
    too_large,
    unit_norm,
    zero_mean,
)
from blt_builtins.regularizers.mirrored_norm import lipschitz_bound
from bltoolbox.plugin import Constants, ConstantsByKey, Potentials, Regularizer, Theta

#: Initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
Start = Literal["differences", "dct", "random"]


class FieldOfExperts(Regularizer):
    """Learned filters under a smoothed absolute value.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        smoothing: one ν shared by all filters, or one per filter.
        nu: initial smoothing ν.
        weight: initial weight e^{θ_0 + θ_j} of a filter of unit norm.
        start: initial kernels: finite differences in the colour axes, the smoothest cosines, or Gaussian noise.
        basis: coordinates of the kernels, scaled cosines or pixels.
        least_nu: the smallest ν that training may choose. Below half a step of 8 bits or so, a smaller one hardly
            changes images, but costs iterations.
    """

    def __init__(
        self,
        filters: Annotated[int, Gt(0), Le(4096)] = 10,
        kernel_size: Annotated[int, Ge(2), Le(63)] = 7,
        boundary: Boundary = "symmetric",
        smoothing: Literal["shared", "per-filter"] = "shared",
        nu: Annotated[float, Gt(0)] = 0.01,
        weight: Annotated[float, Gt(0)] = 0.04,
        start: Start = "differences",
        basis: Literal["dct", "pixel"] = "dct",
        least_nu: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        if least_nu > nu:
            raise ValueError(f"least_nu {least_nu:g} is larger than the initial nu {nu:g}; use at most that")
        self.filters = filters
        self.kernel_size = kernel_size
        self.boundary: Boundary = boundary
        self.smoothing = smoothing
        self.nu = nu
        self.weight = weight
        self.start = start
        self.basis = basis
        self.least_nu = least_nu

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        kernels = initial_kernels(self.start, self.filters, shape[0], self.kernel_size, generator)
        count = self.filters if self.smoothing == "per-filter" else 1
        return {
            "kernels": kernels if self.basis == "pixel" else to_scaled_basis(kernels),
            "log_weights": torch.zeros(self.filters, dtype=torch.float64),
            "log_scale": torch.full((1,), math.log(self.weight), dtype=torch.float64),
            "log_smoothing": torch.full((count,), math.log(self.nu), dtype=torch.float64),
        }

    def kernels(self, theta: Theta) -> Tensor:
        """c_j in pixels, (J, C, K, K)."""
        stored = theta["kernels"]
        return stored if self.basis == "pixel" else from_scaled_basis(stored)

    def check(self, shape: Sequence[int]) -> str | None:
        return too_large(self.kernel_size, shape)

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        form = self._form(theta)
        return form.of.potential(form.bank.correlate(x)).sum((1, 2, 3))

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        form = self._form(theta)
        return form.of.potential(form.bank.correlate(x)).sum(1)

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        form = self._form(theta)
        t = form.bank.correlate(x)
        return form.bank.adjoint(form.of.weights(t).mul_(t), x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        form = self._form(theta)
        return FilterHessian(form.bank, tuple(x.shape[1:]), form.of.curvature(form.bank.correlate(x)))

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        form = self._form(theta)
        t, t_q = form.bank.correlate(torch.cat([x, q])).chunk(2)
        return (form.of.weights(t) * t * t_q).sum((1, 2, 3))

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        kernels, nu_squared, a = self.kernels(theta), _nu_squared(theta), amplitudes(theta)
        x, q = (extend(image, self.kernel_size, self.boundary) for image in (x, q))
        bank = FilterBank(kernels, "valid")
        t, t_q = bank.correlate(x), bank.correlate(q)
        root = torch.addcmul(nu_squared, t, t).rsqrt_()
        slope, curvature = t * root, nu_squared * root.pow(3)
        by_weight = (slope * t_q).sum((2, 3)) * a
        # ν ∂φ'/∂ν = −t φ''
        curved = curvature * t_q
        by_smoothing = (t * curved).sum((2, 3)) * -a
        by_kernel = correlation_gradients(_maps(a) * curved, x, self.kernel_size)
        by_kernel = by_kernel + correlation_gradients(_maps(a) * slope, q, self.kernel_size)
        if self.basis == "dct":
            by_kernel = _to_basis(by_kernel) * _scales(kernels)
        shared = theta["log_smoothing"].numel() == 1
        return {
            "kernels": by_kernel,
            "log_weights": by_weight,
            "log_scale": by_weight.sum(1, keepdim=True),
            "log_smoothing": by_smoothing.sum(1, keepdim=True) if shared else by_smoothing,
        }

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        weights = amplitudes(theta) / theta["log_smoothing"].exp()
        return lipschitz_bound(self.kernels(theta), weights, self.boundary, shape)

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        bank = Bank(
            self.kernels(theta),
            amplitudes(theta),
            theta["log_smoothing"].exp().expand(self.filters),
            self.boundary,
            stretch=1.0 if self.basis == "pixel" else float(_scales(theta["kernels"]).max()),
            shared=theta["log_smoothing"].numel() == 1,
        )
        return bank_constants(bank, x, radius)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        theta = self.project_gradient(theta)
        if self.least_nu:
            theta["log_smoothing"] = theta["log_smoothing"].clamp_min(math.log(self.least_nu))
        return theta

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        without_mean = zero_mean if self.basis == "pixel" else without_constants
        return dict(gradient) | {"kernels": without_mean(gradient["kernels"])}

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return self._form(theta).bank.correlate(x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return self._form(theta).bank.adjoint(t, shape)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return self._form(theta).of.weights(t)

    def pointwise_majorant(self, theta: Theta) -> Callable[[Tensor], Tensor] | None:
        return self._form(theta).of.weights

    def potential(self, theta: Theta, t: Tensor) -> Tensor:
        return self._form(theta).of.potential(t)

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        return self._form(theta).bank.symbol(curvature, shape)

    def pictures(self, theta: Theta) -> Tensor:
        return self.kernels(theta)[self._importance(theta).argsort(descending=True)]

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        nu = theta["log_smoothing"].exp().expand(self.filters)[order].unsqueeze(1)
        t = torch.linspace(-10, 10, 201, dtype=nu.dtype, device=nu.device) * nu.max()
        values = ((t.square() + nu.square()).sqrt() - nu) * amplitudes(theta)[order].unsqueeze(1)
        return Potentials(t, values, importance)

    def _importance(self, theta: Theta) -> Tensor:
        """The weight of each filter if its kernel had unit norm."""
        return amplitudes(theta) * self.kernels(theta).flatten(1).norm(dim=1)

    def prepare(self, theta: Theta) -> Theta:
        return Prepared(theta, self._normal_form(theta))

    def _form(self, theta: Theta) -> NormalForm:
        return theta.form if isinstance(theta, Prepared) else self._normal_form(theta)

    def _normal_form(self, theta: Theta) -> NormalForm:
        a = amplitudes(theta)
        bank = FilterBank(self.kernels(theta) * a.view(-1, 1, 1, 1), self.boundary)
        return NormalForm(bank, SmoothedAbs(theta["log_smoothing"].exp() * a))


#: Number of image sizes for which planes are kept.
_SIZES = 4


@dataclass(frozen=True)
class Planes:
    """One value per filter, to be combined with responses (B, J, H, W)."""

    values: Tensor

    def at(self, t: Tensor) -> Tensor:
        """(1, J, H, W): repeated at every pixel, since one factor per channel is slow to broadcast where channels are
        innermost."""
        size = tuple(t.shape[2:])
        made = self._made.get(size)
        if made is None:
            made = self.values.expand(1, *size, -1).contiguous().permute(0, 3, 1, 2)
            if len(self._made) >= _SIZES:  # pictures and tiles have many different sizes
                self._made.clear()
            self._made[size] = made
        return made

    @cached_property
    def _made(self) -> dict[tuple[int, ...], Tensor]:
        return {}


@dataclass(frozen=True)
class SmoothedAbs:
    """φ_ν(t) = √(t² + ν²) − ν with one ν per filter; every result is a new tensor, differentiable in ν."""

    nu: Tensor

    def potential(self, t: Tensor) -> Tensor:
        return (t.square() + self._squares.at(t)).sqrt() - _maps(self.nu)

    def weights(self, t: Tensor) -> Tensor:
        """φ'(t)/t = 1/√(t² + ν²)."""
        return torch.addcmul(self._squares.at(t), t, t).rsqrt_()

    def curvature(self, t: Tensor) -> Tensor:
        """φ''(t) = ν²/√(t² + ν²)³."""
        root = self.weights(t)
        return torch.mul(root, self._squares.at(t)).mul_(root).mul_(root)

    @cached_property
    def _squares(self) -> Planes:
        return Planes(self.nu.square())


class Potential(Protocol):
    """An even function of each response, with its derivative divided by t (the weights) and its second derivative."""

    def potential(self, t: Tensor) -> Tensor: ...

    def weights(self, t: Tensor) -> Tensor: ...

    def curvature(self, t: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class NormalForm:
    """R = Σ_j Σ_p ψ_j(t) with the weights inside the filters: t = (a_j c_j) ⋆ x; for `foe` ψ_j = φ with ν_j = a_j ν."""

    bank: Analysis
    of: Potential


class Prepared(dict[str, Tensor]):
    """θ with its normal form, which a solve needs twice per iteration."""

    def __init__(self, theta: Theta, form: NormalForm) -> None:
        super().__init__(theta)
        self.form = form


def initial_kernels(
    start: Start, filters: int, channels: int, size: int, generator: torch.Generator
) -> Tensor:
    """Kernels (J, C, K, K) of zero mean and unit norm."""
    if start == "random":
        kernels = torch.randn(filters, channels, size, size, dtype=torch.float64, generator=generator)
    else:
        kernels = (difference_kernels if start == "differences" else cosine_kernels)(filters, channels, size)
    return unit_norm(zero_mean(kernels))


def cosine_kernels(filters: int, channels: int, size: int) -> Tensor:
    """The first ``filters`` products of a cosine of the K×K patch, smoothest first, and a colour axis.

    A bank larger than the basis repeats it; training separates the copies.
    """
    pairs = sorted(
        ((i, j) for i in range(size) for j in range(size) if i + j > 0),
        key=lambda ij: (ij[0] ** 2 + ij[1] ** 2, ij),
    )
    kernels = torch.zeros(filters, channels, size, size, dtype=torch.float64)
    choices = [(axis, i, j) for i, j in pairs for axis in range(channels)]
    for k in range(filters):
        axis, i, j = choices[k % len(choices)]
        kernels[k, axis, i, j] = 1
    return _from_basis(kernels)


def difference_kernels(filters: int, channels: int, size: int) -> Tensor:
    """Finite differences of first and second order in the colour axes, then cosines if more are asked for.

    Six in luminance (horizontal, vertical, the two diagonals, second horizontal and vertical), two in each axis of
    chrominance, all of the smallest support: what a total variation in those axes would use.
    """
    first, diagonal, second = [[-1.0, 1.0]], [[-1.0, 0.0], [0.0, 1.0]], [[1.0, -2.0, 1.0]]
    stencils = [torch.tensor(stencil, dtype=torch.float64) for stencil in (first, diagonal, second)]
    luminance = [stencils[0], stencils[0].T, stencils[1], stencils[1].flip(1), stencils[2], stencils[2].T]
    plan = [(0, stencil) for stencil in luminance if max(stencil.shape) <= size]
    plan += [(axis, stencil) for axis in range(1, channels) for stencil in luminance[:2]]
    colour = _cosine_basis(channels)
    kernels = torch.zeros(len(plan), channels, size, size, dtype=torch.float64)
    for kernel, (axis, stencil) in zip(kernels, plan, strict=True):
        height, width = stencil.shape
        top, left = (size - height) // 2, (size - width) // 2
        kernel[:, top : top + height, left : left + width] = colour[axis].view(-1, 1, 1) * stencil
    more = filters - len(plan)
    return kernels[:filters] if more <= 0 else torch.cat([kernels, cosine_kernels(more, channels, size)])


def from_scaled_basis(stored: Tensor) -> Tensor:
    """Kernels in pixels from their coefficients κ."""
    return _from_basis(stored * _scales(stored))


def to_scaled_basis(kernels: Tensor) -> Tensor:
    """The coefficients κ of kernels in pixels."""
    return _to_basis(kernels) / _scales(kernels)


def without_constants(stored: Tensor) -> Tensor:
    """Coefficients of kernels without their means: without the first cosine in each colour axis."""
    return stored * _VARYING[stored.shape[-1]].like(stored)


def _from_basis(coefficients: Tensor) -> Tensor:
    """Kernels from coefficients of colour axes and cosines, an orthonormal change of coordinates."""
    if _at_once(coefficients):
        products = coefficients.flatten(-3) @ _PRODUCTS[_key(coefficients)].like(coefficients)
        return products.view_as(coefficients)
    colour, space = _bases(coefficients)
    return torch.einsum("...auv,ac,uh,vw->...chw", coefficients, colour, space, space)


def _to_basis(kernels: Tensor) -> Tensor:
    """The inverse of ``_from_basis``, which is its transpose."""
    if _at_once(kernels):
        return (kernels.flatten(-3) @ _PRODUCTS[_key(kernels)].like(kernels).mT).view_as(kernels)
    colour, space = _bases(kernels)
    return torch.einsum("...chw,ac,uh,vw->...auv", kernels, colour, space, space)


def _at_once(kernels: Tensor) -> bool:
    """Whether one product with a matrix of all entries is better than three: on a GPU, where launches count."""
    return kernels.device.type != "cpu" and kernels.shape[-3:].numel() <= _MOST_ENTRIES


def _key(kernels: Tensor) -> tuple[int, int]:
    return kernels.shape[-3], kernels.shape[-1]


def _product_basis(key: tuple[int, int]) -> Tensor:
    """The products of colour axes and cosines, one per row, (C K², C K²)."""
    colour, space = (_cosine_basis(size) for size in key)
    return torch.kron(colour, torch.kron(space, space))


def _bases(like: Tensor) -> tuple[Tensor, Tensor]:
    return _COSINES[like.shape[-3]].like(like), _COSINES[like.shape[-1]].like(like)


def _cosine_basis(size: int) -> Tensor:
    """Orthonormal DCT-II, one vector per row. For three channels: luminance, red minus blue, green against both."""
    k = torch.arange(size, dtype=torch.float64)
    basis = torch.cos(math.pi / size * (k + 0.5) * k.unsqueeze(1))
    return basis / basis.norm(dim=1, keepdim=True)


def _scales(like: Tensor) -> Tensor:
    """s_uv, larger for fine detail."""
    return _SCALES[like.shape[-1]].like(like)


def _scale_table(size: int) -> Tensor:
    k = torch.arange(size, dtype=torch.float64)
    return torch.hypot(k.unsqueeze(1), k).clamp_min(1) / 3


def _varying(size: int) -> Tensor:
    """1 for every cosine but the constant."""
    keep = torch.ones(size, size, dtype=torch.float64)
    keep[0, 0] = 0
    return keep


_COSINES, _SCALES, _VARYING = (ConstantsByKey(make) for make in (_cosine_basis, _scale_table, _varying))
_PRODUCTS = ConstantsByKey(_product_basis)
#: Entries of a kernel up to which the matrix of all products is kept: a megabyte.
_MOST_ENTRIES = 363


def amplitudes(theta: Theta) -> Tensor:
    """a_j = e^{θ_0 + θ_j}."""
    return (theta["log_scale"] + theta["log_weights"]).exp()


def _nu_squared(theta: Theta) -> Tensor:
    return _maps((2 * theta["log_smoothing"]).exp())


def _maps(values: Tensor) -> Tensor:
    """One value a filter (or one for all), shaped to multiply responses (B, J, H, W)."""
    return values.view(1, -1, 1, 1)
