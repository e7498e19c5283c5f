"""The batch after the current one, loaded in a thread of its own while the current one is solved.

There is at most one such thread. It ends by itself, is waited for before its result is used, and never raises: what it
could not load is loaded again by whoever needs it, where the error belongs. On a CUDA device its copies are on a stream
of their own, so that they do not wait for the solver nor the solver for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from bltoolbox.bilevel.tensors import detached
from bltoolbox.restoration.sample_cache import SampleRow


class NextBatch:
    """Rows that were loaded ahead, by id."""

    def __init__(self) -> None:
        self.rows: dict[int, SampleRow] = {}
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None

    def start(self, load: Callable[[], dict[int, SampleRow]], device: torch.device) -> None:
        """Begin to load; earlier rows are dropped."""
        self.finish()
        self.rows = {}
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)

        def work() -> None:
            with contextlib.suppress(Exception), detached():
                self.rows = self._beside(load)

        self._thread = threading.Thread(target=work, name="blt-next-batch", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the thread, if there is one."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        if self._stream is not None:
            for row in self.rows.values():
                row.used_on(torch.cuda.current_stream(self._stream.device))

    def _beside(self, load: Callable[[], dict[int, SampleRow]]) -> dict[int, SampleRow]:
        """Load on the stream of this thread, which alone waits until all copies are complete."""
        if self._stream is None:
            return load()
        with torch.cuda.stream(self._stream):
            rows = load()
        self._stream.synchronize()
        return rows
