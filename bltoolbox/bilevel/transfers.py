"""Between device and host without making either wait: through pinned memory, where there is a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrival:
    """A tensor being copied to the host; ``wait`` returns it."""

    tensor: Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


def to_host(tensor: Tensor) -> Arrival:
    """Start copying a tensor to the host; the device continues meanwhile."""
    if tensor.device.type != "cuda":
        return Arrival(tensor.cpu())
    staged = torch.empty_like(tensor, device="cpu", pin_memory=True)
    staged.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return Arrival(staged, event)


def to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """A host tensor with the dtype and on the device of ``like``."""
    if like.device.type == "cuda":
        return tensor.pin_memory().to(like.device, like.dtype, non_blocking=True)
    return tensor.to(like)
