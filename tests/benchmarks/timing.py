"""Times that can be compared: interleaved, the best of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

#: Seconds.
_LONG = 30.0


def best_times(
    candidates: Mapping[str, Callable[[], object]], repeats: int, prepare: Callable[[], object] | None = None
) -> dict[str, float]:
    """Seconds of each candidate, the smallest of ``repeats``, taken in turns so that a busy moment hits all.

    A candidate that takes longer than ``_LONG`` averages over busy moments by itself and is not repeated.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(repeats):
        for name, run in candidates.items():
            if turn and best[name] > _LONG:
                continue
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


@dataclass(frozen=True)
class Times:
    """Seconds by the clock on the wall, and of the processor, which other programs hardly affect."""

    wall: float
    cpu: float


def interleaved(
    candidates: Mapping[str, tuple[Callable[[], object], Callable[[], object]]], repeats: int
) -> dict[str, Times]:
    """The smallest times of each candidate, a pair of what prepares it (not timed) and what is timed, in turns."""
    best = dict.fromkeys(candidates, Times(float("inf"), float("inf")))
    for turn in range(repeats):
        for name, (prepare, run) in candidates.items():
            if turn and best[name].wall > _LONG:
                continue
            prepare()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = Times(time.perf_counter() - wall, time.process_time() - cpu)
            best[name] = Times(min(best[name].wall, spent.wall), min(best[name].cpu, spent.cpu))
    return best


_SIDE = 1024
#: Floating-point operations of ``product``.
PRODUCT_FLOPS = 2 * _SIDE**3


@cache
def _factors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)


def product() -> torch.Tensor:
    """A matrix product in float32: as fast as this machine multiplies."""
    a, b = _factors()
    return a @ b
