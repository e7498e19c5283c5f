"""Importance sampling: samples that mattered when they were last drawn are drawn more often, and weigh less.

    p_i = (1 − λ) s_i / Σ_j s_j + λ/m,        v_i = c_i/(S p_i),   c_i how often i was drawn in S draws with replacement

s_i is what the last step with sample i has seen of it: its loss |g_i|, the slope ‖∇g_i‖ or the gradient norm ‖z_i‖; the
mean of the others as long as it was never drawn. p is fixed before the draw, so that E[v_i] = 1 whatever s is, and

    E[v_i²] = 1 − 1/S + 1/(S p_i) ≤ 1 − 1/S + m/(S λ)

The variance of z is least where p_i ∝ ‖z_i‖. Those norms are known only from earlier θ; λ, the uniform part, bounds the
harm of a number that is out of date. A sample drawn twice is solved once, so that a batch has at most S samples.

When to choose it: a few samples dominate the loss. Where all are alike, `epoch` has less variance, since it visits
every sample equally often; see the comparison on the page of results. `by: gradient` costs a mixed derivative per
sample and needs a hypergradient with an adjoint; loss and slope cost nothing.

References: Zhao & Zhang, *Stochastic optimization with importance sampling for regularized loss minimization*, ICML
2015; Needell, Srebro & Ward, *Stochastic gradient descent, weighted sampling, and the randomized Kaczmarz algorithm*,
Math. Program. 2016.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from blt_builtins.samplers.sizes import refuse_large
from bltoolbox.plugin import Batch, Rows, Sampler, keyed_generator


class Importance(Sampler):
    """Draws with replacement, more often where much was seen.

    Args:
        size: draws in a step; a batch has at most this many samples.
        by: what a sample's probability follows: its loss, the slope ‖∇g_i‖ or the gradient norm ‖z_i‖.
        mix: λ, the part of the probability that is uniform; 1 is uniform sampling with replacement.
    """

    def __init__(
        self,
        size: Annotated[int, Gt(0)] = 32,
        by: Literal["loss", "slope", "gradient"] = "loss",
        mix: Annotated[float, Gt(0), Le(1)] = 0.5,
    ) -> None:
        self.size = size
        self.wants = by
        self.mix = mix

    def init(self, m: int, seed: int) -> dict[str, Any]:
        refuse_large(self.size, m)
        nothing = torch.zeros(m, dtype=torch.float64)
        return {"m": m, "seed": seed, "draw": 0, "scores": nothing, "known": nothing.bool()}

    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        p = self.probabilities(state)
        generator = keyed_generator("importance", state["seed"], state["draw"])
        places = torch.rand(self.size, dtype=torch.float64, generator=generator)
        # The first i with places < p_0 + … + p_i; their sum may be just below 1.
        drawn = torch.searchsorted(p.cumsum(0), places, right=True).clamp_max(state["m"] - 1)
        return batch_of(drawn.tolist(), p), dict(state) | {"draw": state["draw"] + 1}

    def observe(self, state: Mapping[str, Any], batch: Batch, seen: Rows) -> dict[str, Any]:
        ids = torch.as_tensor(batch.ids, dtype=torch.long)
        scores = state["scores"].index_copy(0, ids, seen[self.wants].abs())
        return dict(state) | {"scores": scores, "known": state["known"].index_fill(0, ids, True)}

    def probabilities(self, state: Mapping[str, Any]) -> Tensor:
        """p, shape (m,)."""
        m, scores, scored = state["m"], state["scores"], state["known"]
        uniform = torch.full((m,), 1 / m, dtype=torch.float64)
        total = scores[scored].sum()
        if not bool(total > 0):
            return uniform
        scores = torch.where(scored, scores, total / scored.sum())
        return (1 - self.mix) * scores / scores.sum() + self.mix * uniform


def batch_of(drawn: Sequence[int], p: Tensor) -> Batch:
    """The samples of a sequence of draws, each once, with v_i = c_i/(S p_i)."""
    counts = sorted(Counter(drawn).items())
    weights = [count / (len(drawn) * float(p[i])) for i, count in counts]
    return Batch([i for i, _ in counts], weights)
