"""Nice sampling: a uniformly random subset of `size` samples at each step.

    P(batch = B) = 1/C(m, S) for |B| = S,        v_i = m/S for i in B, else 0

When to choose it: the sampling of the convergence theory with a fixed batch size; steps are independent of each other.

Reference: Richtárik & Takáč, *Parallel coordinate descent methods for big data optimization*, Math. Program. 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt

from blt_builtins.samplers.sizes import refuse_large
from bltoolbox.plugin import Batch, Sampler, keyed_generator


class Nice(Sampler):
    """A uniformly random subset at each step.

    Args:
        size: samples per batch.
    """

    def __init__(self, size: Annotated[int, Gt(0)] = 32) -> None:
        self.size = size

    def init(self, m: int, seed: int) -> dict[str, Any]:
        refuse_large(self.size, m)
        return {"m": m, "seed": seed, "draw": 0}

    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        generator = keyed_generator("nice", state["seed"], state["draw"])
        ids = torch.randperm(state["m"], generator=generator)[: self.size].tolist()
        weights = [state["m"] / self.size] * self.size
        return Batch(ids, weights), dict(state) | {"draw": state["draw"] + 1}
