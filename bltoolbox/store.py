"""Warm starts by sample: the last solution and the last adjoint of every sample that has been seen.

A store remembers which rows changed since the last checkpoint, and what the rows of an unfinished transaction
were before it: an oracle call that is interrupted leaves no trace.

On several ranks sample i lives on rank i mod the number of ranks, for good; each store holds the rows of its rank. A
rank that computes for another has those samples as guests, for one oracle call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bltoolbox.ranks import ALONE, Ranks


class Store:
    """Rows of one shape, by sample. Memory is taken when the first row is written."""

    def __init__(self, count: int, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.count = len(range(ranks.rank, count, ranks.size))
        self.rows: Tensor | None = None
        self.known = torch.zeros(self.count, dtype=torch.bool)
        self._dirty = torch.zeros(self.count, dtype=torch.bool)
        self._undo: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
        #: Samples of other ranks, with their rows where there are any.
        self.guests: dict[int, Tensor | None] = {}

    def owns(self, sample: int) -> bool:
        """Whether a sample lives here."""
        return sample % self.ranks.size == self.ranks.rank

    def get(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        """The rows of ``samples``; where there is none yet, that of ``cold``."""
        if self.guests:
            return self._get_with_guests(samples, cold)
        index = self._index(samples)
        known = self.known[index]
        if self.rows is None or not known.any():
            return cold
        rows = self.rows[index.to(self.rows.device)].to(cold)
        if known.all():
            return rows
        return torch.where(known.to(cold.device).view(-1, *(1,) * (cold.ndim - 1)), rows, cold)

    def put(self, samples: Sequence[int], rows: Tensor) -> None:
        """Write the rows of ``samples``."""
        if self.guests:
            mine = [k for k, sample in enumerate(samples) if sample not in self.guests]
            for k, sample in enumerate(samples):
                if sample in self.guests:
                    self.guests[sample] = rows[k]
            samples, rows = [samples[k] for k in mine], rows[mine]
            if not mine:
                return
        index = self._index(samples)
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

    def lend(self, samples: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``samples`` (own or guests) have a row, and the rows, zero elsewhere: one a sample, as ``like``."""
        known = torch.zeros(len(samples), dtype=torch.uint8)
        rows = torch.zeros((len(samples), *like.shape[1:]), dtype=like.dtype)
        for k, sample in enumerate(samples):
            row = self.guests[sample] if sample in self.guests else self._row(sample)
            if row is not None:
                known[k] = 1
                rows[k] = row.to(rows)
        return known, rows

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

    def restore(self, held: Mapping[str, Tensor]) -> None:
        """Rows from a checkpoint, whoever wrote them: those that live here are taken."""
        ids, rows = held["ids"], held["rows"]
        if not len(ids):
            return
        here = ids % self.ranks.size == self.ranks.rank
        if bool(here.any()):
            self.put(ids[here].tolist(), rows[here])

    def _index(self, samples: Sequence[int]) -> Tensor:
        """Where the rows of samples that live here are."""
        return torch.as_tensor(samples, dtype=torch.long) // self.ranks.size

    def _row(self, sample: int) -> Tensor | None:
        place = sample // self.ranks.size
        return self.rows[place] if self.rows is not None and self.known[place] else None

    def _get_with_guests(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        found = cold.clone()
        for k, sample in enumerate(samples):
            row = self.guests[sample] if sample in self.guests else self._row(sample)
            if row is not None:
                found[k] = row.to(cold)
        return found

    def _select(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.nonzero(mask).flatten()
        if self.rows is None:
            return ids, torch.empty(0)
        rows = self.rows[ids.to(self.rows.device)].cpu().contiguous()
        return ids * self.ranks.size + self.ranks.rank, rows
