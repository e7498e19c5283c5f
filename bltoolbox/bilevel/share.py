"""The samples of a batch, divided among the ranks.

Sampling does not depend on ranks, so it is the same on any number of them. A sample is computed where its warm start
lives, as long as no rank gets more than an even share; only the excess goes to ranks with room, as guests
whose warm starts travel there and back. For a full batch nothing travels. The division depends on the ids and the
number of ranks alone, so that a resumed run divides as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bltoolbox.bilevel.journal import Trial
from bltoolbox.bilevel.records import Rows
from bltoolbox.bilevel.warm_starts import Store
from bltoolbox.distributed.ranks import Ranks


@dataclass(frozen=True)
class Share:
    """The part of a batch that concerns one rank."""

    #: Positions in the batch that it computes.
    positions: Sequence[int]
    #: Its samples that others compute, and the samples of others that it computes, by rank.
    lent: Mapping[int, list[int]] = field(default_factory=dict)
    guests: Mapping[int, list[int]] = field(default_factory=dict)
    #: Whether any sample of the batch is a guest somewhere.
    travels: bool = False

    @contextmanager
    def hosting(self, ranks: Ranks, stores: Mapping[str, tuple[Store, Tensor]], keep: bool) -> Iterator[None]:
        """Have the rows of guests here, from ``stores`` with an example of their rows; ``keep`` what was written."""
        if not self.travels:
            yield
            return
        try:
            for store, like in stores.values():
                rows = _move(ranks, store, like, self.lent, self.guests)
                store.guests = {sample: rows.get(sample) for ids in self.guests.values() for sample in ids}
            yield
            if keep:
                for store, like in stores.values():
                    home = _move(ranks, store, like, self.guests, self.lent)
                    store.guests = {}
                    if home:
                        store.put(list(home), torch.stack(list(home.values())).to(like))
        finally:
            for store, _ in stores.values():
                store.guests = {}

    def bring_home(self, ranks: Ranks, trial: Trial, likes: Rows) -> None:
        """Hand over the rows that were computed for others, and add those that others computed."""
        if not self.travels:
            return
        samples: list[int] = []
        rows: dict[str, Tensor] = {}
        away = {sample for ids in self.guests.values() for sample in ids}
        for name, like in likes.items():
            by_sample = {
                sample: row for ids, values in trial for sample, row in zip(ids, values[name], strict=True)
            }
            store = Store(0, ranks)
            store.guests = {sample: by_sample[sample] for sample in away}
            home = _move(ranks, store, like, self.guests, self.lent)
            kept = {sample: row for sample, row in by_sample.items() if sample not in away} | home
            samples = list(kept)
            if kept:
                rows[name] = torch.stack([row.to(like) for row in kept.values()])
        trial[:] = [(samples, rows)] if samples else []


def divide(ids: Sequence[int], ranks: Ranks) -> Share:
    """The share of this rank in a batch."""
    count, size = len(ids), ranks.size
    if size == 1:
        return Share(range(count))
    workers = assign(ids, size)
    homes = torch.as_tensor(ids, dtype=torch.long) % size
    abroad = torch.nonzero(workers != homes).flatten().tolist()
    lent: dict[int, list[int]] = {}
    guests: dict[int, list[int]] = {}
    for position in abroad:
        home, worker = int(homes[position]), int(workers[position])
        if home == ranks.rank:
            lent.setdefault(worker, []).append(ids[position])
        if worker == ranks.rank:
            guests.setdefault(home, []).append(ids[position])
    positions = torch.nonzero(workers == ranks.rank).flatten().tolist()
    return Share(positions, lent, guests, bool(abroad))


def assign(ids: Sequence[int], size: int) -> Tensor:
    """Which rank computes the sample at each position: shares differ by at most one."""
    workers = torch.as_tensor(ids, dtype=torch.long) % size
    present = torch.bincount(workers, minlength=size)
    quota = torch.full((size,), len(ids) // size)
    # The remainder goes where most samples live.
    order = torch.argsort(-present, stable=True)
    quota[order[: len(ids) % size]] += 1
    surplus = [
        position
        for rank in torch.nonzero(present > quota).flatten().tolist()
        for position in torch.nonzero(workers == rank).flatten()[int(quota[rank]) :].tolist()
    ]
    room = [
        rank
        for rank in torch.nonzero(present < quota).flatten().tolist()
        for _ in range(int(quota[rank] - present[rank]))
    ]
    workers[surplus] = torch.tensor(room, dtype=torch.long)
    return workers


def _move(
    ranks: Ranks,
    store: Store,
    like: Tensor,
    away: Mapping[int, list[int]],
    here: Mapping[int, list[int]],
) -> dict[int, Tensor]:
    """Send the rows of ``away``, and return those of ``here`` that came."""
    out = {rank: store.lend(samples, like) for rank, samples in away.items()}
    present = {rank: torch.zeros(len(samples), dtype=torch.uint8) for rank, samples in here.items()}
    ranks.exchange({rank: flags for rank, (flags, _) in out.items()}, present)
    rows = {
        rank: torch.empty((len(samples), *like.shape[1:]), dtype=like.dtype)
        for rank, samples in here.items()
        if bool(present[rank].any())
    }
    ranks.exchange({rank: values for rank, (flags, values) in out.items() if bool(flags.any())}, rows)
    return {
        sample: rows[rank][k]
        for rank in rows
        for k, sample in enumerate(here[rank])
        if bool(present[rank][k])
    }
