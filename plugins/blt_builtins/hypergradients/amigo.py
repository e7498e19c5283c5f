"""AmIGO: warm-started stochastic steps on x and on the adjoint q, in turn.

    x ← x − α ∇h_j(x)                        T times, from the last x
    q ← q − β (∇²h_j(x) q − ∇g_k(x))         N times, from the last q, with one k and a new j each time
    z = ∂_θ g_k(x, θ) − ∂_θ⟨∇_x h_j(x, θ), q⟩

Both iterations continue where they ended at the previous θ (amortised), so that a few steps suffice as θ converges. If
the problem is not a finite sum, they are gradient descent on h and on ½qᵀ∇²h q − ⟨∇g, q⟩, and z is exact in the limit.

When to choose it: finite sums, also badly conditioned ones, where a truncated series would need many terms. With fixed
steps the noise of the blocks remains, and biases z in proportion to α; `saba` removes it at the price of memory.
`soba` is the case T = N = 1 with all directions taken at the old iterates.

Reference: Arbel & Mairal, *Amortized implicit differentiation for stochastic bilevel optimization*, ICLR 2022.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt
from torch import Tensor

from blt_builtins.hypergradients.finite_sum import (
    Decay,
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
from bltoolbox.plugin import Ask, BiasLimit, Estimate, expand


class AmIGO(FiniteSumEstimator):
    """Warm-started stochastic steps on x and on the adjoint.

    Args:
        steps: number N of steps on q, unless the optimizer requests a number of iterations.
        step: β, the length of a step on q; `auto` is 1/L with L a bound for all blocks.
        lower_steps: number T of steps on x, unless the optimizer requests a number.
        lower_step: α, the length of a step on x; `auto` is 1/L.
        step_decay: exponent a: in call k both lengths are multiplied by (k+1)^−a; 0 for fixed steps.
    """

    limit = BiasLimit({"steps": (5, 20, 80)})

    def __init__(
        self,
        steps: Annotated[int, Gt(0)] = 10,
        step: StepLength = "auto",
        lower_steps: Annotated[int, Gt(0)] = 10,
        lower_step: StepLength = "auto",
        step_decay: Decay = 0.0,
    ) -> None:
        self.steps = steps
        self.step = step
        self.lower_steps = lower_steps
        self.lower_step = lower_step
        self.step_decay = step_decay

    def estimate(self, ask: Ask) -> Estimate:
        lower, sampler = ask.lower, Sampler(ask)
        decay = (ask.call + 1) ** -self.step_decay
        lower_steps, steps = count_of(ask.lower_effort, self.lower_steps), ask.limit(self.steps)
        alpha = decay * step_length(ask, self.lower_step, "amigo", "lower_step")
        x = descend(sampler.lower("x", lower_steps), ask.solution, alpha)
        upper = sampler.upper()
        beta = decay * step_length(ask, self.step, "amigo", "step")
        q = self._adjoint(ask, sampler, x, upper.gradient(x), beta, steps)
        return Estimate(
            gradient_of(sampler.lower("mixed", 1)[0], upper, x, q, ask.weights),
            unmeasured(lower),
            each(lower, steps),
            memory={"adjoint": q},
            x=x,
            blocks=lower.blocks,
            lower_iterations=each(lower, lower_steps),
        )

    def _adjoint(
        self, ask: Ask, sampler: Sampler, x: Tensor, rhs: Tensor, beta: Tensor, steps: int
    ) -> Tensor:
        start = ask.memory.get("adjoint")
        q = rhs.new_zeros(rhs.shape) if start is None else start
        whole = ask.lower.linearize(x) if ask.lower.blocks == 1 else None
        for lower in sampler.lower("hessian", steps):
            system = lower.linearize(x) if whole is None else whole
            q = q - expand(beta, q) * (hessian_product(system, q) - rhs)
        return q
