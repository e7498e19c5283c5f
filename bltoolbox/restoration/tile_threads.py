"""Several tiles at once on a CPU, each solved by a thread of its own.

Convolutions use several cores well; the transforms, passes over borders and sums between them do not, and threads that
wait for each other burn processor time. Tiles are independent: with one thread each, all cores are busy all the time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from bltoolbox.bilevel.precision import computing

T = TypeVar("T")

#: No more tiles are solved at once, since each needs memory.
MOST_AT_ONCE = 4

#: The part of a tile that is done.
Report = Callable[[float], None]


def tiles_at_once(tiles: int, device: torch.device) -> int:
    """How many threads share the tiles of a picture; a GPU works on one."""
    return min(torch.get_num_threads(), tiles, MOST_AT_ONCE) if device.type == "cpu" else 1


class _Abandoned(Exception):
    """Nobody waits for this tile any more."""


def in_order(
    work: Callable[[int, Report], T], count: int, report: Callable[[int, float], None]
) -> Iterator[T]:
    """``work`` on tiles 0, 1, …, with all the threads of this process, and its results in that order.

    At most one finished result per thread waits. ``report`` hears of (tile, part done), from any thread. If the
    iterator is closed early, tiles that are not finished are abandoned at their next report.
    """
    threads = torch.get_num_threads()
    workers = tiles_at_once(count, torch.device("cpu"))
    closed = threading.Event()

    def solve(number: int) -> T:
        def heard(part: float) -> None:
            if closed.is_set():
                raise _Abandoned
            report(number, part)

        return work(number, heard)

    share = max(1, threads // workers)
    pending: deque[Future[T]] = deque()
    # What sets the precision of a solve does so for the whole process, so it is set around all of them.
    with (
        computing(torch.device("cpu")),
        ThreadPoolExecutor(workers, "tile", torch.set_num_threads, (share,)) as pool,
    ):
        try:
            for number in range(count):
                pending.append(pool.submit(solve, number))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            closed.set()
            for future in pending:
                future.cancel()
            pool.shutdown()
            torch.set_num_threads(threads)
