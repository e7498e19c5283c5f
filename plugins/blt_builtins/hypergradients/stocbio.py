"""stocBiO and BSA: stochastic gradient steps on x, then a Neumann series with a new block in every factor.

    x ← x − α ∇h_j(x)   T times
    q = η Σ_{i<N} Π_{l≤i} (I − η∇²h_{j_l}(x)) ∇g_k(x),        z = ∂_θ g_k(x, θ) − ∂_θ⟨∇_x h_j(x, θ), q⟩

With blocks j_l drawn independently, the mean of q is the truncated series η Σ_{i<N} (I − η∇²h)^i ∇g, which differs from
(∇²h)⁻¹∇g by at most (1 − ημ)^N ‖∇g‖/μ. With ``truncation: random`` only one term is computed, for i drawn uniformly
in 0, …, N−1 and N times as long: q = ηN Π_{l≤i} (I − η∇²h_{j_l}) ∇g_k has the same mean, half the cost and a larger
variance. x is a warm start, q is not. If the problem is not a finite sum, this is gradient descent with `neumann`.

When to choose it: large finite sums, with N a few times L/μ and a small α: the noise of x biases z in proportion to α,
since ∇g and ∂_θ∇h see the same x, and 1/L is the longest step, not the most accurate one. `amigo` continues q from
step to step and needs far fewer products; `saba` has no noise floor.

References: Ji, Yang & Liang, *Bilevel optimization: convergence analysis and enhanced design*, ICML 2021 (series);
Ghadimi & Wang, *Approximation methods for bilevel programming*, 2018 (random truncation).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.finite_sum import (
    FiniteSumEstimator,
    Sampler,
    StepLength,
    count_of,
    descend,
    each,
    gradient_of,
    hessian_product,
    step_length,
    unmeasured,
)
from bltoolbox.plugin import Ask, BiasLimit, Estimate, Lower, Rows, Upper, expand


class StocBiO(FiniteSumEstimator):
    """Stochastic gradient steps and a stochastic Neumann series.

    Args:
        terms: number N of terms of the series, unless the optimizer requests a number of iterations.
        step: η, the length of a step of the series; `auto` is 1/L with L a bound for all blocks.
        lower_steps: number T of gradient steps on x, unless the optimizer requests a number.
        lower_step: α, the length of a gradient step; `auto` is 1/L.
        truncation: `series` sums all N terms; `random` computes one of them, as BSA does.
    """

    limit = BiasLimit({"terms": (5, 20, 80)})

    def __init__(
        self,
        terms: Annotated[int, Gt(0)] = 20,
        step: StepLength = "auto",
        lower_steps: Annotated[int, Gt(0)] = 10,
        lower_step: StepLength = "auto",
        truncation: Literal["series", "random"] = "series",
    ) -> None:
        self.terms = terms
        self.step = step
        self.lower_steps = lower_steps
        self.lower_step = lower_step
        self.truncation = truncation

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        return {}

    def estimate(self, ask: Ask) -> Estimate:
        lower, sampler = ask.lower, Sampler(ask)
        steps, terms = count_of(ask.lower_effort, self.lower_steps), max(1, ask.limit(self.terms))
        x = descend(
            sampler.lower("x", steps),
            ask.solution,
            step_length(ask, self.lower_step, "stocbio", "lower_step"),
        )
        upper = sampler.upper()
        q, products = self._series(ask, sampler, x, upper.gradient(x), terms)
        return Estimate(
            gradient_of(sampler.lower("mixed", 1)[0], upper, x, q, ask.weights),
            unmeasured(lower),
            products,
            x=x,
            blocks=lower.blocks,
            lower_iterations=each(lower, steps),
        )

    def _series(
        self, ask: Ask, sampler: Sampler, x: Tensor, rhs: Tensor, terms: int
    ) -> tuple[Tensor, Tensor]:
        """q, and the number of Hessian products of each task."""
        eta = expand(step_length(ask, self.step, "stocbio", "step"), x)
        last = each(ask.lower, terms - 1)
        if self.truncation == "random":
            last = sampler.draws.blocks("truncation", terms, 1)[0]
        r, total = rhs, rhs
        whole = ask.lower.linearize(x) if ask.lower.blocks == 1 else None
        for i, lower in enumerate(sampler.lower("hessian", int(last.max()))):
            index = torch.nonzero(i < last).flatten()
            system = lower.linearize(x) if whole is None else whole
            if len(index) < len(x):
                system = system.take(index)
            r = r.index_add(0, index, -eta[index] * hessian_product(system, r[index]))
            total = total + r
        return eta * (terms * r if self.truncation == "random" else total), last
