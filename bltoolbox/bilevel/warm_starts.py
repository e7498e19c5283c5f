"""Warm starts by sample: the last solution and the last adjoint of every sample seen so far.

Rows live on the host, whatever the device of the run: device memory is that of a chunk. Large stores are in a
nameless memory-mapped file, which disappears with the process and which the system may write out: unreclaimable
memory does not grow with the data set. Rows come from a CUDA device through pinned memory while the device continues;
the next access waits for them.

A store remembers which rows changed since the last checkpoint. Each sample has two slots: within a transaction a row
is written to the inactive one, and ``commit`` switches. An oracle call that is interrupted leaves no
trace, and nothing is copied for that.

A store may keep its rows in half precision, or forget them at the end of each step. Both happen to every run alike,
interrupted or not, so that a resumed run continues exactly.

On several ranks sample i lives on rank i mod the number of ranks, for good; each store holds the rows of its rank. A
rank that computes for another has those samples as guests, for one oracle call.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bltoolbox.bilevel.guests import Guests
from bltoolbox.bilevel.half_precision import halve, is_halved, restored
from bltoolbox.bilevel.scratch import in_scratch
from bltoolbox.bilevel.transfers import Arrival, to_device, to_host
from bltoolbox.distributed.ranks import ALONE, Ranks

#: Stores of more bytes than this are mapped files.
MAPPED = 64 * 2**20

#: How warm starts are kept: as they are, rounded to half precision, or only until the end of a step.
Keeping = Literal["full", "float16", "none"]
#: Some rows as a checkpoint has them: ``ids``, ``rows`` and, in half precision, ``exponents``.
Part = dict[str, Tensor]


class Store:
    """Rows of one shape, by sample. Memory is taken when the first row is written."""

    def __init__(
        self, count: int, ranks: Ranks = ALONE, folder: Path | None = None, half: bool = False
    ) -> None:
        self.ranks = ranks
        #: Whether long rows are stored in half precision.
        self.half = half
        #: Where a mapped file is made if there is no better place.
        self.folder = folder
        self.count = len(range(ranks.rank, count, ranks.size))
        #: Two slots per sample: row i is ``rows[slot[i]·count + i]``.
        self.rows: Tensor | None = None
        #: Of rows in half precision.
        self.exponents: Tensor | None = None
        self.slot = torch.zeros(self.count, dtype=torch.long)
        self.present = torch.zeros(self.count, dtype=torch.bool)
        self._dirty = torch.zeros(self.count, dtype=torch.bool)
        #: What ``slot``, ``present`` and ``_dirty`` were before the transaction, and what it has written.
        self._before: tuple[Tensor, Tensor, Tensor] | None = None
        self._written = torch.zeros(self.count, dtype=torch.bool)
        self._arriving: list[tuple[Tensor, Arrival]] = []
        #: Rows of samples that live on other ranks.
        self.guests: Guests | None = None

    def owns(self, sample: int) -> bool:
        """Whether a sample lives here."""
        return sample % self.ranks.size == self.ranks.rank

    def get(self, samples: Sequence[int], cold: Tensor) -> Tensor:
        """The rows of ``samples``; where there is none yet, that of ``cold``."""
        present, rows = self._present_rows(samples)
        if rows is None or not present.any():
            return cold
        if self.guests:
            starts = cold.clone()  # in its layout, whatever that of the rows that travelled
            starts[present.to(cold.device)] = to_device(rows[present], cold)
            return starts
        rows = to_device(rows, cold)
        if present.all():
            return rows
        return torch.where(present.to(cold.device).view(-1, *(1,) * (cold.ndim - 1)), rows, cold)

    def has_any(self, samples: Sequence[int]) -> bool:
        """Whether there is a row of any of ``samples``."""
        return bool(self._present_rows(samples, flags=True)[0].any())

    def missing(self, samples: Sequence[int]) -> list[int]:
        """The positions of those ``samples`` that have no row."""
        present = self._present_rows(samples, flags=True)[0].flatten().tolist()
        return [position for position, has_row in enumerate(present) if not has_row]

    def put(self, samples: Sequence[int], rows: Tensor) -> None:
        """Write the rows of ``samples``."""
        if self.guests:
            mine, theirs = self._divided(samples)
            self.guests.put([samples[k] for k in theirs], rows[theirs])
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

    def lend(self, samples: Sequence[int], like: Tensor) -> Guests:
        """The rows of some samples that live here, to be sent to another rank."""
        lent = Guests(samples, like)
        lent.present, rows = self._present_rows(samples)
        if rows is not None:
            lent.rows[lent.present] = rows[lent.present].to(like.dtype)
        return lent

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

    def changed(self) -> Iterator[Part]:
        """Ids and rows (on the CPU) written since the last ``mark_saved``, a part at a time."""
        return self._parts(self._dirty)

    def everything(self) -> Iterator[Part]:
        """Ids and rows of all that is present, a part at a time."""
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
        if "exponents" in held:
            rows = restored(rows, held["exponents"])
        here = ids % self.ranks.size == self.ranks.rank
        if bool(here.any()):
            self.put(ids[here].tolist(), rows[here])

    def _index(self, samples: Sequence[int]) -> Tensor:
        """Local numbers of samples that live here."""
        return torch.as_tensor(samples, dtype=torch.long) // self.ranks.size

    def _ids(self, index: Tensor) -> Tensor:
        """The samples with these local numbers."""
        return index * self.ranks.size + self.ranks.rank

    def _place(self, index: Tensor) -> Tensor:
        return self.slot[index] * self.count + index

    def _read(self, index: Tensor) -> Tensor:
        assert self.rows is not None
        self._arrive()
        place = self._place(index)
        rows = self.rows[place]
        return rows if self.exponents is None else restored(rows, self.exponents[place])

    @staticmethod
    def _lands_at_once(rows: Tensor) -> bool:
        return rows.device.type != "cuda"

    def _arrive(self) -> None:
        """Store the rows that were being copied."""
        for place, arrival in self._arriving:
            assert self.rows is not None
            rows = arrival.wait()
            if self.exponents is not None:
                rows, self.exponents[place] = halve(rows)
            self.rows[place] = rows.to(self.rows)
        self._arriving.clear()

    def _allocate(self, like: Tensor) -> Tensor:
        """Room for all rows, those of three dimensions channels last, in a file without a name if it is large."""
        size, shape, dtype = 2 * self.count, tuple(like.shape[1:]), like.dtype
        if self.half and is_halved(like):
            dtype, self.exponents = torch.float16, torch.zeros(size, dtype=torch.int16)
        # Batches of such rows come and go in that order, so that a copy is a plain copy.
        channels_last = len(shape) == 3
        if channels_last:
            shape = (*shape[1:], shape[0])
        numbers = size * max(1, torch.Size(shape).numel())
        if numbers * dtype.itemsize > MAPPED:
            rows = _mapped(numbers, dtype, self.folder).view(size, *shape)
        else:
            rows = torch.empty((size, *shape), dtype=dtype)
        return rows.permute(0, 3, 1, 2) if channels_last else rows

    def _present_rows(self, samples: Sequence[int], flags: bool = False) -> tuple[Tensor, Tensor | None]:
        """Which of ``samples`` have a row, and unless only ``flags`` are wanted the rows, anything elsewhere."""
        mine, theirs = self._divided(samples)
        index = self._index([samples[k] for k in mine])
        present = self.present[index]
        rows = None if flags or not present.any() else self._read(index)
        if not theirs:
            return present, rows
        assert self.guests is not None
        numbers = self.guests.index([samples[k] for k in theirs])
        everyone = torch.zeros(len(samples), dtype=torch.bool)
        everyone[mine], everyone[theirs] = present, self.guests.present[numbers]
        if flags:
            return everyone, None
        starts = self.guests.rows.new_empty((len(samples), *self.guests.rows.shape[1:]))
        starts[theirs] = self.guests.rows[numbers]
        if rows is not None:
            starts[mine] = rows.to(starts)
        return everyone, starts

    def _divided(self, samples: Sequence[int]) -> tuple[list[int], list[int]]:
        """The places of samples that live here, and of guests."""
        if not self.guests:
            return list(range(len(samples))), []
        theirs = [k for k, sample in enumerate(samples) if sample in self.guests]
        return [k for k, sample in enumerate(samples) if sample not in self.guests], theirs

    def _parts(self, mask: Tensor) -> Iterator[Part]:
        index = torch.nonzero(mask).flatten()
        if self.rows is None or not len(index):
            return
        row = self.rows[0].numel() * self.rows.element_size()
        self._arrive()
        for numbers in index.split(max(1, MAPPED // (2 * row))):
            place = self._place(numbers)
            kept = {"ids": self._ids(numbers), "rows": self.rows[place].contiguous()}
            yield kept if self.exponents is None else kept | {"exponents": self.exponents[place]}


class StepStore(Store):
    """Rows of the samples of one step, forgotten at its end: memory for one batch, not for the data set."""

    def __init__(self, ranks: Ranks = ALONE, folder: Path | None = None) -> None:
        super().__init__(0, ranks, folder)
        #: Local numbers by sample, in the order in which they were asked for.
        self._numbers: dict[int, int] = {}

    def forget(self) -> None:
        """The step has ended; its memory serves the next one."""
        self._arriving.clear()
        self._numbers.clear()
        for flags in (self.present, self._dirty, self._written, self.slot):
            flags.zero_()

    def _index(self, samples: Sequence[int]) -> Tensor:
        for sample in samples:
            self._numbers.setdefault(int(sample), len(self._numbers))
        if len(self._numbers) > self.count:
            self._grow(max(len(self._numbers), 2 * self.count))
        return torch.tensor([self._numbers[int(sample)] for sample in samples], dtype=torch.long)

    def _ids(self, index: Tensor) -> Tensor:
        return torch.tensor(list(self._numbers), dtype=torch.long)[index]

    def _grow(self, count: int) -> None:
        self._arrive()
        before, more, rows = self.count, count - self.count, self.rows
        self.slot, self.present, self._dirty, self._written = (
            torch.cat([flags, flags.new_zeros(more)])
            for flags in (self.slot, self.present, self._dirty, self._written)
        )
        if self._before is not None:
            slot, present, dirty = (torch.cat([flags, flags.new_zeros(more)]) for flags in self._before)
            self._before = slot, present, dirty
        self.count = count
        if rows is not None:
            self.rows = self._allocate(rows)
            self.rows[:before], self.rows[count : count + before] = rows[:before], rows[before:]


class Stores(dict[str, Store]):
    """Stores by name, each made when it is first asked for; they begin, commit and roll back together."""

    def __init__(self, count: int, ranks: Ranks = ALONE, keeping: Keeping = "full") -> None:
        super().__init__()
        self.count = count
        self.ranks = ranks
        self.keeping = keeping
        #: Whether rows were forgotten since the last checkpoint, which then may not add to those before it.
        self.forgotten = False
        self.folder: Path | None = None
        self._open = False

    def __missing__(self, name: str) -> Store:
        if self.keeping == "none":
            store: Store = StepStore(self.ranks, self.folder)
        else:
            store = Store(self.count, self.ranks, self.folder, half=self.keeping == "float16")
        self[name] = store
        if self._open:
            store.begin()
        return store

    def lie_in(self, folder: Path) -> None:
        """The folder of large stores where there is no better place, also for later ones."""
        self.folder = folder
        for store in self.values():
            store.folder = folder

    def end_step(self) -> None:
        """A step has ended: forget its rows if they are kept no longer than that."""
        for store in self.values():
            if isinstance(store, StepStore):
                store.forget()
                self.forgotten = True

    def mark_saved(self) -> None:
        """Mark all rows of all stores as saved on disk."""
        self.forgotten = False
        for store in self.values():
            store.mark_saved()

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
    """A vector in a mapped file that is already unlinked; ``folder`` is used where there is no better place."""
    return in_scratch(folder, partial(_mapped_in, numbers, dtype))


def _mapped_in(numbers: int, dtype: torch.dtype, folder: Path) -> Tensor:
    """Its space is allocated now, so that a full disk cannot cause a crash later."""
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
