"""Warm starts by sample: the last solution and the last adjoint of every sample that has been seen.

A store remembers which rows changed since the last checkpoint, and what the rows of an unfinished transaction
were before it: an oracle call that is interrupted leaves no trace.
"""

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
        self._dirty = torch.zeros(count, dtype=torch.bool)
        self._undo: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None

    def get(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        """The rows of ``samples``; where there is none yet, that of ``cold``."""
        index = torch.as_tensor(samples, dtype=torch.long)
        known = self.known[index]
        if self.rows is None or not known.any():
            return cold
        rows = self.rows[index.to(self.rows.device)].to(cold)
        if known.all():
            return rows
        return torch.where(known.to(cold.device).view(-1, *(1,) * (cold.ndim - 1)), rows, cold)

    def put(self, samples: Sequence[int], rows: Tensor) -> None:
        """Write the rows of ``samples``."""
        index = torch.as_tensor(samples, dtype=torch.long)
        if self.rows is None:
            layout = torch.channels_last if rows.ndim == 4 else torch.contiguous_format
            shape = (self.count, *rows.shape[1:])
            self.rows = torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=layout)
        place = index.to(self.rows.device)
        if self._undo is not None:
            self._undo.append((index, self.rows[place].clone(), self.known[index], self._dirty[index]))
        self.rows[place] = rows.to(self.rows)
        self.known[index] = True
        self._dirty[index] = True

    def begin(self) -> None:
        """Remember what is overwritten from now on."""
        self._undo = []

    def commit(self) -> None:
        """What was written since ``begin`` stays."""
        self._undo = None

    def rollback(self) -> None:
        """What was written since ``begin`` never was."""
        for index, rows, known, dirty in reversed(self._undo or []):
            assert self.rows is not None
            self.rows[index.to(self.rows.device)] = rows
            self.known[index] = known
            self._dirty[index] = dirty
        self._undo = None

    def changed(self) -> tuple[Tensor, Tensor]:
        """Ids and rows (on the CPU) written since the last ``settle``."""
        return self._select(self._dirty)

    def everything(self) -> tuple[Tensor, Tensor]:
        """Ids and rows of all that is known."""
        return self._select(self.known)

    def settle(self) -> None:
        """Everything is safe on disk."""
        self._dirty.zero_()

    def _select(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.nonzero(mask).flatten()
        if self.rows is None:
            return ids, torch.empty(0)
        return ids, self.rows[ids.to(self.rows.device)].cpu().contiguous()
