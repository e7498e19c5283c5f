"""Times that can be compared: interleaved, the best of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def best_times(
    candidates: Mapping[str, Callable[[], object]], repeats: int, prepare: Callable[[], object] | None = None
) -> dict[str, float]:
    """Seconds of each candidate, the smallest of ``repeats``, taken in turns so that a busy moment hits all."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(repeats):
        for name, run in candidates.items():
            if prepare is not None:
                prepare()
            began = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def gemm_speed(repeats: int = 8, size: int = 1024) -> float:
    """Floating-point operations a second of a float32 matrix product, the best of several."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = best_times({"gemm": lambda: a @ b}, repeats)
    return 2 * size**3 / times["gemm"]
