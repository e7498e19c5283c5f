"""Error bounds of hypergradients.

With ε the distance of x̃ to the minimiser, δ the residual norm of the adjoint system and μ the strong convexity,

    τ = ‖q‖ + δ/μ,   κ = (ε/μ)(L_g + L_H τ),   ‖z_i − ∇f_i‖ ≤ ω_i = ‖B‖(δ/μ + κ) + L_B ε(τ + κ)

B = ∂²_{xθ}h(x̃), L_H and L_B the Lipschitz constants of ∇²h and of B in x.

*Estimated*: L_H and L_B by the change of ∇²h q and Bᵀq between the start x₀ of the solve and x̃; ‖B‖ by the largest
of ‖Bᵀv‖/‖v‖ over the directions that errors take: the adjoint q, its right-hand side ∇g, its residual and ∇h.
(Power iterations find the norm over all directions, which for learned filters is thirty times what any error meets.)
Where no μ > 0 is known, the smallest Ritz value of ∇²h on the Krylov space of ∇h stands for it, here and in bounds of
values: the residual ∇h of a solver lies along flat directions, so these are found. (Starting from ∇g finds others:
‖∇h‖/μ would be as low as a quarter of ε in deblurring.) Realistic, and used by adaptive methods.

Where g depends on θ, too, z_i = ∂_θg − Bᵀq, and the change of ∂_θg counts with that of Bᵀq. The penalty P(θ) is exact
and adds nothing.

*Certified*: true constants from the regularizer (``Regularizer.constants``) and a known μ. Never exceeded, and
larger by orders of magnitude: for verification. There is none where operator, data term or g has parameters.

Reference: Ehrhardt & Roberts, *Analyzing inexact hypergradients for bilevel learning*, IMA J. Appl. Math. 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import smallest_ritz
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Constants, Estimate, Rows, Solution, Theta
from bltoolbox.bilevel.tensors import norm

#: Steps of Lanczos behind a Ritz value.
RITZ_STEPS = 12


def loss_lipschitz(upper: Upper, x: Tensor, start: Tensor) -> Tensor | float:
    """L_g per sample; where it is unknown, the rate of change of ∇g between ``start`` and ``x``."""
    if upper.lipschitz is not None:
        return upper.lipschitz
    travelled = norm(x - start)
    change = norm(upper.gradient(x) - upper.gradient(start))
    return torch.where(travelled > 0, change / torch.where(travelled > 0, travelled, 1.0), 0.0)


BoundKind = Literal["estimated", "certified", "none"]


@dataclass(frozen=True)
class BoundEstimate:
    """ω and the constants it used, per sample; a constant that could not be estimated is NaN."""

    omega: Tensor
    hessian_lipschitz: Tensor
    mixed_lipschitz: Tensor


@torch.no_grad()
def estimate_bound(
    lower: Lower,
    upper: Upper,
    x: Tensor,
    start: Tensor,
    q: Tensor,
    residual: Tensor,
    delta: Tensor,
    previous: tuple[Tensor, Tensor],
    mu: Tensor,
    project: Callable[[Theta], dict[str, Tensor]],
) -> BoundEstimate:
    """ω of each sample. ``residual`` is ‖∇h(x̃)‖, ``delta`` the adjoint residual; ``previous`` are the last L_H and
    L_B, which are kept where x̃ = x₀; ``mu`` comes from ``estimate_mu``. Infinite where μ is not
    positive."""
    hessian = lower.linearize(x)
    product, slope, gradient = hessian.hvp(q), upper.gradient(x), lower.gradient(x)
    size = norm(q)
    travelled = norm(x - start) * size
    moved = travelled > 0
    safe = torch.where(moved, travelled, 1.0)
    change = norm(lower.linearize(start).hvp(q) - product)
    hessian_lipschitz = torch.where(moved, change / safe, previous[0])
    image = _mixed(lower, project, x, q)
    difference = _mixed(lower, project, start, q) - image
    if upper.depends_on_theta:
        difference = difference - (_direct(lower, upper, project, start) - _direct(lower, upper, project, x))
    change = norm(difference)
    mixed_lipschitz = torch.where(moved, change / safe, previous[1])

    convex = mu > 0
    mu = torch.where(convex, mu, 1.0)  # where it is not, nothing below is used
    epsilon = residual / mu
    gains = [_gain(image, q)]
    gains += [_gain(_mixed(lower, project, x, v), v) for v in (slope, slope - product, gradient)]
    mixed_norm = torch.stack(gains).amax(0)
    tau = size + delta / mu
    constants = Constants(hessian_lipschitz.nan_to_num(), mixed_lipschitz.nan_to_num(), mixed_norm)
    omega = _omega(constants, mu, loss_lipschitz(upper, x, start), epsilon, delta, tau)
    return BoundEstimate(torch.where(convex, omega, torch.inf), hessian_lipschitz, mixed_lipschitz)


@torch.no_grad()
def estimate_mu(lower: Lower, x: Tensor) -> Tensor:
    """μ of each sample where it is known to be positive, else the smallest Ritz value at x: an estimate of it, and
    not positive where h is not convex. Costs ``RITZ_STEPS`` Hessian products per sample unless every μ is known."""
    if knows_mu(lower):
        return lower.mu
    hessian, gradient = lower.linearize(x), lower.gradient(x)
    start = gradient if hessian.free is None else gradient * hessian.free
    return torch.where(lower.mu > 0, lower.mu, smallest_ritz(hessian, start, RITZ_STEPS))


@torch.no_grad()
def certified_bound(
    lower: Lower, upper: Upper, x: Tensor, q: Tensor, residual: Tensor, delta: Tensor
) -> Tensor | None:
    """ω of each sample, never exceeded by the true error (up to rounding: use float64); None if it is unknown."""
    if not knows_mu(lower) or upper.lipschitz is None or upper.depends_on_theta:
        return None
    epsilon = residual / lower.mu
    constants = lower.constants(x, epsilon)
    if constants is None:
        return None
    tau = norm(q) + delta / lower.mu
    return _omega(constants, lower.mu, upper.lipschitz, epsilon, delta, tau)


def _omega(
    constants: Constants,
    mu: Tensor,
    upper_lipschitz: Tensor | float,
    epsilon: Tensor,
    delta: Tensor,
    tau: Tensor,
) -> Tensor:
    kappa = epsilon / mu * (upper_lipschitz + constants.hessian_lipschitz * tau)
    return constants.mixed_norm * (delta / mu + kappa) + constants.mixed_lipschitz * epsilon * (tau + kappa)


def knows_mu(lower: Lower) -> bool:
    """Whether every sample is known to be strongly convex."""
    return bool((lower.mu_on_host > 0).all())


def _gain(image: Tensor, v: Tensor) -> Tensor:
    """‖Bᵀv‖/‖v‖ of each sample; 0 for a zero direction."""
    return norm(image) / norm(v).clamp_min(torch.finfo(v.dtype).tiny)


def _mixed(lower: Lower, project: Callable[[Theta], dict[str, Tensor]], x: Tensor, q: Tensor) -> Tensor:
    """Bᵀq, one row per sample, projected to the directions that a linear constraint leaves free.

    z is projected before its norm is taken; without the same projection here the means of the kernels, which cannot
    move, would dominate ‖B‖.
    """
    return _projected(lower.mixed_each(x, q), project, len(x))


def _direct(lower: Lower, upper: Upper, project: Callable[[Theta], dict[str, Tensor]], x: Tensor) -> Tensor:
    """∂_θg, one row per sample, projected likewise."""
    own = upper.theta_gradient_each(x)
    zeros = {name: value.new_zeros(len(x), *value.shape) for name, value in lower.theta.items()}
    return _projected(zeros | own, project, len(x))


def _projected(parts: Rows, project: Callable[[Theta], dict[str, Tensor]], count: int) -> Tensor:
    rows = (project({name: entries[i] for name, entries in parts.items()}) for i in range(count))
    return torch.stack([torch.cat([entries.flatten() for entries in row.values()]) for row in rows])


@torch.no_grad()
def gradient_norms(
    lower: Lower, upper: Upper, x: Tensor, q: Tensor, project: Callable[[Theta], dict[str, Tensor]]
) -> Tensor:
    """‖z_i‖, z_i = ∂_θg − Bᵀq of each sample by itself, without its weight."""
    rows = _mixed(lower, project, x, q)
    return norm(_direct(lower, upper, project, x) - rows if upper.depends_on_theta else rows)


class Certificate:
    """What is logged about one hypergradient: how far x̃ may be from the minimiser and z from ∇f, over the
    samples."""

    def __init__(self, bound: BoundKind = "none") -> None:
        self.bound = bound
        self._distances: list[Tensor] = []
        self._bounds: list[Tensor] = []
        self._certified_distance = self._certified_bound = True

    @property
    def wants_estimate(self) -> bool:
        """Whether to compute the estimated bound for the log; a certified one falls back to it."""
        return self.bound != "none"

    def add(
        self,
        lower: Lower,
        upper: Upper,
        solution: Solution,
        estimate: Estimate,
        estimated: Tensor | None,
    ) -> None:
        """The samples of one chunk."""
        mu = lower.mu_on_host
        has_bound = mu > 0
        self._certified_distance &= bool(has_bound.all())
        self._distances.append(torch.where(has_bound, solution.residual / mu, solution.residual))
        certified = None
        if self.bound == "certified" and estimate.adjoint is not None:
            certified = certified_bound(
                lower,
                upper,
                solution.x,
                estimate.adjoint,
                solution.residual.to(lower.mu),
                estimate.residual.to(lower.mu),
            )
        if certified is not None:
            self._bounds.append(certified)
        elif self.wants_estimate and estimated is not None:
            self._certified_bound = False
            self._bounds.append(estimated)

    def totals(self) -> dict[str, float | bool]:
        """Sums and maxima over the samples of this rank, as plain numbers that can be added to those of others."""
        totals: dict[str, float | bool] = {}
        kinds = (
            ("distance", self._distances, self._certified_distance),
            ("bound", self._bounds, self._certified_bound),
        )
        for name, parts, certified in kinds:
            if parts:
                values = torch.cat(parts).double().cpu()
                if name == "distance" and not bool(torch.isfinite(values).all()):
                    continue  # not measured
                totals |= {f"{name}_sum": float(values.sum()), f"{name}_max": float(values.max())}
                totals |= {f"{name}_count": len(values), f"{name}_certified": certified}
        return totals


def certificate_of(totals: Mapping[str, float | bool]) -> dict[str, float | str]:
    """Means and maxima over all samples, for the log."""
    summary: dict[str, float | str] = {}
    for name, otherwise in (("distance", "gradient norm"), ("bound", "estimated")):
        if f"{name}_sum" in totals:
            mean = totals[f"{name}_sum"] / totals[f"{name}_count"]
            summary |= {f"{name}_mean": mean, f"{name}_max": totals[f"{name}_max"]}
            summary[f"{name}_kind"] = "certified" if totals[f"{name}_certified"] else otherwise
    return summary
