"""Hypergradient by the Neumann series of the inverse Hessian.

    q = (1/L) Σ_{k<K} (I − ∇²h(x̃)/L)^k ∇g(x̃),        z = −∂_θ⟨∇_x h(x̃, θ), q⟩

One term is one Hessian product: r ← r − ∇²h r/L, where r = ∇g − ∇²h q is both the next term (times L) and the
residual, so ‖r‖ ≤ (1 − μ/L)^K ‖∇g‖. A sample stops when its residual, recomputed from q, is at most δ; a warm start
continues the series from the previous adjoint. L is the certified bound of the components.

When to choose it: to reproduce methods that truncate the series, or where an estimate must be a fixed polynomial of
the Hessian. `cg-ift` needs about the square root of the number of terms.

References: Lorraine, Vicol & Duvenaud, *Optimizing millions of hyperparameters by implicit differentiation*, AISTATS
2020; Ghadimi & Wang, *Approximation methods for bilevel programming*, 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.implicit import ImplicitEstimator, certified_lipschitz, implicit_estimate
from bltoolbox.plugin import Ask, BiasLimit, Estimate, Linearization, expand, initial_residual, norm


class Neumann(ImplicitEstimator):
    """Implicit differentiation with a Neumann series.

    Args:
        terms: maximum number of terms K per sample.
    """

    limit = BiasLimit({"terms": (5, 20, 80)})

    def __init__(self, terms: Annotated[int, Gt(0)] = 1000) -> None:
        self.terms = terms

    def estimate(self, ask: Ask) -> Estimate:
        certified_lipschitz(ask.lower, "neumann")
        return implicit_estimate(NeumannSeries(), ask, self.terms, truncates=True)


@dataclass(frozen=True)
class NeumannState:
    """The partial sum q and r = ∇g − ∇²h q."""

    q: Tensor
    tol: Tensor
    residual: Tensor
    r: Tensor


class NeumannSeries:
    """q ← q + r/L, r ← r − ∇²h r/L."""

    def init(self, system: Linearization, rhs: Tensor, start: Tensor, tol: Tensor) -> NeumannState:
        if system.free is not None:
            # On pixels held by a constraint the system is the identity, solved here since L < 1 would not contract it.
            start = torch.where(system.free, start, rhs)
        r = initial_residual(system, rhs, start)
        return NeumannState(start, tol, norm(r), r)

    def step(self, system: Linearization, state: NeumannState) -> NeumannState:
        term = state.r / expand(certified_lipschitz(system.lower, "neumann"), state.r)
        r = state.r - system.hvp(term)
        return replace(state, q=state.q + term, r=r, residual=norm(r))
