"""What `pdhg` and `piggyback` share: step lengths, the dual step, and the blocks of dual variables by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from bltoolbox.plugin import Blocks, Lower, NumericalError, Rows, Saddle, expand, norm, put, take

#: The part of the strong convexity of G that shortens the steps.
_PART = 0.5
#: Steps of constant length are changed if the changes of x and p differ by more than this factor; by how much at first,
#: and how fast that decays.
_BALANCE, _GAIN, _DECAY = 1.5, 0.5, 0.95

State = TypeVar("State")


@dataclass(frozen=True)
class Pace:
    """Step lengths, per sample: τ, the γ that shortens it, bounds of ‖K_k‖², whether τ should become shorter, and by
    how much it may be changed."""

    tau: Tensor
    gamma: Tensor
    norm0: Tensor
    norm1: Tensor | None
    shrinks: Tensor
    gain: Tensor

    @classmethod
    def begin(cls, saddle: Saddle, tau: Tensor) -> Pace:
        ones = torch.ones_like(tau)
        return Pace(
            tau, _PART * saddle.convexity, **two("norm", saddle.norms), shrinks=ones > 0, gain=_GAIN * ones
        )

    def blocks(self, prefix: str) -> Blocks:
        """The fields that ``two`` has named."""
        return tuple(block for k in range(2) if (block := getattr(self, f"{prefix}{k}")) is not None)

    @property
    def sigma(self) -> Blocks:
        """σ_k with τ Σ_k σ_k‖K_k‖² = 1."""
        norms = self.blocks("norm")
        return tuple(1 / (len(norms) * self.tau * norm) for norm in norms)

    def shrunk(self) -> tuple[Tensor, Self]:
        """θ, and the state with the next τ."""
        theta = torch.where(self.shrinks, (1 + 2 * self.gamma * self.tau).rsqrt(), 1.0)
        return theta, replace(self, tau=theta * self.tau)

    def balanced(self, tau: Tensor, move: Tensor, p: Blocks, before: Blocks) -> tuple[Self, Tensor]:
        """The state after a primal step ``move`` of length ``tau`` and a dual one, with the sizes of both in units of
        Kᵀp, and these sizes: √(‖Δx‖²/τ² + Σ_k ‖Δp_k‖²/(σ_kτ))."""
        primal, norms = norm(move) / tau, self.blocks("norm")
        changes = (norm(new - old).square() for new, old in zip(p, before, strict=True))
        squares = [bound * change for bound, change in zip(norms, changes, strict=True)]
        dual = (len(norms) * torch.stack(squares).sum(0)).sqrt()
        constant = self.gamma == 0
        longer = constant & (primal > _BALANCE * dual)
        shorter = constant & (_BALANCE * primal < dual)
        factor = torch.where(longer, 1 / (1 - self.gain), torch.where(shorter, 1 - self.gain, 1.0))
        gain = torch.where(longer | shorter, _DECAY * self.gain, self.gain)
        changed = replace(self, tau=factor * self.tau, shrinks=primal <= dual, gain=gain)
        return changed, torch.hypot(primal, dual)


def dual_step(saddle: Saddle, p: Blocks, t: Blocks, sigma: Blocks) -> Blocks:
    """prox_{σF*}(p + σt)."""
    moved = tuple(
        torch.addcmul(dual, expand(step, image), image) for dual, step, image in zip(p, sigma, t, strict=True)
    )
    return saddle.prox_dual(moved, sigma)


def saddle_of(lower: Lower) -> Saddle:
    """The saddle-point form of the lower level; an error if it has none."""
    if (saddle := lower.saddle()) is None:
        raise NumericalError(
            "primal–dual methods need a regularizer and a data term with proximal maps; use agd and cg-ift, which do"
            " not"
        )
    return saddle


def two(prefix: str, blocks: Blocks) -> dict[str, Any]:
    """One or two blocks as fields: the second is None where there is none."""
    if len(blocks) > 2:
        raise NumericalError(
            f"primal–dual methods treat at most two blocks, but the lower level has {len(blocks)}"
        )
    return {f"{prefix}0": blocks[0], f"{prefix}1": blocks[1] if len(blocks) > 1 else None}


def examples(lower: Lower, prefix: str) -> Rows:
    """Empty tensors with the shapes of the blocks of Kx."""
    first = lower.take(torch.zeros(1, dtype=torch.long, device=lower.mu.device))
    blocks = saddle_of(first).forward(first.start())
    return {f"{prefix}{k}": block[:0] for k, block in enumerate(blocks)}


def duals_of(kept: Rows, like: Blocks, prefix: str) -> Blocks:
    """The blocks that ``examples`` names; zero where nothing is kept."""
    return tuple(
        kept[name] if (name := f"{prefix}{k}") in kept else torch.zeros_like(block)
        for k, block in enumerate(like)
    )


def iterate(
    step: Callable[[Lower, State], State], lower: Lower, state: State, tol: Tensor, limit: int
) -> tuple[State, Tensor]:
    """Iterate on each sample until its residual is at most ``tol``, or ``limit`` times; the state and the counts."""
    order = torch.arange(len(tol), device=tol.device)
    counts, out = torch.zeros_like(order), state
    while True:
        running = (state.residual > tol[order]) & (counts[order] < limit)  # type: ignore[attr-defined]
        if not bool(running.all()):
            done, keep = torch.nonzero(~running).flatten(), torch.nonzero(running).flatten()
            out = put(out, order[done], take(state, done))
            if not len(keep):
                return out, counts
            state, lower, order = take(state, keep), lower.take(keep), order[keep]
        state = step(lower, state)
        counts[order] += 1
