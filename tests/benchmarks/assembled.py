"""The stronger baseline: what a user who knows PyTorch assembles from it.

``torch.optim.LBFGS`` with its strong Wolfe line search on the energy of the whole batch, conjugate gradients whose
Hessian products run on one retained graph, one ``autograd.grad`` for all parameters of the mixed derivative. The model
is that of ``published.py``. L-BFGS stops at the very evaluation at which every sample meets the tolerance; conjugate
gradients have their own scalars for each sample, and continue until the last one is done. Of contiguous tensors and
channels-last ones, the benchmark takes whichever is faster.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from published import Published, dots, norms, per_sample
from torch import Tensor

#: Pairs of differences that L-BFGS keeps: 64 evaluations from a cold start; 63, 68 and 69 with 5, 20 and 50 pairs.
HISTORY = 10


class _Reached(Exception):
    """Every sample meets the tolerance."""


@dataclass(frozen=True)
class Adjoint:
    """q with its residual norms, and the mixed derivative of the batch mean."""

    q: Tensor
    residual: Tensor
    gradient: dict[str, Tensor]


@dataclass(frozen=True)
class Assembled(Published):
    """h(x) = ½‖x − y‖² + R_θ(x), solved by what PyTorch offers."""

    def minimise(self, start: Tensor, tol: float, limit: int = 2000) -> tuple[Tensor, int]:
        """x with ‖∇h‖ ≤ tol for every sample, and the evaluations of energy and gradient."""
        x = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [x],
            lr=1.0,
            max_iter=limit,
            max_eval=limit,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
        )
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            energy = self.energy(x)
            energy.backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            if bool((norms(x.grad) <= tol).all()):
                raise _Reached
            return energy

        with suppress(_Reached):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return x.detach(), evaluations

    def adjoint(self, x: Tensor, x_true: Tensor, start: Tensor, tol: float, limit: int = 500) -> Adjoint:
        """∇²h(x) q = ∇g(x) to a residual of tol for every sample, then z."""
        at = x.detach().requires_grad_()
        leaves = {name: value.detach().requires_grad_() for name, value in self.theta.items()}
        gradient = torch.autograd.grad(self.energy(at, leaves), at, create_graph=True)[0]

        def hvp(v: Tensor) -> Tensor:
            return torch.autograd.grad(gradient, at, v, retain_graph=True)[0]

        q, rhs = start, 2 * (x - x_true)
        r = rhs - hvp(q) if bool(q.any()) else rhs
        p, rr = r, dots(r, r)
        for _ in range(limit):
            if bool((rr.sqrt() <= tol).all()):
                break
            product = hvp(p)
            alpha = rr / dots(p, product).clamp_min(1e-30)
            q, r = q + per_sample(alpha) * p, r - per_sample(alpha) * product
            rr, old = dots(r, r), rr
            p = r + per_sample(rr / old.clamp_min(1e-30)) * p
        mixed = torch.autograd.grad(gradient, list(leaves.values()), q)
        z = {name: -part / len(x) for name, part in zip(leaves, mixed, strict=True)}
        return Adjoint(q, rr.sqrt(), z)
