"""A line search for a batch: every sample finds its own step length α along its own direction d.

    h(x + αd) ≤ h(x) + c α⟨∇h(x), d⟩        (sufficient decrease)
    ⟨∇h(x + αd), d⟩ ≥ σ⟨∇h(x), d⟩           (sufficient length)

Near the minimiser the difference of two energies is lost to rounding. A decrease is therefore also accepted if
gradients prove it: for convex h, ⟨∇h(x + αd), d⟩ ≤ c⟨∇h(x), d⟩ implies the first inequality; and where
the energies agree within rounding, the slope may have changed sign but not grown (Hager & Zhang's approximate Wolfe
condition). Trials are secant steps on the slope, kept inside the bracket.

Reference: Hager & Zhang, *A new conjugate gradient method with guaranteed descent and an efficient line search*, SIAM
J. Optim. 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.plugin import Lower, dot, expand, put, take

#: c and σ above, the allowed growth of the slope where energies agree within rounding, and the maximum number of
#: trials.
_FALL, _CURVATURE, _OVERSHOOT, _TRIALS = 1e-4, 0.9, 0.8, 30


@dataclass(frozen=True)
class Point:
    """x with the energy and the gradient there."""

    x: Tensor
    gradient: Tensor
    energy: Tensor

    @classmethod
    def at(cls, lower: Lower, x: Tensor) -> Point:
        return cls(x, lower.gradient(x), lower.energy(x))


@dataclass(frozen=True)
class _Bracket:
    """Acceptable steps lie between ``low``, which is too short, and ``high``, which is too long; with their slopes."""

    low: Tensor
    high: Tensor
    slope_low: Tensor
    slope_high: Tensor

    def narrowed(self, alpha: Tensor, slope: Tensor, long: Tensor) -> _Bracket:
        return _Bracket(
            torch.where(long, self.low, alpha),
            torch.where(long, alpha, self.high),
            torch.where(long, self.slope_low, slope),
            torch.where(long, slope, self.slope_high),
        )

    def trial(self, slope_start: Tensor) -> Tensor:
        """The zero of the slope by linear interpolation, at least a tenth of the bracket away from its ends."""
        width = self.high - self.low
        inside = self.slope_low / (self.slope_low - self.slope_high)
        inside = torch.where((self.slope_high > 0) & torch.isfinite(inside), inside, 0.5).clamp(0.1, 0.9)
        grown = slope_start / (slope_start - self.slope_low)
        grown = torch.where(self.slope_low > slope_start, grown, 10.0).clamp(2, 10)
        return torch.where(torch.isinf(self.high), grown * self.low, self.low + inside * width)


def line_search(lower: Lower, start: Point, direction: Tensor) -> tuple[Point, Tensor]:
    """The accepted point on x + αd, starting with α = 1, and whether each sample has one; if not, its start."""
    slope_start = dot(start.gradient, direction)
    zero = torch.zeros_like(slope_start)
    infinity = torch.full_like(slope_start, float("inf"))
    bracket = _Bracket(zero, infinity, slope_start, infinity)
    alpha = torch.ones_like(slope_start)
    end = Point.at(lower, start.x + direction)
    for _ in range(_TRIALS):
        slope = dot(end.gradient, direction)
        long = ~_fell(start, end, alpha, slope, slope_start)
        pending = torch.nonzero(long | (slope < _CURVATURE * slope_start)).flatten()
        if not len(pending):
            break
        some, slope_some = take(bracket, pending), slope_start[pending]
        some = some.narrowed(alpha[pending], slope[pending], long[pending])
        bracket = put(bracket, pending, some)
        alpha = alpha.index_put((pending,), some.trial(slope_some))
        x = torch.addcmul(start.x[pending], expand(alpha[pending], direction), direction[pending])
        end = put(end, pending, Point.at(lower.take(pending), x))
    fell = _fell(start, end, alpha, dot(end.gradient, direction), slope_start)
    failed = torch.nonzero(~fell).flatten()
    return put(end, failed, take(start, failed)), fell


def _fell(start: Point, end: Point, alpha: Tensor, slope: Tensor, slope_start: Tensor) -> Tensor:
    """Whether the energy has decreased enough, as far as rounding allows."""
    noise = 10 * torch.finfo(start.energy.dtype).eps * start.energy.abs()
    by_energy = end.energy <= start.energy + _FALL * alpha * slope_start
    by_convexity = slope <= _FALL * slope_start
    by_slope = (end.energy <= start.energy + noise) & (slope <= -_OVERSHOOT * slope_start)
    return by_energy | by_convexity | by_slope
