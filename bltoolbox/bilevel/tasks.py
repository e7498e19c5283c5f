"""The tasks of a problem: what solvers, oracle and evaluation see of them.

    tasks.at(θ, counter).on(ids) -> (Lower, Upper)

A task is addressed by its number. What depends on θ alone is computed once, in ``at``, and shared by all chunks.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Rows, Theta
from bltoolbox.bilevel.tensors import digest_of


class BoundTasks(ABC):
    """Tasks at one θ."""

    @abstractmethod
    def on(self, ids: Sequence[int]) -> tuple[Lower, Upper]:
        """The lower level and the loss of the tasks ``ids``."""

    def measure(self, names: Sequence[str], ids: Sequence[int], x: Tensor) -> dict[str, list[float]]:
        """The metrics of the problem that ``names`` lists, for approximate solutions x of the tasks ``ids``.

        The mean of the upper loss need not be implemented: every problem has it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not measure {', '.join(names)}")


class Tasks(ABC):
    """The tasks of one split, addressed by number."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the x of one task."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def at(self, theta: Theta, counter: Counter) -> BoundTasks:
        """The tasks bound to θ; constants are computed once and shared by all chunks."""

    @property
    def reads_ahead(self) -> bool:
        """Whether ``prefetch`` does anything."""
        return False

    def prefetch(self, ids: Sequence[int]) -> None:
        """Told which tasks are needed next, so that their data can be read meanwhile; does nothing by default."""
        return None

    def close(self) -> None:
        """End what runs in the background; the tasks can still be used."""
        return None

    def label(self, number: int) -> str:
        """The name of one task in tables."""
        return f"task {number + 1}"

    def digest(self) -> str:
        """Changes when there are other tasks, so that a run is not resumed with them; by default when labels do."""
        labels = "\n".join(self.label(number) for number in range(len(self)))
        return hashlib.blake2b(labels.encode("utf-8", "replace"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TensorTasks(Tasks):
    """Tasks whose data are tensors, with one row for each task.

    ``bind`` makes the lower level and the loss of some tasks from their numbers, θ, the counter and their rows;
    ``measures`` has the metrics by name, each a function of the rows of some tasks and of their x.
    """

    rows: Rows
    bind: Callable[[Tensor, Theta, Counter, Rows], tuple[Lower, Upper]]
    x_shape: tuple[int, ...]
    measures: Mapping[str, Callable[[Rows, Tensor], Tensor]] = field(default_factory=dict)
    noun: str = "task"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x_shape

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def _first(self) -> Tensor:
        return next(value for value in self.rows.values() if value.is_floating_point())

    def __len__(self) -> int:
        return len(self._first)

    def at(self, theta: Theta, counter: Counter) -> BoundTensorTasks:
        return BoundTensorTasks(self, theta, counter)

    def label(self, number: int) -> str:
        return f"{self.noun} {number + 1}"

    def digest(self) -> str:
        return digest_of(self.rows.values())


@dataclass(frozen=True)
class BoundTensorTasks(BoundTasks):
    """Those tasks at one θ."""

    tasks: TensorTasks
    theta: Theta
    counter: Counter

    def on(self, ids: Sequence[int]) -> tuple[Lower, Upper]:
        index = torch.as_tensor(list(ids), device=self.tasks.device)
        return self.tasks.bind(index, self.theta, self.counter, self._rows(index))

    def measure(self, names: Sequence[str], ids: Sequence[int], x: Tensor) -> dict[str, list[float]]:
        rows = self._rows(torch.as_tensor(list(ids), device=self.tasks.device))
        return {name: self.tasks.measures[name](rows, x).tolist() for name in names}

    def _rows(self, index: Tensor) -> Rows:
        return {name: value[index] for name, value in self.tasks.rows.items()}
