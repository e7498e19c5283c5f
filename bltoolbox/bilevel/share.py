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

from bltoolbox.bilevel.guests import Guests, exchange
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
        likes = [like for _, like in stores.values()]
        try:
            lent = {
                rank: [store.lend(samples, like) for store, like in stores.values()]
                for rank, samples in self.lent.items()
            }
            arrived = exchange(ranks, lent, self.guests, likes)
            for (store, _), guests in zip(stores.values(), arrived, strict=True):
                store.guests = guests
            yield
            if keep:
                self._return_rows(ranks, stores, likes)
        finally:
            for store, _ in stores.values():
                store.guests = None

    def _return_rows(
        self, ranks: Ranks, stores: Mapping[str, tuple[Store, Tensor]], likes: Sequence[Tensor]
    ) -> None:
        """Hand over what was written for guests, and store what others wrote for samples that live here."""
        back = {
            rank: [store.guests.of(samples) for store, _ in stores.values() if store.guests is not None]
            for rank, samples in self.guests.items()
        }
        home = exchange(ranks, back, self.lent, likes)
        for (store, _), rows in zip(stores.values(), home, strict=True):
            store.guests = None
            if samples := [
                sample for sample, present in zip(rows.samples, rows.present.tolist(), strict=True) if present
            ]:
                store.put(samples, rows.rows[rows.present])

    def bring_home(self, ranks: Ranks, trial: Trial, likes: Rows) -> None:
        """Hand over the rows that were computed for others, and add those that others computed."""
        if not self.travels:
            return
        ids = [sample for samples, _ in trial for sample in samples]
        places = {sample: place for place, sample in enumerate(ids)}
        computed = {
            name: torch.cat([part[name].to(like) for _, part in trial])
            if trial
            else like.new_empty(like.shape)
            for name, like in likes.items()
        }
        back = {
            rank: [
                Guests(
                    samples,
                    rows,
                    torch.ones(len(samples), dtype=torch.bool),
                    rows[_at(places, samples)].cpu(),
                )
                for rows in computed.values()
            ]
            for rank, samples in self.guests.items()
        }
        home = exchange(ranks, back, self.lent, list(likes.values()))
        away = {sample for samples in self.guests.values() for sample in samples}
        own = [sample for sample in ids if sample not in away]
        rows = {
            name: torch.cat([computed[name][_at(places, own)], arrived.rows.to(likes[name])])
            for (name, arrived) in zip(likes, home, strict=True)
        }
        samples = [*own, *home[0].samples]
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


def _at(places: Mapping[int, int], samples: Sequence[int]) -> list[int]:
    return [places[sample] for sample in samples]
