"""The one lower-level loop: per-sample stopping, compaction, budget and guards around any solver's step.

A sample leaves the batch in the iteration in which its residual reaches its tolerance, and costs nothing from
then on. A solver whose residual is a by-product of cached quantities is verified: the gradient is
recomputed from x before a sample is declared finished, and the solver restarts from there if it was wrong.

All bookkeeping is on the host. A GPU runs several iterations between two looks, which copy the residuals of all of them
at once. There, batches have only certain sizes, for which kernels are chosen and compiled once: finished samples
fill a batch up, and what happens to them is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.memory import WHILE, return_freed_memory
from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Rows, Solution, Status
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import beside, detached, look_every, ordinary, put, take
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
    """Bookkeeping of the samples in the batch, on the host."""

    #: Their places in the original batch, and which of them are finished and only fill this one up.
    active: Tensor
    finished: Tensor
    tol: Tensor
    mu: Tensor
    residual: Tensor
    first: Tensor
    best: Tensor
    since: Tensor
    #: The last residual that contradicted the solver, and how often that happened without progress.
    verified: Tensor
    strikes: Tensor

    @classmethod
    def begin(cls, residual: Tensor, tol: Tensor, mu: Tensor) -> _Progress:
        count = torch.zeros(len(residual), dtype=torch.long)
        order = torch.arange(len(residual))
        verified = torch.full_like(residual, float("inf"))
        finished = torch.zeros_like(order, dtype=torch.bool)
        return cls(order, finished, tol, mu, residual, residual, residual, count, verified, count.clone())

    def observe(self, residuals: Tensor) -> None:
        """The residuals of some iterations, one row each."""
        for residual in residuals:
            improved = residual < 0.99 * self.best
            self.since = torch.where(improved, 0, self.since + 1)
            self.best = torch.where(improved, residual, self.best)
            self.residual = residual

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
    with detached(), computing(x0.device):
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
    every = check_every or look_every(x0)
    out = _Output(x0, lower.mu_on_host, solver.outcome if with_state else None)
    state = solver.init(lower, x0, kept)
    residuals = [state.residual]
    goal = torch.as_tensor(tol, dtype=x0.dtype, device="cpu").expand(len(x0))
    progress = _Progress.begin(state.residual.cpu(), goal, lower.mu_on_host)
    for iteration in range(limit + 1):
        if iteration % every == 0 or iteration == limit:
            if iteration:
                progress.observe(_look(residuals))
            residuals.clear()
            last = ending if iteration == limit else None
            verdict = _judge(lower, progress, iteration, last, ending is Status.STEPS)
            if not solver.exact_residual and bool((verdict != _RUNNING).any()):
                state, verdict = _verify(solver, lower, state, progress, verdict, iteration == limit)
            if bool((verdict != _RUNNING).any()):
                lower, state = out.retire(lower, state, progress, verdict, iteration)
            if bool(progress.finished.all()):
                break
        lower.counter.lower_iterations += int((~progress.finished).sum())
        state = solver.step(lower, state)
        residuals.append(state.residual)
    return out.solution()


def _look(residuals: list[Tensor]) -> Tensor:
    """The residuals since the last look, on the host, one row per iteration."""
    return residuals[0].unsqueeze(0).cpu() if len(residuals) == 1 else torch.stack(residuals).cpu()


def _judge(lower: Lower, progress: _Progress, iteration: int, last: Status | None, counted: bool) -> Tensor:
    """A status code per sample, later rules taking precedence; where steps are ``counted`` only NaN is judged.

    An infinite residual was not measured, or the iterates overflow: then NaN follows, or nothing is ever measured.
    """
    residual = progress.residual
    verdict = torch.full_like(progress.active, _RUNNING if last is None else _CODE[last])
    if counted:
        verdict = torch.where(torch.isnan(residual), _CODE[Status.NOT_FINITE], verdict)
        return torch.where(progress.finished, _RUNNING, verdict)
    if iteration >= _PATIENCE and bool((progress.since >= _PATIENCE).any()):
        verdict = torch.where(progress.since >= _patience(lower, progress.mu), _CODE[Status.STALLED], verdict)
    infinite = torch.isinf(residual)
    far = (residual > _DIVERGENCE * progress.first) & (residual > progress.tol)
    rules = (
        (Status.CONVERGED, residual <= progress.tol),
        (Status.DIVERGED, far & ~infinite),
        (Status.NOT_FINITE, torch.isnan(residual) | (infinite & (verdict != _RUNNING))),
    )
    for status, hit in rules:
        verdict = torch.where(hit, _CODE[status], verdict)
    return torch.where(progress.finished, _RUNNING, verdict)


def _patience(lower: Lower, mu: Tensor) -> Tensor:
    """Iterations without progress after which a sample is stalled; at least ``_PATIENCE``."""
    patience = torch.full_like(mu, 10 * _PATIENCE)
    if not lower.bounded:
        return patience
    condition = lower.lipschitz.cpu() / mu.clamp_min(1e-12)
    periods = 6 * condition.sqrt() + 0.02 * condition
    return torch.where(mu > 0, _PATIENCE + periods.clamp_max(1e6).floor(), patience)


def _verify(
    solver: LowerSolver, lower: Lower, state: Any, progress: _Progress, verdict: Tensor, last: bool
) -> tuple[Any, Tensor]:
    """Recompute the residual of every sample about to leave, and keep those whose claim was wrong."""
    leaving = verdict != _RUNNING
    rows = beside(torch.nonzero(leaving).flatten(), state.x)
    whole = bool(leaving.all())
    exact = lower.residual(state.x) if whole else lower.take(rows).residual(state.x[rows])
    state = replace(state, residual=exact if whole else state.residual.index_put((rows,), exact))
    residual = progress.residual.clone()
    residual[leaving] = exact.cpu()
    progress.residual = residual
    wrong = (verdict == _CODE[Status.CONVERGED]) & ~(residual <= progress.tol)
    if not bool(wrong.any()):
        return state, verdict
    strike = residual > 0.9 * progress.verified
    progress.strikes = torch.where(wrong, torch.where(strike, progress.strikes + 1, 0), progress.strikes)
    progress.verified = torch.where(wrong, residual, progress.verified)
    back = beside(torch.nonzero(wrong).flatten(), state.x)
    kept = {name: getattr(state, name)[back] for name in solver.persists(lower)}
    true = state.residual[back]
    state = put(state, back, solver.init(lower.take(back), state.x[back], kept))
    state = replace(state, residual=state.residual.index_put((back,), true))
    onwards = torch.full_like(verdict, _CODE[Status.LIMIT] if last else _RUNNING)
    onwards[progress.strikes >= _STRIKES] = _CODE[Status.STALLED]
    return state, torch.where(wrong, onwards, verdict)


def _batch_size(running: int, like: Tensor) -> int:
    """The size of a batch in which some samples are still running: on a GPU 2ᵏ or 3·2ᵏ."""
    if like.device.type == "cpu":
        return running
    power = 1 << (running - 1).bit_length()
    return power * 3 // 4 if power >= 4 and running <= power * 3 // 4 else power


class _Output:
    """Results, in the order of the original batch."""

    def __init__(self, x0: Tensor, mu: Tensor, outcome: Callable[[Any], Any] | None) -> None:
        self.mu = mu
        self.outcome = outcome
        self.state: Any = None
        self.x0 = x0
        self.x: Tensor | None = None
        self.residual = torch.full((len(x0),), float("nan"), dtype=x0.dtype)
        self.iterations = torch.zeros(len(x0), dtype=torch.long)
        self.code = torch.full_like(self.iterations, _RUNNING)

    def retire(
        self, lower: Lower, state: Any, progress: _Progress, verdict: Tensor, iteration: int
    ) -> tuple[Lower, Any]:
        """Record the finished samples and continue with the others."""
        leaving = verdict != _RUNNING
        places = progress.active[leaving]
        self.residual[places] = progress.residual[leaving]
        self.iterations[places] = iteration
        self.code[places] = verdict[leaving]
        self._record(state, leaving, places, iteration)
        progress.finished = progress.finished | leaving
        running = torch.nonzero(~progress.finished).flatten()
        size = min(_batch_size(len(running), state.x), len(leaving)) if len(running) else 0
        if size == len(leaving) or not size:
            return lower, state
        fillers = torch.nonzero(progress.finished).flatten()[: size - len(running)]
        rest = torch.cat([running, fillers]).sort().values
        progress.keep(rest)
        index = beside(rest, state.x)
        return lower.take(index), take(state, index)

    def _record(self, state: Any, leaving: Tensor, places: Tensor, iteration: int) -> None:
        """Keep x of the samples that are leaving, and their states where these are wanted."""
        if len(places) == len(self.x0):  # all at once; a solution is never the start itself
            self.x = state.x if iteration else state.x.clone()
            self.state = None if self.outcome is None else self.outcome(state)
            return
        done, target = beside(torch.nonzero(leaving).flatten(), state.x), beside(places, state.x)
        self.x = self.x0.clone() if self.x is None else self.x
        self.x[target] = state.x[done]
        if self.outcome is not None:
            self._scatter(target, self.outcome(take(state, done)))

    def _scatter(self, target: Tensor, state: Any) -> None:
        """Write the states of finished samples to their rows of the batch."""
        if self.state is None:
            rows = {
                entry.name: value.new_zeros(len(self.x0), *value.shape[1:])
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
        assert self.x is not None
        return Solution(self.x, self.residual, distance, self.iterations, status, self.state)
