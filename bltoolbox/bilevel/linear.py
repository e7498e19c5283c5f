"""Symmetric linear systems H q = b, one per sample: the loop around any iterative method, and conjugate gradients.

Every sample has its own scalars, its own stopping and its own start, and leaves the batch when it is done. A method
provides a record of tensors at a start and one iteration; it may update its residual by a recursion, since the
returned residual is recomputed from q: if the recursion has drifted, the method restarts from there.

Reference: Hestenes & Stiefel, *Methods of conjugate gradients for solving linear systems*, J. Res. NBS 1952.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bltoolbox.bilevel.preconditioner import Preconditioner, Preconditioning, unavailable
from bltoolbox.bilevel.tensors import dot, expand, norm, take
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


def solve_linear(
    method: LinearMethod, system: S, rhs: Tensor, start: Tensor, tol: Tensor, limit: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve H q = rhs for each sample to ‖rhs − Hq‖ ≤ tol: q, the recomputed residual norm and the iterations."""
    q, iterations = start.clone(), torch.zeros(len(rhs), dtype=torch.long, device=rhs.device)
    residual = torch.empty_like(tol)
    order = torch.arange(len(rhs), device=rhs.device)
    previous = torch.full_like(tol, float("inf"))
    while len(order):
        unsolved = system if len(order) == len(rhs) else system.take(order)
        left = limit - iterations[order]
        solution, count = sweep(method, unsolved, rhs[order], q[order], tol[order], left)
        q[order] = solution
        iterations[order] += count
        true = norm(rhs[order] - unsolved.hvp(solution))
        residual[order] = true
        # Restart from the recomputed residual, unless tolerance or limit is reached or the last sweep made no progress.
        again = (true > tol[order]) & (iterations[order] < limit) & (true < 0.5 * previous)
        previous, order = true[again], order[again]
    return q, residual, iterations


def sweep(
    method: LinearMethod, system: S, rhs: Tensor, start: Tensor, tol: Tensor, limit: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate until the method's own residual meets ``tol`` or ``limit`` iterations are spent: q and the
    iterations."""
    out, iterations = start.clone(), torch.zeros_like(limit)
    order = torch.arange(len(rhs), device=rhs.device)
    state = method.init(system, rhs, start, tol)
    while True:
        running = (state.residual > state.tol) & (iterations[order] < limit[order])
        if not bool(running.all()):
            done, keep = torch.nonzero(~running).flatten(), torch.nonzero(running).flatten()
            out[order[done]] = state.q[done]
            if not len(keep):
                return out, iterations
            state, system, order = take(state, keep), system.take(keep), order[keep]
        state = method.step(system, state)
        iterations[order] += 1


def initial_residual(system: System, rhs: Tensor, start: Tensor) -> Tensor:
    """b − H q at the start, without a product if every start is zero."""
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
    """q, r = b − Hq by the recursion with its norm, the search direction p, and ρ = ⟨r, P⁻¹r⟩."""

    q: Tensor
    tol: Tensor
    residual: Tensor
    r: Tensor
    p: Tensor
    rho: Tensor
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
        preconditioner = self._preconditioner(system)
        z = r if preconditioner is None else preconditioner.apply(r)
        return CGState(start, tol, dot(r, r).sqrt(), r, z, dot(r, z), preconditioner)

    def _preconditioner(self, system: System) -> Preconditioner | None:
        if self.preconditioning == "none":
            return None
        make = getattr(system, "preconditioner", None)
        preconditioner = None if make is None else make(self.preconditioning == "spectral")
        if preconditioner is None and self.preconditioning == "spectral":
            raise NumericalError(unavailable(self.caller))
        return preconditioner

    def step(self, system: System, state: CGState) -> CGState:
        product = system.hvp(state.p)
        curvature = dot(state.p, product)
        if not bool((curvature > 0).all()):
            if not bool(torch.isfinite(curvature).all()):
                raise NumericalError(
                    f"{self.caller} encountered NaN or Inf in a Hessian product: θ is out of range; use a smaller step"
                )
            raise NumericalError(
                f"{self.caller} encountered a direction of non-positive curvature: the lower-level energy is not"
                " strongly convex there; set strong_convexity in the recipe or use a convex regularizer"
            )
        alpha = state.rho / curvature
        q = torch.addcmul(state.q, expand(alpha, state.p), state.p)
        r = torch.addcmul(state.r, expand(-alpha, product), product)
        rr = dot(r, r)
        z, rho = r, rr
        if state.preconditioner is not None:
            z = state.preconditioner.apply(r)
            rho = dot(r, z)
        p = torch.addcmul(z, expand(rho / state.rho, state.p), state.p)
        return replace(state, q=q, residual=rr.sqrt(), r=r, p=p, rho=rho)
