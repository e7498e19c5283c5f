"""The single loop: a few iterations on x, a few on the adjoint q and one on θ, again and again.

    x_{k+1} = S_θk^K(x_k),   q_{k+1} = T^J(q_k),        θ_{k+1} = Π(θ_k − α_k z_k),   α_k = α_0 (k+1)^{−a}

S is one iteration of the lower-level solver for h(·, θ_k), and T one iteration of the hypergradient's linear solver for
∇²h q = ∇g; both start where they ended at the previous θ, and no accuracy is requested. In turn (Suonperä & Valkonen),
T works at x_{k+1} and z_k is formed from (x_{k+1}, q_{k+1}). Simultaneously (Dagréou et al., without noise), T works
at x_k, and z_k is formed from (x_k, q_k): all three move from the same point, and the first z of a sample is zero.

z_k approaches the hypergradient as θ settles, provided that θ moves slowly compared with x and q: α_k must be smaller
than for `isgd`, the more so the smaller K and J. The loss that is logged is that of x_{k+1}, which lags behind x̂(θ_k);
checks and evaluations solve the lower level to their own accuracy. The residuals reached are logged in every step.

When to choose it: all samples in every step (sampler `full`) or large batches from a small data set, since x and q
of a sample that is not drawn stand still while θ moves; and where even a loose tolerance takes many iterations.
Otherwise `isgd` spends its iterations where they are needed. With `gd` and `neumann` it is the method of the papers;
`mm` or `agd` with `cg-ift` is faster if K and J are above about 3, since momentum restarts in each step.

References: Suonperä & Valkonen, *Linearly convergent bilevel optimization with single-step inner methods*, Comput.
Optim. Appl. 2024; Dagréou, Ablin, Vaiter & Moreau, *A framework for bilevel optimization that enables stochastic and
global variance reduction algorithms*, NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from blt_builtins.upper_optimizers.schedule import descend, power_decay
from bltoolbox.plugin import Oracle, Step, Steps, Theta, UpperOptimizer, theta_norm

Count = Annotated[int, Gt(0)]


class SingleLoop(UpperOptimizer):
    """A fixed number of iterations on x and on the adjoint for each step on θ.

    Args:
        step: α_0.
        step_decay: exponent a of the step; 0 is a fixed step.
        iterations: number K of lower-level iterations per step.
        adjoint_iterations: number J of iterations on the adjoint per step; by default K.
        order: `in-turn` uses the new x for the adjoint and both for z; `simultaneous` updates everything from the
            values of the previous step.
    """

    needs_memory = True

    def __init__(
        self,
        step: Annotated[float, Gt(0)] = 1e-3,
        step_decay: Annotated[float, Ge(0)] = 0.0,
        iterations: Count = 1,
        adjoint_iterations: Count | None = None,
        order: Literal["in-turn", "simultaneous"] = "in-turn",
    ) -> None:
        self.step_size = step
        self.step_decay = step_decay
        self.iterations = iterations
        self.adjoint_iterations = iterations if adjoint_iterations is None else adjoint_iterations
        self.order = order

    def init(self, theta: Theta) -> dict[str, Any]:
        return {"k": 0, "shrunk": 1.0}

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        return dict(state) | {"shrunk": state["shrunk"] * factor}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        effort, adjoint = Steps(self.iterations), Steps(self.adjoint_iterations)
        result = oracle.hypergradient(theta, effort, adjoint, together=self.order == "simultaneous")
        alpha = state["shrunk"] * power_decay(self.step_size, self.step_decay, state["k"])
        moved = descend(oracle, theta, result.gradient, alpha)
        metrics = {"step_size": alpha, "gradient_norm": theta_norm(result.gradient.values())}
        after = dict(state) | {"k": state["k"] + 1}
        return Step(moved, after, result.value.value, metrics, penalty=result.value.penalty)
