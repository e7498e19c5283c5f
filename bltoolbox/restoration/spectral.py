"""The spectral preconditioner: ∇²h as if its curvatures were the same at every place.

    P = d |Â(ω)|² + μ_0 + Σ_j α w_j Ĝ_j(ω),        Ĝ_j = ½Re[ĉ_jĉ_j^H(ω₁, ω₂) + ĉ_jĉ_j^H(ω₁, −ω₂)]

Then cosines diagonalise it, up to one C×C block per frequency; exactly where borders are mirrored and kernels are even
or odd in each direction. d and w_j are the mean curvatures of data term and potentials, per sample. The curvatures of
learned potentials are large at flat places and small elsewhere: there the mean is too stiff, and a tenth of it works
best (anything between 0.03 and 0.3 is nearly as good), whereas α = 1 is exact for a quadratic R. So
α = max(0.1, e²), where the evenness e = (Σ_j w_j²)/(Σ_j mean of squares) is 1 for constant curvatures. For the
curvatures of majorants the smallest α is 0.3.

Operator and regularizer offer their parts as ``symbol``; where one of them does not, there is no P. P also gives a
linear estimate of the minimiser, from which cold solves start.

Reference: Chan & Ng, *Conjugate gradient methods for Toeplitz systems*, SIAM Review 1996.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bltoolbox.bilevel.preconditioner import Preconditioner
from bltoolbox.bilevel.tensors import detached, expand, norm
from bltoolbox.restoration.cosines import cosines
from bltoolbox.restoration.small_blocks import inverted

if TYPE_CHECKING:
    from bltoolbox.restoration.image_lower import ImageLower

#: The smallest α for second derivatives, and for curvatures of majorants, which vary less.
_DAMPING, _MAJORANT_DAMPING = 0.1, 0.3
#: How often the linear estimate renews its curvatures.
_ROUNDS = 2
#: The smallest entry of P, relative to the largest, so that its inverse is positive definite in float32, too.
_FLOOR = 1e-4
#: P is worth an application per iteration where the ratio of the largest to the smallest diagonal entry of P⁻¹ is at
#: least this, for second derivatives and for the larger curvatures of majorants; measured, see docs/performance.md.
_PAYS, _MAJORANT_PAYS = 5.5, 10.0


@dataclass(frozen=True)
class Spectral(Preconditioner):
    """P⁻¹ by frequency, in the order of the cosine transform, (B, C, C, *order), and for which samples it is used: for
    all if that is None."""

    inverse: Tensor
    used: Tensor | None
    height: int
    width: int

    def apply(self, r: Tensor) -> Tensor:
        plan = cosines(self.height, self.width, r.device)
        return plan.inverse(plan.mixed(self.inverse, plan.transform(r)))

    def renewed(self, newer: Spectral) -> Spectral:
        if self.used is None:
            return newer
        return replace(
            newer,
            inverse=torch.where(expand(self.used, newer.inverse), newer.inverse, self.inverse),
            used=self.used,
        )


def spectral(
    lower: ImageLower,
    prior: Tensor,
    data: Tensor | float,
    always: bool = False,
    shift: Tensor | float = 0.0,
    majorant: bool = False,
) -> Spectral | None:
    """P for curvatures of the potentials (B, …, H', W') and of the data term; None if there is no symbol.

    They are second derivatives or, if ``majorant``, those of parabolas. Unless ``always``, P = I for samples where it
    would hardly pay, and None where there is no other. ``shift`` is a further multiple of the identity, for all samples
    or one each.
    """
    at, regularizer, (_, height, width) = lower.at, lower.problem.regularizer, lower.at.shape
    if at.extra or at.operator_symbol is None or (regularizer.cheap and not always):
        return None
    means = damped_mean(prior, _MAJORANT_DAMPING if majorant else _DAMPING)
    blocks = regularizer.symbol(lower.prior_theta, means, at.shape)
    if blocks is None:
        return None
    diagonal = blocks.diagonal(dim1=1, dim2=2)  # a view (B, H, W, C)
    diagonal.add_(_place_independent(lower, data, shift, at.operator_symbol.like(blocks)).unsqueeze(-1))
    diagonal.add_(diagonal.amax((1, 2, 3), keepdim=True), alpha=_FLOOR)
    inverse = inverted(cosines(height, width, blocks.device).arrange(blocks))
    if always:
        return Spectral(inverse, None, height, width)
    gains = inverse.diagonal(dim1=1, dim2=2).flatten(1)
    used = gains.amax(1) >= (_MAJORANT_PAYS if majorant else _PAYS) * gains.amin(1)
    if not bool(used.any()):
        return None
    identity = torch.eye(inverse.shape[1], dtype=inverse.dtype, device=inverse.device)
    identity = identity.view(*identity.shape, *(1,) * (inverse.ndim - 3))
    return Spectral(torch.where(expand(used, inverse), inverse, identity), used, height, width)


def _place_independent(
    lower: ImageLower, data: Tensor | float, shift: Tensor | float, symbol: Tensor
) -> Tensor:
    """d |Â|² + μ_0 + shift, (1 or B, H, W)."""
    if isinstance(data, Tensor):
        symbol = expand(data.flatten(1).mean(1).clamp_min(0), symbol.unsqueeze(0)) * symbol
    elif data != 1.0:
        symbol = max(data, 0.0) * symbol
    if isinstance(shift, Tensor):
        symbol = symbol + expand(shift.to(symbol.dtype), symbol.unsqueeze(0))
    elif shift:
        symbol = symbol + shift
    if lower.ridge:
        symbol = symbol + lower.ridge
    return symbol if symbol.ndim == 3 else symbol.unsqueeze(0)


def linear_estimate(lower: ImageLower) -> Tensor:
    """x₀ = P⁻¹Aᵀ(d y), P with the majorising curvatures at the start, and again with those at that x₀.

    The start itself where D is not quadratic or there is no P. Costs as much as a gradient or two.
    """
    start, composite, term = lower.start(), lower.composite(), lower.problem.data_term
    if composite is None or not term.quadratic or lower.problem.regularizer.cheap:
        return start
    # What depends on θ alone is prepared by now, and stays differentiable.
    with detached():
        # ∇D at t = 0 is −d y, whatever the weights and the background of the data term.
        right = -lower.backward(term.gradient(lower.data_theta, torch.zeros_like(lower.y), lower.y))
        x, offset = start, lower.problem.regularizer.offset(lower.prior_theta)
        for _ in range(_ROUNDS):
            _, (prior, data) = composite.touch(composite.forward(x))
            weights = torch.as_tensor(prior)
            preconditioner = spectral(lower, weights, data, always=True, majorant=True)
            if preconditioner is None:
                return start
            x = preconditioner.apply(right if offset is None else right + _pull(lower, weights, offset))
        # Where P is the identity but for its floor and rounding, the start is exact and x is not: a loss of zero stays
        # zero.
        same = norm(x - start) <= 2 * _FLOOR * norm(start)
        x = torch.where(expand(same, x), start, x)
    lower.counter.gradients += len(x)
    return lower.project(x)


def _pull(lower: ImageLower, weights: Tensor, offset: Tensor) -> Tensor:
    """CᵀW t_0."""
    return lower.problem.regularizer.synthesise(lower.prior_theta, weights * offset, lower.shape)


def damped_mean(curvature: Tensor, damping: float) -> Tensor:
    """α w: means over the places of curvatures (B, …, H', W'), not negative, times α ≥ ``damping`` of each sample."""
    mean = curvature.mean((-2, -1)).clamp_min(0)
    # The root of the evenness, but for the number of places.
    ratio = norm(mean) / norm(curvature).clamp_min(torch.finfo(mean.dtype).tiny)
    places = curvature.shape[-2] * curvature.shape[-1]
    return expand(ratio.pow(4).mul_(places**2).clamp_(damping, 1.0), mean) * mean
