"""Independent sampling: each sample is in the batch with probability p, regardless of the others.

    P(i in B) = p = S/m,        v_i = 1/p for i in B, else 0

S is the expected batch size. An empty draw gives a zero step (apart from a penalty) and is not repeated: redrawing
would bias E[v_i].

When to choose it: the sampling of the theory with independent v_i; batch sizes vary.

Reference: Gower et al., *SGD: general analysis and improved rates*, ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt

from blt_builtins.samplers.sizes import refuse_large
from bltoolbox.plugin import Batch, Sampler, keyed_generator


class Independent(Sampler):
    """Each sample independently with the same probability.

    Args:
        size: expected number of samples per batch.
    """

    def __init__(self, size: Annotated[float, Gt(0)] = 32.0) -> None:
        self.size = size

    def init(self, m: int, seed: int) -> dict[str, Any]:
        refuse_large(self.size, m)
        return {"m": m, "seed": seed, "draw": 0}

    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        probability = self.size / state["m"]
        generator = keyed_generator("independent", state["seed"], state["draw"])
        draws = torch.rand(state["m"], dtype=torch.float64, generator=generator)
        ids = torch.nonzero(draws < probability).flatten().tolist()
        return Batch(ids, [1 / probability] * len(ids)), dict(state) | {"draw": state["draw"] + 1}
