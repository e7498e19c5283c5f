"""What components keep of each task besides x: the memory of an estimator, and fields of the state of a solver.

Each name is a store of rows by task, part of checkpoints and of transactions, and travels with its task between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bltoolbox.bilevel.records import Rows
from bltoolbox.bilevel.warm_starts import Stores
from bltoolbox.errors import BltError

#: Prefixes of the names of stores, by who keeps them.
MEMORY, SOLVER = "memory.", "solver."
#: Bytes that one component may keep of all tasks together.
MOST = 100 * 2**30


@dataclass(frozen=True)
class Kept:
    """The rows of one component, named by the ``examples`` that it gave: empty tensors (0, …)."""

    owner: str
    prefix: str
    examples: Rows
    stores: Stores

    @property
    def names(self) -> tuple[str, ...]:
        """Of the stores."""
        return tuple(self.prefix + name for name in self.examples)

    @property
    def likes(self) -> dict[str, Tensor]:
        """The examples by store."""
        return {self.prefix + name: row for name, row in self.examples.items()}

    @property
    def row_bytes(self) -> int:
        """Kept of each task."""
        return sum(math.prod(row.shape[1:]) * row.element_size() for row in self.examples.values())

    def get(self, samples: Sequence[int]) -> dict[str, Tensor]:
        """The rows of ``samples`` by name; zero where there are none yet."""
        return {
            name: self.stores[self.prefix + name].get(samples, row.new_zeros(len(samples), *row.shape[1:]))
            for name, row in self.examples.items()
        }

    def rows_of(self, content: Rows, count: int) -> dict[str, Tensor]:
        """What a component returned for ``count`` tasks, by store; an error if it is not what the examples announce."""
        rows = {}
        for name, row in self.examples.items():
            if name not in content:
                raise BltError(
                    f"{self.owner} did not return {name!r}, which it declares to keep for each task"
                )
            expected = (count, *row.shape[1:])
            if tuple(content[name].shape) != expected:
                raise BltError(
                    f"{self.owner} returned {name!r} of shape {list(content[name].shape)}, but keeps"
                    f" {list(expected)} of {count} tasks"
                )
            rows[self.prefix + name] = content[name]
        return rows
