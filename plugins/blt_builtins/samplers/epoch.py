"""Random reshuffling: every sample once per epoch, in batches of `size`.

    v_i = m/|batch| for i in the batch, else 0

E[v_i] = 1 at each step, including a shorter last batch, whose weights are larger.

When to choose it: the default for mini-batch training; less variance over an epoch than independent draws.

Reference: Mishchenko, Khaled & Richtárik, *Random reshuffling: simple analysis with vast improvements*, NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt

from blt_builtins.samplers.sizes import refuse_large
from bltoolbox.plugin import Batch, Sampler, keyed_generator


class Epoch(Sampler):
    """Every sample once per epoch, in random order.

    Args:
        size: samples per batch.
    """

    def __init__(self, size: Annotated[int, Gt(0)] = 32) -> None:
        self.size = size

    def init(self, m: int, seed: int) -> dict[str, Any]:
        refuse_large(self.size, m)
        return {"m": m, "seed": seed, "epoch": 0, "position": 0}

    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        m, position = state["m"], state["position"]
        generator = keyed_generator("epoch", state["seed"], state["epoch"])
        ids = torch.randperm(m, generator=generator)[position : position + self.size].tolist()
        position += self.size
        turn = {"epoch": state["epoch"] + 1, "position": 0} if position >= m else {"position": position}
        return Batch(ids, [m / len(ids)] * len(ids)), dict(state) | turn
