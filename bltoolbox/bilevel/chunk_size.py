"""``chunk: auto``: how many samples are solved at once, from the memory that is free.

A sample takes about 64 times the memory of its x: responses of some ten filters and what the solver keeps of them. The
estimate uses half of the free memory; if it was too large after all, the oracle halves it once. On the CPU larger
chunks are not faster, so there are at most 32.
"""

from __future__ import annotations

import math
import os
from typing import Literal, Protocol

import torch

_IMAGES, _SHARE = 64, 0.5
_MOST = {"cpu": 32}
_MOST_ELSEWHERE = 1024
#: What is assumed where neither the device nor the system says how much is free.
_UNKNOWN = 2**31


class Solvable(Protocol):
    """Tasks, or the samples of a split."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __len__(self) -> int: ...


def chunk_size(chunk: int | Literal["auto"], tasks: Solvable) -> int:
    """The number of tasks to solve at once."""
    if chunk != "auto":
        return chunk
    row = math.prod(tasks.shape) * tasks.dtype.itemsize
    most = min(_MOST.get(tasks.device.type, _MOST_ELSEWHERE), max(1, len(tasks)))
    return max(1, min(most, int(_SHARE * free_memory(tasks.device) / (_IMAGES * max(1, row)))))


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return _UNKNOWN
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return _UNKNOWN
