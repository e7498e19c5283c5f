"""The one lower-level loop: per-sample stopping, compaction, budget and guards around any solver's step.

A sample leaves the batch in the iteration in which its residual reaches its tolerance, and costs nothing from
then on. A solver whose residual is a by-product of cached quantities is verified: the gradient is
recomputed from x before a sample is declared finished, and the solver restarts from there if it was wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.memory import WHILE, return_freed_memory
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Rows, Solution, Status
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import detached, ordinary, put, take
from bltoolbox.errors import BltError

_RUNNING = -1
_STATUSES = tuple(Status)
_CODE = {status: code for code, status in enumerate(_STATUSES)}

#: A sample whose best residual has not fallen by 1 % for this many iterations (plus a few periods of an accelerated
#: method's oscillation, and what plain gradient descent needs for that 1 %) is stalled.
_PATIENCE = 60
#: Times that a recomputed residual may contradict the solver without any progress.
_STRIKES = 3
#: Growth of the residual that is treated as divergence.
_DIVERGENCE = 1e6


@dataclass
class _Progress:
    """Bookkeeping of the samples still in the batch."""

    active: Tensor
    tol: Tensor
    first: Tensor
    best: Tensor
    since: Tensor
    #: The last residual that contradicted the solver, and how often that happened without progress.
    verified: Tensor
    strikes: Tensor

    @classmethod
    def begin(cls, residual: Tensor, tol: Tensor) -> _Progress:
        count = torch.zeros(len(residual), dtype=torch.long, device=residual.device)
        order = torch.arange(len(residual), device=residual.device)
        verified = torch.full_like(residual, float("inf"))
        return cls(order, tol, residual, residual, count, verified, count.clone())

    def observe(self, residual: Tensor) -> None:
        improved = residual < 0.99 * self.best
        self.since = torch.where(improved, 0, self.since + 1)
        self.best = torch.where(improved, residual, self.best)

    def keep(self, index: Tensor) -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name)[index])


def solve(
    solver: LowerSolver,
    lower: Lower,
    x0: Tensor,
    tol: Tensor | float,
    *,
    limit: int = 2000,
    check_every: int | None = None,
    ending: Status = Status.LIMIT,
    kept: Rows | None = None,
    with_state: bool = False,
) -> Solution:
    """Run ``solver`` on each sample from ``x0`` until ``lower.residual(x) ≤ tol``.

    ``tol`` bounds the gradient norm; a distance ε asks for μ ε. Every ``check_every`` iterations (1 on CPU, 4 where a
    look at the residual makes the host wait for a device) finished samples leave. ``ending`` is the status of a
    sample that has spent ``limit`` iterations: with ``Status.STEPS`` that many were asked for, and only NaN ends it
    earlier. ``kept`` is what the solver persists of earlier solves; the solution has its state only ``with_state``.

    Not differentiable: the solution is detached from ``x0``, y and θ. Works inside ``torch.inference_mode``.
    """
    with detached():
        x0 = ordinary(x0.detach())
        return _solve(solver, lower, x0, tol, limit, check_every, ending, kept or {}, with_state)


def _solve(
    solver: LowerSolver,
    lower: Lower,
    x0: Tensor,
    tol: Tensor | float,
    limit: int,
    check_every: int | None,
    ending: Status,
    kept: Rows,
    with_state: bool,
) -> Solution:
    return_freed_memory(after=WHILE)
    tol = torch.as_tensor(tol, dtype=x0.dtype, device=x0.device).expand(len(x0))
    every = check_every or (1 if x0.device.type == "cpu" else 4)
    out = _Output(x0, lower.mu, solver.outcome if with_state else None)
    state = solver.init(lower, x0, kept)
    progress = _Progress.begin(state.residual, tol)
    for iteration in range(limit + 1):
        if iteration % every == 0 or iteration == limit:
            last = ending if iteration == limit else None
            verdict = _judge(lower, state.residual, progress, iteration, last, ending is Status.STEPS)
            if not solver.exact_residual and bool((verdict != _RUNNING).any()):
                state, verdict = _verify(solver, lower, state, progress, verdict, iteration == limit)
            if bool((verdict != _RUNNING).any()):
                lower, state = out.retire(lower, state, progress, verdict, iteration)
            if not len(progress.active):
                break
        lower.counter.lower_iterations += len(progress.active)
        state = solver.step(lower, state)
        progress.observe(state.residual)
    return out.solution()


def _judge(
    lower: Lower, residual: Tensor, progress: _Progress, iteration: int, last: Status | None, counted: bool
) -> Tensor:
    """A status code per sample, later rules taking precedence; where steps are ``counted`` only NaN is judged.

    An infinite residual was not measured, or the iterates overflow: then NaN follows, or nothing is ever measured.
    """
    verdict = torch.full_like(progress.active, _RUNNING if last is None else _CODE[last])
    if counted:
        return torch.where(torch.isnan(residual), _CODE[Status.NOT_FINITE], verdict)
    if iteration >= _PATIENCE:
        verdict = torch.where(progress.since >= _patience(lower), _CODE[Status.STALLED], verdict)
    infinite = torch.isinf(residual)
    far = (residual > _DIVERGENCE * progress.first) & (residual > progress.tol)
    rules = (
        (Status.CONVERGED, residual <= progress.tol),
        (Status.DIVERGED, far & ~infinite),
        (Status.NOT_FINITE, torch.isnan(residual) | (infinite & (verdict != _RUNNING))),
    )
    for status, hit in rules:
        verdict = torch.where(hit, _CODE[status], verdict)
    return verdict


def _patience(lower: Lower) -> Tensor:
    """Iterations without progress after which a sample is stalled; at least ``_PATIENCE``."""
    patience = torch.full_like(lower.mu, 10 * _PATIENCE)
    if not lower.bounded:
        return patience
    condition = lower.lipschitz / lower.mu.clamp_min(1e-12)
    periods = 6 * condition.sqrt() + 0.02 * condition
    return torch.where(lower.mu > 0, _PATIENCE + periods.clamp_max(1e6).floor(), patience)


def _verify(
    solver: LowerSolver, lower: Lower, state: Any, progress: _Progress, verdict: Tensor, last: bool
) -> tuple[Any, Tensor]:
    """Recompute the residual of every sample about to leave, and keep those whose claim was wrong."""
    index = torch.nonzero(verdict != _RUNNING).flatten()
    residual = lower.take(index).residual(state.x[index])
    state = replace(state, residual=state.residual.index_put((index,), residual))
    wrong = (verdict[index] == _CODE[Status.CONVERGED]) & ~(residual <= progress.tol[index])
    if not bool(wrong.any()):
        return state, verdict
    back = index[wrong]
    strike = residual[wrong] > 0.9 * progress.verified[back]
    progress.strikes[back] = torch.where(strike, progress.strikes[back] + 1, 0)
    progress.verified[back] = residual[wrong]
    kept = {name: getattr(state, name)[back] for name in solver.persists(lower)}
    state = put(state, back, solver.init(lower.take(back), state.x[back], kept))
    state = replace(state, residual=state.residual.index_put((back,), residual[wrong]))
    given_up = progress.strikes[back] >= _STRIKES
    onwards = _CODE[Status.LIMIT] if last else _RUNNING
    return state, verdict.index_put((back,), torch.where(given_up, _CODE[Status.STALLED], onwards))


class _Output:
    """Results, in the order of the original batch."""

    def __init__(self, x0: Tensor, mu: Tensor, outcome: Callable[[Any], Any] | None) -> None:
        self.mu = mu
        self.outcome = outcome
        self.state: Any = None
        self.x = x0.clone()
        self.residual = torch.full((len(x0),), float("nan"), dtype=x0.dtype, device=x0.device)
        self.iterations = torch.zeros(len(x0), dtype=torch.long, device=x0.device)
        self.code = torch.full_like(self.iterations, _RUNNING)

    def retire(
        self, lower: Lower, state: Any, progress: _Progress, verdict: Tensor, iteration: int
    ) -> tuple[Lower, Any]:
        """Record the finished samples and continue with the others."""
        done = torch.nonzero(verdict != _RUNNING).flatten()
        target = progress.active[done]
        self.x[target] = state.x[done]
        self.residual[target] = state.residual[done]
        self.iterations[target] = iteration
        self.code[target] = verdict[done]
        if self.outcome is not None:
            self._scatter(target, self.outcome(take(state, done)))
        rest = torch.nonzero(verdict == _RUNNING).flatten()
        progress.keep(rest)
        return lower.take(rest), take(state, rest)

    def _scatter(self, target: Tensor, state: Any) -> None:
        """Write the states of finished samples to their rows of the batch."""
        if len(target) == len(self.x):
            self.state = state
            return
        if self.state is None:
            rows = {
                entry.name: value.new_zeros(len(self.x), *value.shape[1:])
                for entry in fields(state)
                if isinstance(value := getattr(state, entry.name), Tensor)
            }
            self.state = replace(state, **rows)
        for entry in fields(state):
            value, whole = getattr(state, entry.name), getattr(self.state, entry.name)
            if not isinstance(value, Tensor):
                continue
            if value.shape[1:] != whole.shape[1:]:
                raise BltError(
                    f"the field {entry.name!r} of {type(state).__name__} changes its shape between iterations, so the"
                    " states of samples cannot be put together; give it one shape in outcome()"
                )
            whole[target] = value

    def solution(self) -> Solution:
        status = tuple(_STATUSES[code] for code in self.code.tolist())
        distance = self.residual / torch.where(self.mu > 0, self.mu, torch.nan)
        return Solution(self.x, self.residual, distance, self.iterations, status, self.state)
