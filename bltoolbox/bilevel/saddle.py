"""The lower level as a saddle-point problem: what primal–dual methods work on.

    h(x) = F(Kx) + G(x) = max_p ⟨Kx, p⟩ + G(x) − F*(p),        F(Kx) = Σ_k F_k(K_k x), blocks k

At any x and p, F*(p) finite, let

    c = F(Kx) + F*(p) − ⟨Kx, p⟩ ≥ 0,        r the shortest element of Kᵀp + ∂G(x)

Both vanish at a solution and nowhere else. The function ⟨K·, p⟩ − F*(p) + G lies below h, is as convex as G and has the
subgradient r at x. So if G is ρ-strongly convex and h is μ-strongly convex, μ ≥ ρ,

    h(x) − h(x̂) ≤ gap = c + ‖r‖²/(2ρ),        ‖x − x̂‖² ≤ 2·gap/μ

A differentiable block may count as part of G here, with ∇(F_k ∘ K_k) in r and nothing in c: then ρ includes the strong
convexity that it adds, and the bound needs no conjugate of it.

Reference: Chambolle & Pock, *A first-order primal-dual algorithm for convex problems with applications to imaging*,
JMIV 2011.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Blocks = tuple[Tensor, ...]


class Saddle(Protocol):
    """F, G and K of the tasks of one chunk. Everything is differentiable in the θ of the lower level."""

    @property
    def norms(self) -> Blocks:
        """Valid upper bounds on ‖K_k‖², one per block and task."""
        ...

    @property
    def convexity(self) -> Tensor:
        """The strong convexity of G, shape (B,); 0 where none is known."""
        ...

    @property
    def gap_convexity(self) -> Tensor:
        """ρ: the strong convexity of G with the blocks that count as part of it in ``slack``; 0 where none is
        known."""
        ...

    def scale(self, x: Tensor) -> Tensor:
        """A typical curvature of the differentiable terms at x, shape (B,): the unit of step lengths."""
        ...

    def forward(self, x: Tensor) -> Blocks:
        """K_k x for every block."""
        ...

    def adjoint(self, p: Blocks) -> Tensor:
        """Σ_k K_kᵀ p_k."""
        ...

    def prox(self, x: Tensor, tau: Tensor) -> Tensor:
        """argmin_u ½‖u − x‖² + τ G(u), with one τ per task."""
        ...

    def prox_dual(self, p: Blocks, sigma: Blocks) -> Blocks:
        """argmin_u ½‖u − p_k‖² + σ_k F_k*(u) for every block, with one σ_k per task."""
        ...

    def slack(self, x: Tensor, t: Blocks, p: Blocks, back: Tensor) -> tuple[Tensor, Tensor]:
        """c and ‖r‖ of each task at t = Kx, back = Kᵀp and a p that ``prox_dual`` has returned."""
        ...


def optimality(mu: Tensor, rho: Tensor, scale: Tensor, slack: tuple[Tensor, Tensor]) -> Tensor:
    """√(2μ·gap), which bounds μ‖x − x̂‖ as a gradient norm does, and equals ‖r‖ where c = 0 and μ = ρ.

    Where no ρ > 0 is known nothing is bounded; there it is √(‖r‖² + 2sc) with the ``scale`` s in place of μ.
    """
    complementarity, residual = slack
    has_bound, squared = rho > 0, residual.double().square()
    by_gap = mu * (2 * complementarity + squared / torch.where(has_bound, rho, 1.0))
    return torch.where(has_bound, by_gap, squared + 2 * scale * complementarity).sqrt().to(residual.dtype)


def duality_gap(rho: Tensor, slack: tuple[Tensor, Tensor]) -> Tensor:
    """A valid bound on h(x) − h(x̂), shape (B,) in float64; +∞ where no ρ > 0 is known."""
    complementarity, residual = slack
    bound = complementarity + residual.double().square() / (2 * torch.where(rho > 0, rho, 1.0))
    return torch.where(rho > 0, bound, torch.inf)
