"""Quasi-Newton steps that a majorant keeps safe.

For R(x) = Σ ψ(Cx), each ψ lies below the parabola of curvature w(t) = ψ'(t)/t that touches it at t, so at x_k

    h(x_k − αp) ≤ h(x_k) − α⟨∇h, p⟩ + (α²/2)⟨p, M p⟩,        M = AᵀVA + CᵀWC + μ_0,   p = B_k∇h(x_k)

and every α between 0 and 2⟨∇h, p⟩/⟨p, M p⟩ decreases h: no line search, energy or Lipschitz constant is needed. M is
stiffer than ∇²h wherever a response is large, and the steps of `mm`, which minimise the majorant, are too short there.
B_k learns the true curvature from the last steps (limited-memory BFGS), starting from a multiple of the spectral
preconditioner, and its full step α = 1 is taken unless the bound forbids it. An iteration costs one C and one Cᵀ, and
passes over the pairs of steps and changes of the gradient.

When to choose it: cold solves of large images to a few digits, where it needs about 0.6 of the iterations of `mm`;
`blt apply` uses it for models that were trained with `mm`. It needs majorant weights (`foe`, `tv`). Constraints on x
are not supported.

References: Chouzenoux, Idier & Moussaoui, *A majorize–minimize strategy for subspace optimization applied to image
restoration*, IEEE TIP 2011; Byrd, Nocedal & Schnabel, *Representations of quasi-Newton matrices and their use in
limited memory methods*, Math. Prog. 1994.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.lower_solvers.half_quadratic import RENEWAL, HalfQuadratic, half_quadratic
from blt_builtins.lower_solvers.secants import Secants, flat, image
from bltoolbox.plugin import Composite, Lower, Preconditioner, Preconditioning, Rows, expand, norm

#: The longest step, as a part of the one that minimises the majorant; below 2.
LONGEST = 1.8
#: Entries of a block of a pass over responses, so that it stays in the cache.
_BLOCK = 2**16


@dataclass(frozen=True)
class MajorisedState:
    """x, its images under C and A, the curvatures of the parabolas there, and the next direction p."""

    x: Tensor
    residual: Tensor
    gradient: Tensor
    direction: Tensor
    secants: Secants | None
    preconditioner: Preconditioner | None
    age: int
    t: Tensor
    weights: Tensor
    forward: Tensor
    curvature: Tensor | None


class MajorisedLBFGS(HalfQuadratic):
    """Limited-memory BFGS with steps bounded by a majorant.

    Args:
        memory: number of pairs stored for each sample; a pair is two images.
        preconditioner: where the first inverse Hessian is spectral: where that is likely to be faster (`auto`),
            nowhere, or wherever operator and regularizer have a symbol (`spectral`).
    """

    name: ClassVar = "mm-lbfgs"

    def __init__(self, memory: Annotated[int, Gt(0)] = 8, preconditioner: Preconditioning = "auto") -> None:
        super().__init__(preconditioner)
        self.memory = memory

    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> MajorisedState:
        composite = half_quadratic(lower, self.name)
        t, forward = composite.forward(x0)
        gradient, weights, curvature = self._gradient(lower, composite, x0, (t, forward))
        chosen = self._preconditioner(composite, weights, curvature)
        direction = gradient if chosen is None else chosen.apply(gradient)
        return MajorisedState(
            x0, norm(gradient), gradient, direction, None, chosen, 0, t, weights, forward, curvature
        )

    def step(self, lower: Lower, state: MajorisedState) -> MajorisedState:
        composite = half_quadratic(lower, self.name)
        t_p, forward_p = composite.forward(state.direction)
        length = self._length(composite, state, t_p, forward_p)
        x, t = (_moved(start, along, length) for start, along in ((state.x, state.direction), (state.t, t_p)))
        forward = x if forward_p is state.direction else _moved(state.forward, forward_p, length)
        gradient, weights, curvature = self._gradient(lower, composite, x, (t, forward))
        chosen, age = state.preconditioner, state.age + 1
        renews = age % RENEWAL == 0
        if chosen is not None and renews:
            chosen = chosen.renewed(self._preconditioner(composite, weights, curvature, always=True))
        inverse = _on_rows(chosen, x)
        pair = flat(x - state.x), flat(gradient - state.gradient)
        old = state.secants
        secants = Secants.first(*pair) if old is None else old.append(*pair, self.memory)
        if renews or age == 1:
            secants = secants.scaled(inverse)
        direction = image(secants.product(flat(gradient), inverse), x)
        residual = norm(gradient)
        return MajorisedState(
            x, residual, gradient, direction, secants, chosen, age, t, weights, forward, curvature
        )

    def outcome(self, state: MajorisedState) -> MajorisedState:
        return replace(state, preconditioner=None, secants=None)

    def _length(self, composite: Composite, state: MajorisedState, t_p: Tensor, forward_p: Tensor) -> Tensor:
        """α for each sample: 1, as far as the majorant lets it be and there is a pair to trust."""
        p = state.direction
        # A gradient of zero needs no step.
        curved = weighted_square(t_p, state.weights) + weighted_square(forward_p, state.curvature)
        if composite.ridge or composite.tilt_curvature is not None:
            plain = weighted_square(p, None)
            curved = curved + composite.ridge * plain
            if (tilt := composite.tilt_curvature) is not None:
                curved = curved + tilt.double() * plain
        slope = torch.linalg.vecdot(flat(state.gradient), flat(p)).double()
        longest = LONGEST * slope / curved.clamp_min(1e-300)
        if state.secants is not None:
            longest = torch.where(state.secants.curved, longest.clamp_max(1.0), longest)
        return longest.to(p.dtype)


def weighted_square(a: Tensor, weights: Tensor | None) -> Tensor:
    """⟨a, w a⟩ of each sample, in float64; None means 1."""
    if weights is None:
        return norm(a).double().square()
    if a.device.type != "cpu":
        return (weights * a).mul_(a).sum(tuple(range(1, a.ndim)), dtype=torch.float64)
    size = max(1, _BLOCK // len(a))
    blocks = zip(*(flat(values.expand_as(a)).split(size, dim=1) for values in (weights, a)), strict=True)
    return torch.stack([torch.linalg.vecdot(w * block, block) for w, block in blocks]).double().sum(0)


def _moved(start: Tensor, along: Tensor, length: Tensor) -> Tensor:
    return torch.addcmul(start, expand(length, along), along, value=-1)


def _on_rows(chosen: Preconditioner | None, like: Tensor) -> Callable[[Tensor], Tensor]:
    """P⁻¹ on rows."""
    if chosen is None:
        return lambda rows: rows
    return lambda rows: flat(chosen.apply(image(rows, like)))
