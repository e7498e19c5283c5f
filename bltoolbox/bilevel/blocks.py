"""Which blocks of a finite sum a method uses: random, and the same on any number of ranks and after a resume.

    h_i(x, θ) = 1/n Σ_j h_ij(x, θ),        j ~ U{0, …, n−1}

The blocks of a task follow from the seed of the run, the task, the number of the oracle call and a name for what they
are used for, and from nothing else: not from the other tasks of a batch, nor from earlier draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import keyed_generator


@dataclass(frozen=True)
class BlockDraws:
    """The draws of one oracle call for the tasks ``ids``."""

    seed: int
    call: int
    ids: Tensor

    def blocks(self, purpose: str, blocks: int, count: int) -> Tensor:
        """``count`` independent block numbers for each task, uniform in 0, …, ``blocks`` − 1; shape (count, B).

        Different purposes have independent draws.
        """
        rows = [self._row(purpose, task, blocks, count) for task in self.ids.tolist()]
        return torch.stack(rows, dim=1).to(self.ids.device)

    def _row(self, purpose: str, task: int, blocks: int, count: int) -> Tensor:
        generator = keyed_generator("blocks", self.seed, purpose, task, self.call)
        return torch.randint(blocks, (count,), generator=generator)
