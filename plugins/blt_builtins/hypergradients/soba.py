"""SOBA: one stochastic step on x, on the adjoint q and on θ at a time, all from the same point.

    D_x = ∇h_j(x)        D_q = ∇²h_j(x) q − ∇g_k(x)        z = ∂_θ g_k(x, θ) − ∂_θ⟨∇_x h_j(x, θ), q⟩
    x ← x − ρ D_x        q ← q − ρ D_q                     θ ← θ − γ z, by the optimizer

with one block j of h and one block k of g, and all three directions at the old (x, q, θ). Each of them is linear in
h_j and g_k, hence unbiased. The first z has no part from q, which is zero. The effort that an optimizer requests is
ignored: a call is one step. If the problem is not a finite sum, this is the simultaneous single loop.

When to choose it: finite sums where a step must be as cheap as a stochastic gradient. γ must be small compared with ρ,
since x and q only follow θ, and line searches (`hoag`, `isgd-ls`) compare values that z does not yet predict; with
fixed ρ a noise floor remains, which ``step_decay`` (1/2, say) or `saba` removes.

Reference: Dagréou, Ablin, Vaiter & Moreau, *A framework for bilevel optimization that enables stochastic and global
variance reduction algorithms*, NeurIPS 2022.
"""

from __future__ import annotations

import torch

from blt_builtins.hypergradients.finite_sum import (
    Decay,
    FiniteSumEstimator,
    Sampler,
    StepLength,
    each,
    gradient_of,
    hessian_product,
    step_length,
    unmeasured,
)
from bltoolbox.plugin import Ask, BiasLimit, Estimate, expand


class SOBA(FiniteSumEstimator):
    """One simultaneous stochastic step per call.

    Args:
        step: ρ, the length of the steps on x and q; `auto` is 1/L with L a bound for all blocks.
        step_decay: exponent a: in call k the length is multiplied by (k+1)^−a; 0 for fixed steps.
    """

    limit = BiasLimit(calls=(5, 20, 80))

    def __init__(self, step: StepLength = "auto", step_decay: Decay = 0.0) -> None:
        self.step = step
        self.step_decay = step_decay

    def estimate(self, ask: Ask) -> Estimate:
        whole, x, sampler = ask.lower, ask.solution, Sampler(ask)
        lower, upper = sampler.lower("step", 1)[0], sampler.upper()
        start = ask.memory.get("adjoint")
        q = torch.zeros_like(x) if start is None else start
        rho = expand((ask.call + 1) ** -self.step_decay * step_length(ask, self.step, "soba", "step"), x)
        direction = hessian_product(lower.linearize(x), q) - upper.gradient(x)
        return Estimate(
            gradient_of(lower, upper, x, q, ask.weights),
            unmeasured(whole),
            each(whole, 1),
            memory={"adjoint": q - rho * direction},
            x=whole.project(x - rho * lower.gradient(x)),
            blocks=whole.blocks,
            lower_iterations=each(whole, 1),
        )
