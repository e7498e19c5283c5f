"""The loop of the campaign: mutate a file, read it, and see what the reader may not do.

A reader may succeed, or raise an error of the toolbox with a sentence. It may not raise anything else, take long, ask
for much memory, write outside its folder, start a process or reach the network.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import mutations
from conftest import ROOT
from formats import Format

from bltoolbox.errors import BltError, RecipeError
from bltoolbox.restoration.pictures.images import ImageError

#: Of one case: seconds on the processor, seconds of waiting, and memory beyond what the process had before.
SECONDS = 10.0
PATIENCE = 120.0
BYTES = 2 * 2**30
#: A guided campaign looks at the lines that one in so many cases runs and reads that case in full, as both take long.
TRACED = 16
_CODE = (str(ROOT / "bltoolbox"), str(ROOT / "plugins"))
#: Audit events that no reader causes.
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "ctypes.dlopen")
_CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.truncate",
    "os.link",
    "os.symlink",
)


class TooLong(BaseException):
    """A case that does not end; no reader may swallow it."""


@dataclass
class Watch:
    """What a reader does besides reading, from the interpreter's audit events."""

    allowed: tuple[str, ...] = ()
    active: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        # A run asks git for the commit of the checkout.
        if event in _FORBIDDEN and arguments[0] != "git":
            self.seen.append(f"{event}{arguments[:1]}")
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (writes or event in _CHANGES) and isinstance(arguments[0], str | bytes | os.PathLike):
            name = os.fsdecode(arguments[0])
            # A relative name may belong to an open folder, which the event does not tell; `attempt` sees to those.
            outside = (
                not os.path.realpath(name).startswith(self.allowed)
                if os.path.isabs(name)
                else ".." in Path(name).parts
            )
            if outside:
                self.seen.append(f"{event} of {name}")


WATCH = Watch()
sys.addaudithook(WATCH)


class Coverage:
    """Lines of the toolbox that have been run; a case that reaches a new one is worth mutating further."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_CODE) else None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)


@contextlib.contextmanager
def limited(seconds: float = SECONDS, patience: float = PATIENCE, size: int = BYTES) -> Iterator[None]:
    """Limits of time and one of memory for what is in the block.

    A busy machine or disk makes any reader slow, so what counts is the processor's time; who waits for something
    that never comes takes none of it, hence ``patience``.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    clocks = {
        signal.SIGALRM: (signal.ITIMER_REAL, patience),
        signal.SIGPROF: (signal.ITIMER_PROF, seconds),
    }
    before = {number: signal.signal(number, late) for number in clocks}
    resource.setrlimit(resource.RLIMIT_AS, (taken + size, hard))
    for clock, limit in clocks.values():
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for clock, _ in clocks.values():
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def empty_directory() -> Iterator[None]:
    """Work in a new directory, which must stay empty."""
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        try:
            yield
        finally:
            WATCH.active = False
            WATCH.seen += [f"wrote {name} to the working directory" for name in os.listdir(elsewhere)]


def attempt(
    read: Callable[[Path], object], folder: Path, seconds: float = SECONDS, patience: float = PATIENCE
) -> tuple[str, str]:
    """Read what the folder holds: how it ended, and what is wrong with that, if anything.

    The working directory is an empty one, so that whatever is written there is seen.
    """
    WATCH.allowed, WATCH.seen = tuple(os.path.realpath(one) for one in (folder, os.environ["BLT_CACHE"])), []
    began = time.process_time()
    ended, wrong = "read", ""
    try:
        with empty_directory(), limited(seconds, patience), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            WATCH.active = True
            read(folder)
    except (BltError, ImageError) as error:
        ended, wrong = "refused", _not_a_sentence(error)
    except TooLong:
        wrong = f"takes more than {seconds:g} s, or waits for more than {patience:g} s"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:150]} ({_place(error)})"
    finally:
        WATCH.active = False
    if WATCH.seen:
        wrong = f"does what no reader does: {WATCH.seen[0]}"
    if not wrong and time.process_time() - began > seconds:
        wrong = f"takes more than {seconds:g} s"
    return ended, wrong


def _not_a_sentence(error: Exception) -> str:
    said = str(error)
    lines = said.splitlines() if isinstance(error, RecipeError) else [said]
    for line in lines or [""]:
        if not line.strip() or "Traceback" in line or "unexpected;" in line or len(line.splitlines()) != 1:
            return f"{type(error).__name__} is not a sentence: {line[:200]!r} ({_place(error)})"
    return ""


def _place(error: BaseException) -> str:
    """Where in the toolbox an error comes from."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(_CODE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "elsewhere"


def mutated(format: Format, corpus: list[bytes], whole: int, number: int) -> bytes:
    """The case of a number, made of a file of the corpus, whose first ``whole`` files are undamaged.

    Half of the cases change the meaning, where there is a mutation that does.
    """
    chance = random.Random(f"{format.name} {number}")
    # Cases that reached new code are mostly refused, and so is what is made of them: every other case begins with a
    # whole file, or most of a long campaign would end at the first check.
    data = chance.choice(corpus[:whole] if chance.random() < 0.5 else corpus)
    if format.meaning is not None and chance.random() < 0.6:
        # What an earlier mutation left may no longer be taken apart.
        with contextlib.suppress(Exception):
            return format.meaning(data, chance)
    return mutations.of_bytes(data, chance, format.pieces)


def campaign(
    format: Format, folder: Path, count: int, guided: bool
) -> tuple[Counter[str], dict[str, tuple[int, bytes]]]:
    """How often each ending was seen, and for each thing that went wrong its first case.

    A guided campaign goes on from cases that reached new code, which pays from some hundreds on.
    """
    file = max(folder.glob(format.file))
    whole = file.read_bytes()
    corpus, coverage = [whole, *format.seeds], Coverage()
    endings: Counter[str] = Counter()
    wrong: dict[str, tuple[int, bytes]] = {}
    try:
        for number in range(count):
            data = mutated(format, corpus, 1 + len(format.seeds), number)
            file.write_bytes(data)
            known = len(coverage.lines)
            traced = guided and number % TRACED == 0
            read = format.brief if guided and not traced and format.brief else format.read
            with coverage.measured() if traced else contextlib.nullcontext():
                ended, trouble = attempt(read, folder)
            if trouble:
                ended = "wrong"
                wrong.setdefault(trouble, (number, data))
            endings[ended] += 1
            if len(coverage.lines) > known and len(data) < 200_000:
                corpus.append(data)
    finally:
        file.write_bytes(whole)
    return endings, wrong
