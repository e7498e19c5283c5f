"""What the methods for finite sums share: steps that do not depend on the block, and single blocks of both levels.

    h = 1/n Σ_j h_j,   g = 1/m Σ_k g_k,        ∇h_j(x), ∇²h_j(x) q and ∇g_k(x) are unbiased for uniform j and k

Blocks come from (seed, task, call), so that they depend neither on batches nor on ranks, and are the same after a
resume. A step must be the same for all blocks, or its mean would not be that of the gradient: it is 1/L with L a bound
for every block. Where n = 1 nothing is drawn, and the methods are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from bltoolbox.plugin import (
    Ask,
    BlockDraws,
    Effort,
    HypergradientEstimator,
    Linearization,
    Lower,
    NumericalError,
    Rows,
    Steps,
    Upper,
    expand,
)

#: The length of a step, or `auto` for a certified one.
StepLength = Annotated[float, Gt(0)] | Literal["auto"]
Decay = Annotated[float, Ge(0)]


class FiniteSumEstimator(HypergradientEstimator):
    """Moves x itself, and keeps the adjoint of each task."""

    gives_adjoint = False
    exact = False
    moves_x = True
    stochastic = True
    needs_memory = True

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        return {"adjoint": empty_rows(lower)}


def empty_rows(lower: Lower, *leading: int) -> Tensor:
    """An example of a kept tensor with the entries of x, and further dimensions before them."""
    return torch.empty((0, *leading, *lower.shape), dtype=lower.mu.dtype, device=lower.mu.device)


def count_of(effort: Effort | None, default: int) -> int:
    """The requested number of iterations; ``default`` where an accuracy is requested, which single blocks cannot
    measure."""
    return effort.count if isinstance(effort, Steps) else default


def step_length(ask: Ask, step: float | str, caller: str, option: str, factor: float = 1.0) -> Tensor:
    """One per task: ``step``, or ``factor``/L with a bound L of all blocks."""
    lower = ask.lower
    if not isinstance(step, str):
        return torch.full_like(lower.mu, step)
    lipschitz = lower.block_lipschitz
    if not bool(torch.isfinite(lipschitz).all()):
        raise NumericalError(
            f"{caller} takes steps of length 1/L, but the Lipschitz constant L of this problem is unknown; set"
            f" hypergradient.{option}, or use cg-ift, which needs none"
        )
    return factor / lipschitz


@dataclass(frozen=True)
class Sampler:
    """Single blocks of the lower level and of the loss."""

    ask: Ask

    @property
    def draws(self) -> BlockDraws:
        return BlockDraws(self.ask.seed, self.ask.call, self.ask.lower.ids)

    def lower(self, purpose: str, count: int) -> list[Lower]:
        """``count`` independent blocks of h."""
        whole = self.ask.lower
        return [whole.sampled(j) for j in self.draws.blocks(purpose, whole.blocks, count)]

    def upper(self) -> Upper:
        """One block of g."""
        whole = self.ask.upper
        return whole.sampled(self.draws.blocks("loss", whole.blocks, 1)[0])


def descend(lowers: list[Lower], x: Tensor, step: Tensor) -> Tensor:
    """x ← P_C(x − ρ∇h_j(x)), one step for each block."""
    for lower in lowers:
        x = lower.project(x - expand(step, x) * lower.gradient(x))
    return x


def hessian_product(system: Linearization, v: Tensor) -> Tensor:
    """∇²h v on the entries that a constraint leaves free, zero on the others."""
    return system.hvp(v) if system.free is None else system.hvp(v * system.free)


def gradient_of(lower: Lower, upper: Upper, x: Tensor, q: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """z = Σ_i weights_i (∂_θ g_i − ∂_θ⟨∇h_i, q_i⟩)."""
    z = {name: -entry for name, entry in lower.mixed(x, q, weights).items()}
    for name, entry in upper.theta_gradient(x, weights).items():
        z[name] = z[name] + entry
    return z


def unmeasured(lower: Lower) -> Tensor:
    """The residual of a system that was never evaluated as a whole."""
    return torch.full_like(lower.mu, torch.inf)


def each(lower: Lower, count: int) -> Tensor:
    """The same number of iterations for every task."""
    return torch.full(lower.mu.shape, count, dtype=torch.long, device=lower.mu.device)
