"""Rows of samples that live on other ranks, for one oracle call, and the one message that carries them.

A message has, for each store in turn, one byte per sample that tells whether there is a row, and then a row for each
sample, zero where there is none: its length follows from the samples alone, so that nothing need be announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bltoolbox.distributed.ranks import Ranks


class Guests:
    """Rows by sample, on the host; those that are not ``present`` have none."""

    def __init__(
        self, samples: Sequence[int], like: Tensor, present: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        self.samples = list(samples)
        self._numbers = {sample: number for number, sample in enumerate(self.samples)}
        self.present = torch.zeros(len(self.samples), dtype=torch.bool) if present is None else present
        self.rows = _zeros(len(self.samples), like) if rows is None else rows

    def __len__(self) -> int:
        return len(self.samples)

    def __contains__(self, sample: object) -> bool:
        return sample in self._numbers

    def index(self, samples: Sequence[int]) -> Tensor:
        """The numbers of some guests."""
        return torch.tensor([self._numbers[sample] for sample in samples], dtype=torch.long)

    def put(self, samples: Sequence[int], rows: Tensor) -> None:
        """Write the rows of some guests."""
        index = self.index(samples)
        self.rows[index] = rows.detach().to(self.rows)
        self.present[index] = True

    def of(self, samples: Sequence[int]) -> Guests:
        """Some of them."""
        index = self.index(samples)
        return Guests(samples, self.rows, self.present[index], self.rows[index])

    @classmethod
    def together(cls, parts: Sequence[Guests], like: Tensor) -> Guests:
        """All of several."""
        samples = [sample for batch in parts for sample in batch.samples]
        present = torch.cat([torch.zeros(0, dtype=torch.bool), *(batch.present for batch in parts)])
        return cls(samples, like, present, torch.cat([_zeros(0, like), *(batch.rows for batch in parts)]))


def exchange(
    ranks: Ranks,
    away: Mapping[int, Sequence[Guests]],
    here: Mapping[int, Sequence[int]],
    likes: Sequence[Tensor],
) -> list[Guests]:
    """Send rows to ranks, and return those of the samples ``here`` by store: one message to and from each rank.

    ``away`` has the rows of each store in the order of ``likes``, by rank.
    """
    outgoing = {rank: _packed(parts) for rank, parts in away.items()}
    incoming = {
        rank: torch.empty(sum(_length(len(samples), like) for like in likes), dtype=torch.uint8)
        for rank, samples in here.items()
    }
    ranks.exchange(outgoing, incoming)
    arrived = [_unpacked(incoming[rank], samples, likes) for rank, samples in here.items()]
    return [Guests.together([parts[number] for parts in arrived], like) for number, like in enumerate(likes)]


def _zeros(count: int, like: Tensor) -> Tensor:
    return torch.zeros((count, *like.shape[1:]), dtype=like.dtype)


def _length(count: int, like: Tensor) -> int:
    return count * (1 + like.shape[1:].numel() * like.element_size())


def _packed(parts: Sequence[Guests]) -> Tensor:
    pieces = []
    for part in parts:
        pieces += [part.present.to(torch.uint8), part.rows.contiguous().flatten().view(torch.uint8)]
    return torch.cat(pieces)


def _unpacked(message: Tensor, samples: Sequence[int], likes: Sequence[Tensor]) -> list[Guests]:
    parts, place, count = [], 0, len(samples)
    for like in likes:
        flags, place = message[place : place + count], place + count
        size = _length(count, like) - count
        # A copy begins where numbers may begin in memory, whatever precedes it in the message.
        content, place = message[place : place + size].clone(), place + size
        rows = content.view(like.dtype).view(count, *like.shape[1:])
        parts.append(Guests(samples, like, flags.bool(), rows))
    return parts
