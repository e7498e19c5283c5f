"""One run on several processes, the ranks: how they communicate and stay synchronised.

Every exchange begins with a meeting: all ranks report where they are, and continue only if all are at the same
place. An error on one rank is reported there, so that all raise and none waits for a rank that never arrives. Sums
are added in the order of ranks, in float64, so they do not depend on which rank is first. A rank that dies closes its
connections, which the others notice at once; for a machine that vanishes there is a time limit.

``Ranks`` itself is a single process, for which none of this costs anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous as find

from bltoolbox.distributed.launch import LIFELINE, RENDEZVOUS, Place, rank_timeout
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import BltError, NumericalError, explain

T = TypeVar("T")

#: The place reported by a rank that has given up.
_FAILED = "failed"
#: Bytes of an ordinary message; a longer one takes a second round.
_MESSAGE = 4096
#: Number of values that are added at once, which limits the memory of a sum.
_SLICE = 1 << 20
#: Seconds after which a rank that has greeted rank 0 asks whether it is still the same.
_ANSWER = 2.0


class RankFailed(BltError):
    """Another rank failed; has the exit code of its error."""

    #: All ranks know it, so only one of them reports it.
    told = True

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RankLost(BltError):
    """Another rank died, or cannot be reached."""


class Ranks:
    """A single process: rank 0 of 1."""

    rank = 0
    size = 1
    #: Number on this machine, and so of the CUDA device.
    local = 0

    @property
    def first(self) -> bool:
        """Whether this rank writes files and messages."""
        return self.rank == 0

    def now(self) -> float:
        """The clock of rank 0 at the last meeting, so that all decide alike; the time of a single process."""
        return time.perf_counter()

    def gather(self, at: str, message: Any = None) -> list[Any]:
        """Meet at ``at``: the messages of all ranks (plain data), in the order of ranks."""
        return [message]

    def each(self, at: str, work: Callable[[], Any]) -> list[Any]:
        """Do ``work`` on every rank and meet: all results (plain data). If one rank fails, all raise."""
        return [work()]

    def in_step(self, at: str, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and meet: the result of this rank. If one rank fails, all raise."""
        return work()

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over ranks of a float64 vector, the same to the last bit on all. Only right after a meeting."""
        return numbers

    def largest(self, numbers: Tensor) -> Tensor:
        """The maximum over ranks of a vector. Only right after a meeting."""
        return numbers

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send CPU tensors to ranks and fill those that come from ranks. Only right after a meeting."""

    def all_failed(self, error: BaseException) -> bool:
        """Report that this rank gives up; returns whether all do, at the same place, so that they can still act
        together."""
        return True


class Group(Ranks):
    """Several processes, connected by torch.distributed."""

    def __init__(self, place: Place, rendezvous: str = "env://") -> None:
        self.rank, self.size, self.local = place.rank, place.size, place.local
        self.broken = False
        self._now = 0.0
        #: CUDA tensors travel by NCCL, everything else by Gloo.
        self._cuda = torch.cuda.is_available() and dist.is_nccl_available()
        limit = timedelta(seconds=rank_timeout())
        try:
            store, _, _ = next(find(rendezvous, self.rank, self.size, timeout=limit))
            store.set_timeout(limit)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self._cuda else "gloo",
                store=dist.PrefixStore(_attempt(store, self.rank, self.size), store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        # NCCL refuses two ranks on one GPU; sums then travel through the host.
        shared = self.gather("start", self._cuda and self.local >= torch.cuda.device_count())
        self._cuda = self._cuda and not any(shared)

    def close(self) -> None:
        """Leave the group; a broken group needs no cleanup."""
        if self.broken:
            return
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()

    def now(self) -> float:
        return self._now

    def gather(self, at: str, message: Any = None) -> list[Any]:
        messages = self._meet(at, message)
        places = [message["at"] for message in messages]
        if at != _FAILED and _FAILED in places:
            self.broken = True
            rank = places.index(_FAILED)
            raise RankFailed(f"rank {rank}: {messages[rank]['message']}")
        if len(set(places)) > 1:
            self.broken = True
            positions = ", ".join(f"rank {rank} is at {place!r}" for rank, place in enumerate(places))
            raise RankFailed(
                f"the ranks are out of step: {positions}; use the same software and data on all machines"
            )
        return [message["message"] for message in messages]

    def each(self, at: str, work: Callable[[], Any]) -> list[Any]:
        try:
            report = {"done": work()}
        except BaseException as error:
            self._fail(at, error)
        return [report["done"] for report in self._all_done(at, report)]

    def in_step(self, at: str, work: Callable[[], T]) -> T:
        try:
            result = work()
        except BaseException as error:
            self._fail(at, error)
        self._all_done(at, {})
        return result

    def _all_done(self, at: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Report that this rank has finished its work; returns the reports of all ranks if none has failed."""
        reports = self.gather(at, report)
        if failures := _failures(reports):
            self._raise(failures, None)
        return reports

    def _fail(self, at: str, error: BaseException) -> NoReturn:
        """Report that this rank has failed."""
        self._raise(_failures(self.gather(at, {"failure": _describe(error)})), error)

    def _raise(self, failures: list[tuple[int, dict[str, Any]]], mine: BaseException | None) -> NoReturn:
        """On all ranks: interruptions first, then errors that no policy recovers from, then the others."""
        interrupts = [failure["signal"] for _, failure in failures if failure["signal"]]
        if interrupts:
            raise Interrupted(interrupts[0]) from mine
        fatal = [(rank, failure) for rank, failure in failures if not failure["numerical"]]
        if not fatal:
            raise NumericalError(failures[0][1]["message"]) from mine
        rank, failure = fatal[0]
        if mine is not None and not isinstance(mine, NumericalError):
            mine.told = True  # type: ignore[attr-defined]
            raise mine
        raise RankFailed(f"rank {rank}: {failure['message']}", failure["code"]) from mine

    def sum(self, numbers: Tensor) -> Tensor:
        return self._reduce(numbers, torch.add)

    def largest(self, numbers: Tensor) -> Tensor:
        return self._reduce(numbers, torch.maximum)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        try:
            work = [dist.irecv(tensor, src=rank) for rank, tensor in sorted(incoming.items())]
            work += [dist.isend(tensor, dst=rank) for rank, tensor in sorted(outgoing.items())]
            for request in work:
                if request is not None:
                    request.wait()
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error

    def all_failed(self, error: BaseException) -> bool:
        if self.broken:
            return False
        try:
            places = [message["at"] for message in self._meet(_FAILED, _describe(error)["message"])]
        except BltError:
            return False
        self.broken = set(places) != {_FAILED}
        with contextlib.suppress(AttributeError):
            error.told = True  # type: ignore[attr-defined]
        return not self.broken

    def _meet(self, at: str, message: Any) -> list[dict[str, Any]]:
        if self.broken:
            raise RankLost("the ranks have lost contact")
        text = json.dumps({"at": at, "now": time.perf_counter(), "message": message}).encode()
        raw = self._bytes(text, _MESSAGE)
        longest = max(int.from_bytes(record[:8], "little") for record in raw)
        if longest > _MESSAGE - 8:
            raw = self._bytes(text, longest + 8)
        messages = [json.loads(record[8 : 8 + int.from_bytes(record[:8], "little")]) for record in raw]
        self._now = messages[0]["now"]
        return messages

    def _bytes(self, text: bytes, length: int) -> list[bytes]:
        padded = (len(text).to_bytes(8, "little") + text)[:length].ljust(length, b"\0")
        received = self._gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [tensor.numpy().tobytes() for tensor in received]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(tensors, tensor)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return tensors

    def _reduce(self, numbers: Tensor, add: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        here = numbers if numbers.is_cuda and self._cuda else numbers.cpu()
        slices = []
        for piece in here.split(_SLICE):
            total, *others = self._gather(piece.contiguous())
            for other in others:
                total = add(total, other)
            slices.append(total)
        return torch.cat(slices).to(numbers.device) if slices else numbers

    def _lost(self, error: Exception) -> RankLost:
        self.broken = True
        # Gloo begins with a line of its source and continues with advice that does not help here.
        reason = re.sub(r"\[/[^]]*\] *", "", str(error).strip().partition("\n")[0]).partition(". ")[0]
        return RankLost(
            f"rank {self.rank} of {self.size} lost contact with another rank: its process or its machine is gone"
            f" ({reason})"
        )


ALONE = Ranks()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this run: started by ``blt run --nproc`` or torchrun, or this process alone."""
    place = Place.here()
    if place.size == 1:
        yield ALONE
        return
    _follow_launcher()
    group = Group(place, os.environ.get(RENDEZVOUS, "env://"))
    try:
        yield group
    finally:
        group.close()


def _attempt(store: Any, rank: int, size: int) -> str:
    """A name shared by the ranks of this start and different from that of every earlier start.

    torchrun may give restarted ranks the store of earlier ones, with addresses that are no longer
    in use. So rank 0 invents a name and answers every rank that greets it by that name; a rank that gets no answer has
    found the name of a rank 0 that is gone, and looks again.
    """
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("blt/name", name)
        for other in range(1, size):
            store.set(f"blt/answer/{store.get(f'blt/{name}/{other}').decode()}", "")
        return name
    end = time.monotonic() + store.timeout.total_seconds()
    while True:
        name, greeting = store.get("blt/name").decode(), secrets.token_hex(8)
        store.set(f"blt/{name}/{rank}", greeting)
        try:
            store.wait([f"blt/answer/{greeting}"], timedelta(seconds=_ANSWER))
        except RuntimeError:
            if time.monotonic() > end:
                raise
        else:
            return name


def _follow_launcher() -> None:
    """Stop, with a checkpoint, when the process that started this one has ended."""
    line = os.environ.get(LIFELINE, "")
    if not re.fullmatch("[0-9]{1,9}", line):
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(int(line), 1)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="blt-launcher").start()


def _failures(reports: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(rank, report["failure"]) for rank, report in enumerate(reports) if "failure" in report]


def _describe(error: BaseException) -> dict[str, Any]:
    """What other ranks need to know about an error."""
    return {
        "message": "interrupted" if isinstance(error, Interrupted) else explain(error),
        "numerical": isinstance(error, NumericalError),
        "signal": error.exit_code - 128 if isinstance(error, Interrupted) else None,
        "code": error.exit_code if isinstance(error, BltError) else 1,
    }
