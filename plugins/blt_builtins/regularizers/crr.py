"""Convex ridge regularizer: learned filters under learned convex potentials.

    R_θ(x) = Σ_j Σ_p ψ_j((c_j ⋆ x)_p),        ψ_j'(t) = e^{θ_0} ∫_0^t s_j(τ) dτ,   s_j = e^{θ_jm} on interval m

Each ψ_j' is a linear spline with equidistant knots on [−range, range]: increasing, zero at zero, constant
beyond, so ψ_j is convex with its minimum at 0 and grows linearly beyond the range. Parameters: kernels c_j (zero
mean in each channel; their norm is the scale of t), log-slopes θ_jm and the common log-scale θ_0. With `symmetry: odd`
the slopes at −t equal those at t. The initial filters are those of `foe`, and the initial spline
interpolates its potential with ν equal to one interval.

The paper clips negative slopes. Here slopes are exponentials: every θ is admissible, and f stays differentiable in θ
(with clipping it has only one-sided derivatives at zero slopes, which matter most). Since the slopes of a learned
potential span orders of magnitude, multiplicative steps suit them better than additive ones. A slope of exactly 0 is
never reached, only approached.

ψ_j is C^{1,1} but not C²: Hessian products use the slope of the interval, which is the second derivative except at the
knots, and ∇²R has no Lipschitz constant, so error bounds of hypergradients are estimated, never certified. The
Lipschitz constant of ∇R is certified, from the largest slopes. There are no majorant weights: the parabola of curvature
ψ'(t)/t lies above ψ only if ψ'(t)/t decreases in |t|, and a convex spline may get steeper; so use `agd`, not `mm`.

When to choose it: where the shape of the potential matters, at the cost of two table lookups per response.

Reference: Goujon, Neumayer, Bohra, Ducotterd & Unser, *A neural-network-based convex regularizer for inverse problems*,
IEEE TCI 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.filters import (
    Boundary,
    FilterBank,
    FilterHessian,
    too_large,
    unit_norm,
    zero_mean,
)
from blt_builtins.regularizers.foe import difference_kernels
from blt_builtins.regularizers.mirrored_norm import lipschitz_bound
from bltoolbox.plugin import Potentials, Regularizer, Theta


class ConvexRidge(Regularizer):
    """Learned filters under learned convex splines.

    Args:
        filters: number J of filters.
        kernel_size: side K of the square kernels.
        boundary: what the filters see beyond the border: nothing, since they are applied only where they fit
            (`valid`), zeros, the opposite border, or the mirrored image (`symmetric`).
        knots: number of knots of ψ' on [−range, range]; odd, so that 0 is one of them.
        range: where the spline ends and ψ' becomes constant.
        symmetry: whether ψ is even (ψ' odd), or free to differ for positive and negative responses.
        weight: initial limit of ψ_j', comparable with the weight of `foe`.
    """

    def __init__(
        self,
        filters: Annotated[int, Gt(0), Le(4096)] = 10,
        kernel_size: Annotated[int, Ge(2), Le(63)] = 7,
        boundary: Boundary = "symmetric",
        knots: Annotated[int, Ge(3)] = 21,
        range: Annotated[float, Gt(0)] = 0.1,
        symmetry: Literal["odd", "free"] = "odd",
        weight: Annotated[float, Gt(0)] = 0.04,
    ) -> None:
        if knots % 2 == 0:
            raise ValueError(f"knots {knots} is even; use an odd number, so that 0 is a knot")
        self.filters = filters
        self.kernel_size = kernel_size
        self.boundary: Boundary = boundary
        self.knots = knots
        self.range = range
        self.symmetry = symmetry
        self.weight = weight

    @property
    def spacing(self) -> float:
        """Δ, the length of an interval."""
        return 2 * self.range / (self.knots - 1)

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        position = torch.arange((self.knots + 1) // 2, dtype=torch.float64)
        values = position / (position.square() + 1).sqrt()  # φ'(mΔ) for ν = Δ
        log_slopes = (values.diff() / self.spacing).log()
        if self.symmetry == "free":
            log_slopes = torch.cat([log_slopes.flip(0), log_slopes])
        kernels = difference_kernels(self.filters, shape[0], self.kernel_size)
        return {
            "kernels": unit_norm(kernels),
            "log_slopes": log_slopes.repeat(self.filters, 1),
            "log_scale": torch.full((1,), math.log(self.weight), dtype=torch.float64),
        }

    def check(self, shape: Sequence[int]) -> str | None:
        return too_large(self.kernel_size, shape)

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self._spline(theta).potential(self._bank(theta).correlate(x)).sum((1, 2, 3))

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        bank = self._bank(theta)
        return bank.adjoint(self._spline(theta).derivative(bank.correlate(x)), x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        bank = self._bank(theta)
        curvature = self._spline(theta).curvature(bank.correlate(x))
        return FilterHessian(bank, tuple(x.shape[1:]), curvature)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t, t_q = self._bank(theta).correlate(torch.cat([x, q])).chunk(2)
        return (self._spline(theta).derivative(t) * t_q).sum((1, 2, 3))

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        steepest = (theta["log_scale"] + theta["log_slopes"].amax(1)).exp()
        return lipschitz_bound(theta["kernels"], steepest, self.boundary, shape)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self.project_gradient(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return dict(gradient) | {"kernels": zero_mean(gradient["kernels"])}

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor:
        return self._bank(theta).symbol(curvature, shape)

    def pictures(self, theta: Theta) -> Tensor:
        return theta["kernels"][self._importance(theta).argsort(descending=True)]

    def potentials(self, theta: Theta) -> Potentials:
        importance, order = self._importance(theta).sort(descending=True)
        reach = 1.25 * self.range
        t = torch.linspace(-reach, reach, 201, dtype=importance.dtype, device=importance.device)
        responses = t.view(1, 1, 1, -1).expand(1, self.filters, 1, -1)
        return Potentials(t, self._spline(theta).potential(responses)[0, order, 0], importance)

    def _importance(self, theta: Theta) -> Tensor:
        """The limit of ψ_j' if the kernel of the filter had unit norm."""
        slopes = (theta["log_scale"] + theta["log_slopes"]).exp().sum(1)
        limit = slopes * self.spacing * (1.0 if self.symmetry == "odd" else 0.5)
        return limit * theta["kernels"].flatten(1).norm(dim=1)

    def _bank(self, theta: Theta) -> FilterBank:
        return FilterBank(theta["kernels"], self.boundary)

    def _spline(self, theta: Theta) -> Spline:
        slopes = (theta["log_scale"] + theta["log_slopes"]).exp()
        if self.symmetry == "odd":
            slopes = torch.cat([slopes.flip(1), slopes], dim=1)
        return Spline.of(slopes, self.spacing)


@dataclass(frozen=True)
class Spline:
    """ψ_j with piecewise constant ψ_j'', by tables (J, 2M + 2) of values at the inner end of each interval.

    The inner end is the one next to 0: sums run outwards, so small responses keep their relative precision. The
    first and the last interval are unbounded and have curvature 0.
    """

    spacing: float
    values: Tensor
    slopes: Tensor
    curvatures: Tensor

    @classmethod
    def of(cls, curvatures: Tensor, spacing: float) -> Spline:
        """From ψ_j'' on the 2M bounded intervals, (J, 2M), with ψ_j(0) = ψ_j'(0) = 0."""
        flat = torch.zeros_like(curvatures[:, :1])
        curvatures = torch.cat([flat, curvatures, flat], dim=1)
        slopes = _outwards(curvatures * spacing)
        values = _outwards((slopes + curvatures * (spacing / 2)) * spacing)
        left, right = slopes.chunk(2, dim=1)
        return cls(spacing, values, torch.cat([-left, right], dim=1), curvatures)

    def potential(self, t: Tensor) -> Tensor:
        """ψ_j(t_j) of responses (B, J, H, W)."""
        index, rest = self._locate(t)
        linear = _look_up(self.values, index) + _look_up(self.slopes, index) * rest
        return linear + 0.5 * _look_up(self.curvatures, index) * rest.square()

    def derivative(self, t: Tensor) -> Tensor:
        """ψ_j'(t_j)."""
        index, rest = self._locate(t)
        return _look_up(self.slopes, index) + _look_up(self.curvatures, index) * rest

    def curvature(self, t: Tensor) -> Tensor:
        """ψ_j''(t_j); at a knot, the value to its right."""
        return _look_up(self.curvatures, self._locate(t)[0])

    def _locate(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of each response, and its signed distance from the inner end."""
        middle = self.curvatures.shape[1] // 2
        interval = (t.detach() / self.spacing).floor().clamp(-middle, middle - 1)
        inner = torch.where(interval < 0, interval + 1, interval) * self.spacing
        return interval.long() + middle, t - inner


def _outwards(increments: Tensor) -> Tensor:
    """Sums of the increments of all intervals between 0 and the inner end of each."""
    left, right = increments.chunk(2, dim=1)

    def before(steps: Tensor) -> Tensor:
        return F.pad(steps.cumsum(1)[:, :-1], (1, 0))

    return torch.cat([before(left.flip(1)).flip(1), before(right)], dim=1)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """table[j, index[b, j, h, w]]."""
    filters, width = table.shape
    offset = torch.arange(filters, device=table.device).view(1, -1, 1, 1) * width
    return table.flatten()[index + offset]
