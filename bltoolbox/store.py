"""Warm starts by sample: the last solution and the last adjoint of every sample that has been seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Store:
    """Rows of one shape, by sample. Memory is taken when the first row is written."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Tensor | None = None
        self.known = torch.zeros(count, dtype=torch.bool)

    def get(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        """The rows of ``samples``; where there is none yet, that of ``cold``."""
        index = torch.as_tensor(samples, dtype=torch.long)
        known = self.known[index]
        if self.rows is None or not known.any():
            return cold
        rows = self.rows[index].to(cold)
        if known.all():
            return rows
        return torch.where(known.to(cold.device).view(-1, *(1,) * (cold.ndim - 1)), rows, cold)

    def put(self, samples: Sequence[int], rows: Tensor) -> None:
        index = torch.as_tensor(samples, dtype=torch.long)
        if self.rows is None:
            layout = torch.channels_last if rows.ndim == 4 else torch.contiguous_format
            self.rows = torch.empty(
                self.count, *rows.shape[1:], dtype=rows.dtype, device=rows.device, memory_format=layout
            )
        self.rows[index.to(self.rows.device)] = rows.to(self.rows)
        self.known[index] = True
