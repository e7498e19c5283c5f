"""Majorise–minimise memory gradient.

For R(x) = Σ ψ(Cx), each ψ lies below the parabola of curvature w(t) = ψ'(t)/t that touches it at t, so at x_k

    h(x) ≤ ½‖Ax − y‖² + ½ Σ w_k (Cx)² + const,        x_{k+1} = argmin of that over x_k + span{∇h(x_k), x_k − x_{k−1}}

which is a 2×2 system per sample. C x_k, A x_k and their last changes are stored, so an iteration costs one C and one
Cᵀ, as much as a gradient. No step size or Lipschitz constant is needed; h decreases monotonically.

Where the lower level has a preconditioner P ≈ ∇²h that is likely to pay, as with learned filters, P⁻¹∇h replaces ∇h,
and P is renewed from the weights w every few iterations: about half the iterations, each at most 40 % more expensive.

The stored C x_k drifts by rounding: the loop recomputes the residual from x before it accepts a sample as converged,
and restarts from there if it was wrong.

When to choose it: the fastest first-order choice for regularizers with majorant weights (`foe`, `tv`): about half
the iterations of `agd`, and insensitive to a small smoothing ν. Constraints on x are not supported.

Reference: Chouzenoux, Idier & Moussaoui, *A majorize–minimize strategy for subspace optimization applied to image
restoration*, IEEE TIP 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.lower_solvers.half_quadratic import RENEWAL, HalfQuadratic, half_quadratic
from blt_builtins.lower_solvers.mm_lbfgs import MajorisedLBFGS
from bltoolbox.plugin import (
    Composite,
    Fused,
    Lower,
    LowerSolver,
    Preconditioner,
    Preconditioning,
    Rows,
    dot,
    expand,
    norm,
)

#: The part of the curvature along d beyond p below which the two are taken as parallel.
_PARALLEL = 1e-5


@dataclass(frozen=True)
class MMState:
    """x, d = x − x_prev, and their images under C and A; P of the last step, and the iterations so far."""

    x: Tensor
    residual: Tensor
    gradient: Tensor
    preconditioner: Preconditioner | None
    age: int
    t: Tensor
    weights: Tensor
    forward: Tensor
    curvature: Tensor | None
    d: Tensor
    t_d: Tensor
    forward_d: Tensor


class MemoryGradient(HalfQuadratic):
    """Majorise–minimise over the gradient and the last step.

    Args:
        compile: fuse what an iteration does between its convolutions by torch.compile: a half to a third of the time
            of these passes on a CPU, most with `wcfoe` and many filters. The first solve waits for the compiler, about
            20 s; without one, a warning is logged and nothing is fused.
        preconditioner: where the gradient is preconditioned: where that is likely to be faster (`auto`), nowhere, or
            wherever operator and regularizer have a symbol (`spectral`).
    """

    def __init__(self, compile: bool = False, preconditioner: Preconditioning = "auto") -> None:
        super().__init__(preconditioner)
        self.compile = compile
        # Passes over responses, of which there are many more than pixels.
        self._gram = Fused(compact_gram) if compile else gram
        self._advance = Fused(advance) if compile else advance
        self._advance_and_touch = Fused(advance_and_touch) if compile else None

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> MMState:
        composite = half_quadratic(lower)
        t, forward = composite.forward(x0)
        gradient, weights, curvature = self._gradient(lower, composite, x0, (t, forward))
        d = torch.zeros_like(x0)
        zeros = d, torch.zeros_like(t), d if forward is x0 else torch.zeros_like(forward)
        chosen = self._preconditioner(composite, weights, curvature)
        return MMState(x0, norm(gradient), gradient, chosen, 0, t, weights, forward, curvature, *zeros)

    def step(self, lower: Lower, state: MMState) -> MMState:
        composite = half_quadratic(lower)
        # Here, and not behind the gradient, so that samples that are done cost no P⁻¹.
        chosen = self._current(composite, state)
        p = state.gradient if chosen is None else chosen.apply(state.gradient)
        t_p, forward_p = composite.forward(p)
        along = self._subspace_minimiser(composite, state, p, t_p, forward_p)
        t, t_d, first = self._responses(composite, state, t_p, along)
        x, d = advance(state.x, state.d, p, along)
        if forward_p is p:  # A is the identity
            forward, forward_d = x, d
        else:
            forward, forward_d = advance(state.forward, state.forward_d, forward_p, along)
        gradient, weights, curvature = self._gradient(lower, composite, x, (t, forward), first)
        return MMState(
            x,
            norm(gradient),
            gradient,
            chosen,
            state.age + 1,
            t,
            weights,
            forward,
            curvature,
            d,
            t_d,
            forward_d,
        )

    def _current(self, composite: Composite, state: MMState) -> Preconditioner | None:
        """P for this step: renewed every few, and otherwise that of the last one."""
        chosen = state.preconditioner
        if chosen is None or state.age == 0 or state.age % RENEWAL:
            return chosen
        newer = self._preconditioner(composite, state.weights, state.curvature, always=True)
        return None if newer is None else chosen.renewed(newer)

    def _responses(
        self, composite: Composite, state: MMState, t_p: Tensor, along: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The next t and its change; with slope and curvature there, if one pass over memory gives all."""
        majorant = None if self._advance_and_touch is None else composite.majorant()
        if self._advance_and_touch is None or majorant is None:
            return *self._advance(state.t, state.t_d, t_p, along), None
        t, t_d, *first = self._advance_and_touch(state.t, state.t_d, t_p, along, majorant)
        return t, t_d, (first[0], first[1])

    def outcome(self, state: MMState) -> MMState:
        return replace(state, preconditioner=None)

    def quick(self) -> LowerSolver:
        return MajorisedLBFGS(preconditioner=self.preconditioner)

    def _subspace_minimiser(
        self, composite: Composite, state: MMState, p: Tensor, t_p: Tensor, forward_p: Tensor
    ) -> Tensor:
        """s with M s = −Dᵀ∇h, M = Dᵀ(AᵀVA + CᵀWC + μ_0)D, D = [p, d]: (2, B)."""
        g = state.gradient
        plain = gram(p, state.d, None, None if p is g else g)
        slopes = plain[:1] if p is g else plain[2:]
        plain = plain[:2]
        identity = forward_p is p and state.curvature is None
        data = plain if identity else gram(forward_p, state.forward_d, state.curvature)
        system = data + self._gram(t_p, state.t_d, state.weights)
        if (curvature := composite.tilt_curvature) is not None:
            system = system + curvature.double() * plain
        if composite.ridge:
            system = torch.add(system, plain, alpha=composite.ridge)
        return minimiser_of(system, slopes, g.dtype)


def minimiser_of(system: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """The minimiser of ½⟨s, M s⟩ + ⟨slopes, s⟩ for each sample, M (2, 2, B) and slopes (1, 2, B) along p and d: (2, B).

    In float64, by elimination: along p first, then along what d adds to it.
    """
    rows = torch.cat([system, slopes])
    # A gradient of zero has no curvature, and needs no step.
    pp, dd = system.flatten(0, 1)[0::3].clamp_min(1e-300)
    over_pp = rows[1:, 0] / pp
    curvature, slope = torch.addcmul(rows[1:, 1], over_pp, system[0, 1], value=-1) / dd
    backwards = torch.empty_like(over_pp)
    # If the directions are parallel (or there is no last step), only the first is used.
    along_d = torch.div(slope, F.threshold(curvature, _PARALLEL, math.inf), out=backwards[1])
    torch.addcmul(over_pp[1], over_pp[0], along_d, value=-1, out=backwards[0])
    return torch.mul(backwards, -1, out=torch.empty_like(backwards, dtype=dtype))


def gram(a: Tensor, b: Tensor, weights: Tensor | None = None, g: Tensor | None = None) -> Tensor:
    """[[⟨a, w a⟩, ⟨a, w b⟩], [⟨b, w a⟩, ⟨b, w b⟩]] of each sample, (2, 2, B), in float64; with ⟨g, a⟩ and ⟨g, b⟩ in a
    third row.

    On a CPU computed from √w a and √w b: a norm reads its tensor once, while a sum of products would write one first.
    """
    if a.device.type != "cpu":
        return stacked_gram(a, b, weights, g)
    left = a
    if weights is not None:
        root = weights.sqrt()
        left, b = root * a, root.mul_(b)
    more = [] if g is None else [dot(g, a), dot(g, b)]
    mixed = dot(left, b)
    products = torch.stack([norm(left), mixed, mixed, norm(b), *more]).double()
    products[0:4:3].square_()
    return products.unflatten(0, (-1, 2))


def stacked_gram(a: Tensor, b: Tensor, weights: Tensor | None = None, g: Tensor | None = None) -> Tensor:
    """The same with few launches: the products of all with a and b in one tensor, and one sum."""
    rows = torch.cat([a, b] if g is None else [a, b, g]).view(-1, *a.shape)
    weighted = rows if weights is None else weights * rows
    products = weighted.unsqueeze(1) * rows[:2]
    return products.sum(tuple(range(3, products.ndim)), dtype=torch.float64)


def compact_gram(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """The first two rows, to be fused, so that no intermediate tensor is written."""
    dims = tuple(range(1, a.ndim))
    weighted_a, weighted_b = weights * a, weights * b
    mixed = (weighted_a * b).sum(dims)
    products = (weighted_a * a).sum(dims), mixed, mixed, (weighted_b * b).sum(dims)
    return torch.stack(products).double().unflatten(0, (2, 2))


def advance(point: Tensor, d: Tensor, p: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """The next point and the step to it, s_p p + s_d d."""
    d = torch.addcmul(d * expand(along[1], d), expand(along[0], p), p)
    return point + d, d


def advance_and_touch(
    t: Tensor, t_d: Tensor, t_p: Tensor, along: Tensor, majorant: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next responses and their change, with slope and curvature there; to be fused."""
    t, t_d = advance(t, t_d, t_p, along)
    weights = majorant(t)
    return t, t_d, weights * t, weights
