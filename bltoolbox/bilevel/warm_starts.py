"""Warm starts by sample: the last solution and the last adjoint of every sample seen so far.

Rows live on the host, whatever the device of the run: device memory is that of a chunk. Large stores are in a
nameless memory-mapped file, which disappears with the process and which the system may write out: unreclaimable
memory does not grow with the data set. Rows come from a CUDA device through pinned memory while the device continues;
the next access waits for them.

A store remembers which rows changed since the last checkpoint. Each sample has two slots: within a transaction a row
is written to the inactive one, and ``commit`` switches. An oracle call that is interrupted leaves no
trace, and nothing is copied for that.

On several ranks sample i lives on rank i mod the number of ranks, for good; each store holds the rows of its rank. A
rank that computes for another has those samples as guests, for one oracle call.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from bltoolbox.bilevel.transfers import Arrival, to_device, to_host
from bltoolbox.distributed.ranks import ALONE, Ranks

#: Stores of more bytes than this are mapped files.
MAPPED = 64 * 2**20


class Store:
    """Rows of one shape, by sample. Memory is taken when the first row is written."""

    def __init__(self, count: int, ranks: Ranks = ALONE, folder: Path | None = None) -> None:
        self.ranks = ranks
        #: Where a mapped file is made; the system's folder for temporary files if None.
        self.folder = folder
        self.count = len(range(ranks.rank, count, ranks.size))
        #: Two slots per sample: row i is ``rows[slot[i]·count + i]``.
        self.rows: Tensor | None = None
        self.slot = torch.zeros(self.count, dtype=torch.long)
        self.present = torch.zeros(self.count, dtype=torch.bool)
        self._dirty = torch.zeros(self.count, dtype=torch.bool)
        #: What ``slot``, ``present`` and ``_dirty`` were before the transaction, and what it has written.
        self._before: tuple[Tensor, Tensor, Tensor] | None = None
        self._written = torch.zeros(self.count, dtype=torch.bool)
        self._arriving: list[tuple[Tensor, Arrival]] = []
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
        present = self.present[index]
        if self.rows is None or not present.any():
            return cold
        rows = to_device(self._read(index), cold)
        if present.all():
            return rows
        return torch.where(present.to(cold.device).view(-1, *(1,) * (cold.ndim - 1)), rows, cold)

    def has_any(self, samples: Sequence[int]) -> bool:
        """Whether there is a row of any of ``samples``."""
        if self.guests:
            return any(
                (self.guests[sample] if sample in self.guests else self._row(sample)) is not None
                for sample in samples
            )
        return bool(self.present[self._index(samples)].any())

    def has_all(self, samples: Sequence[int]) -> bool:
        """Whether there is a row of each of ``samples``."""
        if self.guests:
            return all(self.has_any([sample]) for sample in samples)
        return bool(self.present[self._index(samples)].all())

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
            self.rows = self._allocate(rows)
        if self._before is not None:
            fresh = index[~self._written[index]]
            self.slot[fresh] = 1 - self.slot[fresh]
            self._written[index] = True
        self._arrive()
        self._arriving.append((self._place(index), to_host(rows.detach())))
        self.present[index] = True
        self._dirty[index] = True
        if self._lands_at_once(rows):
            self._arrive()

    def lend(self, samples: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``samples`` (own or guests) have a row, and the rows, zero elsewhere: one per sample, as
        ``like``."""
        present = torch.zeros(len(samples), dtype=torch.uint8)
        rows = torch.zeros((len(samples), *like.shape[1:]), dtype=like.dtype)
        for k, sample in enumerate(samples):
            row = self.guests[sample] if sample in self.guests else self._row(sample)
            if row is not None:
                present[k] = 1
                rows[k] = row.to(rows)
        return present, rows

    def begin(self) -> None:
        """From now on changes take effect only with ``commit``."""
        self._before = self.slot.clone(), self.present.clone(), self._dirty.clone()

    def commit(self) -> None:
        """Make what was written since ``begin`` valid."""
        self._before = None
        self._written.zero_()

    def rollback(self) -> None:
        """Discard what was written since ``begin``."""
        if self._before is not None:
            self._arrive()
            self.slot, self.present, self._dirty = self._before
        self.commit()

    def undo(self) -> None:
        """Discard what the transaction has written so far, and continue it."""
        self.rollback()
        self.begin()

    def changed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows (on the CPU) written since the last ``mark_saved``, a part at a time."""
        return self._parts(self._dirty)

    def everything(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and rows of all that is known, a part at a time."""
        return self._parts(self.present)

    @property
    def changes(self) -> int:
        """How many rows were written since the last ``mark_saved``."""
        return int(self._dirty.sum())

    def mark_saved(self) -> None:
        """Mark all rows as saved on disk."""
        self._dirty.zero_()

    def restore(self, held: Mapping[str, Tensor]) -> None:
        """Load rows from a checkpoint, whoever wrote them: those that live here are kept."""
        ids, rows = held["ids"], held["rows"]
        if not len(ids):
            return
        here = ids % self.ranks.size == self.ranks.rank
        if bool(here.any()):
            self.put(ids[here].tolist(), rows[here])

    def _index(self, samples: Sequence[int]) -> Tensor:
        """Local numbers of samples that live here."""
        return torch.as_tensor(samples, dtype=torch.long) // self.ranks.size

    def _place(self, index: Tensor) -> Tensor:
        return self.slot[index] * self.count + index

    def _read(self, index: Tensor) -> Tensor:
        assert self.rows is not None
        self._arrive()
        return self.rows[self._place(index)]

    @staticmethod
    def _lands_at_once(rows: Tensor) -> bool:
        return rows.device.type != "cuda"

    def _arrive(self) -> None:
        """Store the rows that were being copied."""
        for place, arrival in self._arriving:
            assert self.rows is not None
            self.rows[place] = arrival.wait().to(self.rows)
        self._arriving.clear()

    def _allocate(self, like: Tensor) -> Tensor:
        """Room for all rows, those of three dimensions channels last, in a file without a name if it is large."""
        size, shape = 2 * self.count, tuple(like.shape[1:])
        # Batches of such rows come and go in that order, so that a copy is a plain copy.
        channels_last = len(shape) == 3
        if channels_last:
            shape = (*shape[1:], shape[0])
        numbers = size * max(1, torch.Size(shape).numel())
        if numbers * like.element_size() > MAPPED:
            rows = _mapped(numbers, like.dtype, self.folder).view(size, *shape)
        else:
            rows = torch.empty((size, *shape), dtype=like.dtype)
        return rows.permute(0, 3, 1, 2) if channels_last else rows

    def _row(self, sample: int) -> Tensor | None:
        index = torch.tensor([sample // self.ranks.size])
        return self._read(index)[0] if self.rows is not None and self.present[index[0]] else None

    def _get_with_guests(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        rows = cold.clone()
        for k, sample in enumerate(samples):
            row = self.guests[sample] if sample in self.guests else self._row(sample)
            if row is not None:
                rows[k] = row.to(cold)
        return rows

    def _parts(self, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        index = torch.nonzero(mask).flatten()
        if self.rows is None or not len(index):
            return
        row = self.rows[0].numel() * self.rows.element_size()
        for places in index.split(max(1, MAPPED // (2 * row))):
            yield places * self.ranks.size + self.ranks.rank, self._read(places).contiguous()


class Stores(dict[str, Store]):
    """Stores by name, each made when it is first asked for; they begin, commit and roll back together."""

    def __init__(self, count: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.count = count
        self.ranks = ranks
        self.folder: Path | None = None
        self._open = False

    def __missing__(self, name: str) -> Store:
        store = self[name] = Store(self.count, self.ranks)
        store.folder = self.folder
        if self._open:
            store.begin()
        return store

    def lie_in(self, folder: Path) -> None:
        """The folder of large stores, also for later ones."""
        self.folder = folder
        for store in self.values():
            store.folder = folder

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything written inside takes effect at the end, or nothing does."""
        self._open = True
        for store in self.values():
            store.begin()
        try:
            yield
        except BaseException:
            for store in self.values():
                store.rollback()
            raise
        else:
            for store in self.values():
                store.commit()
        finally:
            self._open = False


def mapped_copy(rows: Tensor, folder: Path | None) -> Tensor:
    """A copy that takes no memory of the process: in a mapped file without a name."""
    return _mapped(rows.numel(), rows.dtype, folder).view(rows.shape).copy_(rows)


def _mapped(numbers: int, dtype: torch.dtype, folder: Path | None) -> Tensor:
    """A vector in a mapped file that is already unlinked. Its space is allocated now, so that a full disk cannot
    cause a crash later."""
    descriptor, name = tempfile.mkstemp(prefix="warm-", suffix=".rows", dir=folder)
    try:
        size = numbers * dtype.itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        return torch.from_file(name, shared=True, size=numbers, dtype=dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)
