"""Symmetric linear systems H q = b, one per sample: the loop around any iterative method, and conjugate gradients.

Every sample has its own scalars, its own stopping and its own start, and leaves the batch when it is done. A method
provides a record of tensors at a start and one iteration; it may update its residual by a recursion, since the
returned residual is recomputed from q: if the recursion has drifted, the method restarts from there.

Reference: Hestenes & Stiefel, *Methods of conjugate gradients for solving linear systems*, J. Res. NBS 1952.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.preconditioner import Preconditioner, Preconditioning, unavailable
from bltoolbox.bilevel.tensors import beside, dot, expand, look_every, norm, take
from bltoolbox.errors import NumericalError

S = TypeVar("S", bound="System")


class System(Protocol):
    """v ↦ H v for each sample, such as a ``Linearization``."""

    def hvp(self, v: Tensor) -> Tensor: ...

    def take(self: S, index: Tensor) -> S: ...


class LinearMethod(Protocol):
    """An iteration for H q = b. Its state is a frozen dataclass of tensors with at least ``q``, ``tol``,
    ``residual``."""

    def init(self, system: Any, rhs: Tensor, start: Tensor, tol: Tensor) -> Any: ...

    def step(self, system: Any, state: Any) -> Any: ...


@runtime_checkable
class Looking(Protocol):
    """A method that checks more than its residual where the host looks."""

    def look(self, state: Any) -> Tensor:
        """The residual of each sample, on the host; raises if the iteration cannot continue."""
        ...


def solve_linear(
    method: LinearMethod, system: S, rhs: Tensor, start: Tensor, tol: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve H q = rhs for each sample to ‖rhs − Hq‖ ≤ tol: q, the recomputed residual norm and the iterations.

    The last two are on the host, and so is all bookkeeping: the host looks at numbers of the device every few
    iterations, in one copy.
    """
    with computing(rhs.device):
        return _solve_linear(method, system, rhs, start, tol.to(rhs.dtype), limit)


def _solve_linear(
    method: LinearMethod, system: S, rhs: Tensor, start: Tensor, tol: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    goal = tol.cpu()
    iterations, residual = torch.zeros(len(rhs), dtype=torch.long), torch.empty_like(goal)
    order = torch.arange(len(rhs))
    previous = torch.full_like(goal, float("inf"))
    q = start
    while len(order):
        whole = len(order) == len(rhs)
        index = None if whole else beside(order, rhs)
        unsolved, b, begin = (system, rhs, q) if index is None else (system.take(index), rhs[index], q[index])
        solution, count = sweep(method, unsolved, b, begin, goal[order], limit - iterations[order])
        q = solution if index is None else q.index_put((index,), solution)
        iterations[order] += count
        true = norm(b - unsolved.hvp(solution)).cpu()
        residual[order] = true
        # Restart from the recomputed residual, unless tolerance or limit is reached or the last sweep made no progress.
        again = (true > goal[order]) & (iterations[order] < limit) & (true < 0.5 * previous)
        previous, order = true[again], order[again]
    return q, residual, iterations


def sweep(
    method: LinearMethod, system: S, rhs: Tensor, start: Tensor, tol: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate until the method's own residual meets ``tol`` or ``limit`` iterations (on the host) are spent: q, and
    the iterations on the host."""
    every = look_every(rhs)
    iterations, order = torch.zeros(len(rhs), dtype=torch.long), torch.arange(len(rhs))
    out: Tensor | None = None
    goal = tol.cpu()
    state = method.init(system, rhs, start, tol if tol.device == rhs.device else beside(tol, rhs))
    while True:
        residual = method.look(state) if isinstance(method, Looking) else state.residual.cpu()
        running = (residual > goal) & (iterations[order] < limit[order])
        if not bool(running.all()):
            if not bool(running.any()) and out is None:
                return state.q, iterations
            out = start.clone() if out is None else out
            done = beside(torch.nonzero(~running).flatten(), rhs)
            out[beside(order[~running], rhs)] = state.q[done]
            if not bool(running.any()):
                return out, iterations
            keep = beside(torch.nonzero(running).flatten(), rhs)
            state, system = take(state, keep), system.take(keep)
            order, goal = order[running], goal[running]
        steps = min(every, int((limit[order] - iterations[order]).min()))
        for _ in range(steps):
            state = method.step(system, state)
        iterations[order] += steps


def initial_residual(system: System, rhs: Tensor, start: Tensor) -> Tensor:
    """b − H q at the start, without a product if every start is zero and looking costs nothing."""
    if rhs.device.type != "cpu":
        return rhs - system.hvp(start)
    return rhs - system.hvp(start) if bool((start != 0).any()) else rhs.clone()


def smallest_ritz(system: System, start: Tensor, steps: int) -> Tensor:
    """The smallest Ritz value of H on the Krylov space of ``start``, per sample: at least the smallest eigenvalue.

    By the three-term recurrence of Lanczos, whose loss of orthogonality repeats Ritz values but invents none.
    """
    start = torch.where(expand(norm(start) > 0, start), start, 1.0)
    v, before = start / expand(norm(start), start), torch.zeros_like(start)
    beta = torch.zeros_like(norm(start))
    alive = torch.ones_like(beta, dtype=torch.bool)
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    for _ in range(steps):
        w = system.hvp(v) - expand(beta, before) * before
        alpha = dot(v, w)
        # Beyond an invariant subspace, a copy of the first entry is used, which is not below the smallest value.
        diagonal.append(torch.where(alive, alpha, diagonal[0]) if diagonal else alpha)
        w = w - expand(alpha, v) * v
        beta = norm(w)
        alive = alive & (beta > 1e3 * torch.finfo(start.dtype).eps * alpha.abs())
        beta = torch.where(alive, beta, 0.0)
        off_diagonal.append(beta)
        before, v = v, w / expand(torch.where(alive, beta, float("inf")), w)
    matrix = torch.diag_embed(torch.stack(diagonal, 1))
    matrix = matrix + torch.diag_embed(torch.stack(off_diagonal[:-1], 1), 1)
    return torch.linalg.eigvalsh(matrix, UPLO="U")[:, 0]


@dataclass(frozen=True)
class CGState:
    """q, r = b − Hq by the recursion with its norm; of the last step the direction p and ρ = ⟨r, P⁻¹r⟩ before it; the
    smallest curvature met so far, and a tiny number that keeps ρ positive."""

    q: Tensor
    tol: Tensor
    residual: Tensor
    r: Tensor
    p: Tensor
    rho: Tensor
    lowest: Tensor
    tiny: Tensor
    preconditioner: Preconditioner | None


@dataclass(frozen=True)
class ConjugateGradients:
    """For a positive definite H; the error for any other H names ``caller``.

    Where ``preconditioning`` asks for it, P is the preconditioner of the system, if it has one. The residual is
    ‖b − Hq‖ with any P.
    """

    caller: str = "conjugate gradients"
    preconditioning: Preconditioning = "none"

    def init(self, system: System, rhs: Tensor, start: Tensor, tol: Tensor) -> CGState:
        r = initial_residual(system, rhs, start)
        residual = norm(r)
        # By ρ = ∞ the first direction is P⁻¹r.
        infinite = torch.full_like(residual, float("inf"))
        tiny = torch.full_like(residual, torch.finfo(residual.dtype).tiny)
        preconditioner = self._preconditioner(system)
        return CGState(start, tol, residual, r, torch.zeros_like(r), infinite, infinite, tiny, preconditioner)

    def _preconditioner(self, system: System) -> Preconditioner | None:
        if self.preconditioning == "none":
            return None
        make = getattr(system, "preconditioner", None)
        preconditioner = None if make is None else make(self.preconditioning == "spectral")
        if preconditioner is None and self.preconditioning == "spectral":
            raise NumericalError(unavailable(self.caller))
        return preconditioner

    def step(self, system: System, state: CGState) -> CGState:
        # The direction is made here, and not behind the residual, so that samples that are done cost no P⁻¹.
        z = state.r if state.preconditioner is None else state.preconditioner.apply(state.r)
        rho = _positive_dot(state.r, z, state.residual, state.tiny)
        p = torch.addcmul(z, expand(rho / state.rho, z), state.p)
        product = system.hvp(p)
        curvature = dot(p, product)
        lowest = torch.minimum(state.lowest, curvature)
        # A sample that is solved exactly stays as it is until the host looks.
        alpha = rho / torch.maximum(curvature, state.tiny)
        q = torch.addcmul(state.q, expand(alpha, p), p)
        r = torch.addcmul(state.r, expand(alpha, product), product, value=-1)
        return replace(state, q=q, residual=norm(r), r=r, p=p, rho=rho, lowest=lowest)

    def look(self, state: CGState) -> Tensor:
        """The residual of each sample; an error after a direction of non-positive curvature."""
        residual, lowest = torch.stack([state.residual, state.lowest]).cpu()
        if bool(((lowest > 0) | ((lowest == 0) & (residual == 0))).all()):
            return residual
        if not bool(torch.isfinite(lowest).all()):
            raise NumericalError(
                f"{self.caller} encountered NaN or Inf in a Hessian product: θ is out of range; use a smaller step"
            )
        raise NumericalError(
            f"{self.caller} encountered a direction of non-positive curvature: the lower-level energy is not"
            " strongly convex there; set strong_convexity in the recipe or use a convex regularizer"
        )


def _positive_dot(r: Tensor, z: Tensor, residual: Tensor, tiny: Tensor) -> Tensor:
    """⟨r, z⟩, or a tiny number instead of zero, by which one can divide; ``residual`` is ‖r‖."""
    return torch.addcmul(tiny, residual, residual) if z is r else dot(r, z).add_(tiny)
