"""Samples that were read or simulated once: on the device as far as a budget allows, else on the host, else not kept.

A row has the dtype of the run and depends on its id alone, so a batch is the same wherever its rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.bilevel.tensors import beside
from bltoolbox.config.reading import Limit

#: Bytes that are kept on the host. Beyond them, samples are read and simulated again whenever they are needed.
ON_HOST = Limit(
    "kept measurements",
    2**29,
    "bytes",
    "of each of the training, validation and test images, with their true images",
    "BLT_KEPT_MEASUREMENTS",
)
#: Bytes that are kept on a device; by default a share of what is free when the first sample is kept.
ON_DEVICE = Limit(
    "measurements kept on a GPU",
    2**32,
    "bytes",
    "of each of the training, validation and test images, and a tenth of the free memory",
    "BLT_KEPT_ON_DEVICE",
)
_SHARE = 0.1


@dataclass(frozen=True)
class SampleRow:
    """One sample without its batch dimension: y, and where there are any the true image and a target."""

    y: Tensor
    truth: Tensor | None = None
    target: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.y, self.truth, self.target) if tensor is not None)

    def to(self, device: torch.device) -> SampleRow:
        """On a device; without waiting for it where the row is in pinned memory."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> SampleRow:
        """In memory of the host that a CUDA device copies from by itself."""
        return self._each(lambda tensor: tensor.pin_memory())

    def alone(self) -> SampleRow:
        """With memory of its own, images channels last: a view would hold on to the batch that it was loaded with."""
        return self._each(_alone)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Memory of another stream must not be reused before this one has read it."""
        for tensor in (self.y, self.truth, self.target):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def _each(self, change: Callable[[Tensor], Tensor]) -> SampleRow:
        y, *others = (
            None if tensor is None else change(tensor) for tensor in (self.y, self.truth, self.target)
        )
        assert y is not None
        return SampleRow(y, *others)


class SampleCache:
    """Rows by id, in two tiers of limited size; nothing that was kept is dropped for something else."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: dict[int, SampleRow] = {}
        self.host_bytes = self.device_bytes = 0
        self._host_limit = ON_HOST.most
        self._device_limit: int | None = None

    def get(self, i: int) -> SampleRow | None:
        return self.rows.get(i)

    def keep(self, i: int, row: SampleRow) -> None:
        """Keep a row where there is room for it; ``row`` may be on the host or on the device."""
        size = row.nbytes
        if i in self.rows:
            return
        if self.device_bytes + size <= self._room_on_device():
            self.rows[i] = row.to(self.device).alone()
            self.device_bytes += size
        elif self.host_bytes + size <= self._host_limit:
            on_host = row.to(torch.device("cpu")).alone()
            self.rows[i] = on_host.pinned() if self._on_cuda else on_host
            self.host_bytes += size

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_available()

    def _room_on_device(self) -> int:
        """Bytes; none where the device is the host itself."""
        if self._device_limit is None:
            self._device_limit = 0
            if self._on_cuda:
                free, _ = torch.cuda.mem_get_info(self.device)
                self._device_limit = min(ON_DEVICE.most, int(_SHARE * free))
        return self._device_limit


def stacked(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """One batch on the device; rows that are all on the host travel together.

    Kept images are channels last, and so is the batch: stacking them is a plain copy.
    """
    if any(row.device.type == device.type for row in rows):  # a process has one device of a type
        rows = [row.to(device, non_blocking=True) for row in rows]
    images = rows[0].ndim == 3
    batch = torch.stack([row.permute(1, 2, 0) for row in rows] if images else list(rows))
    if batch.device.type != device.type:
        batch = beside(batch, torch.empty(0, device=device))
    return batch.permute(0, 3, 1, 2) if images else batch


def _alone(tensor: Tensor) -> Tensor:
    if tensor.ndim == 3:
        last = tensor.permute(1, 2, 0).contiguous()
        tensor = last.permute(2, 0, 1)
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
