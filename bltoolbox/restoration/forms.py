"""Forms: ways to compute the same thing, equal to rounding, of which another one is fastest on another machine.

A component asks a question, such as how to convolve with ten filters, and names its candidates, the default first. The
answer is found by measurement once per machine and number of threads, and kept in the user's cache folder:

- Candidates take turns, the least time of each counts, and only a clear lead (``LEAD``) is better than the default.
- A run records its answers in ``env.json``, and a resumed run uses them again, so that it repeats the interrupted one
  to the last bit. Several ranks use the answers of the first one and measure nothing.

``BLT_FORMS=default`` uses the defaults; ``BLT_FORMS="question = form; …"`` answers some questions and leaves the others
to measurement.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from bltoolbox.bilevel.tensors import detached
from bltoolbox.config.cache import cache_folder, write_entry
from bltoolbox.config.reading import read_json
from bltoolbox.errors import BltError, UsageError

log = logging.getLogger(__name__)

VARIABLE = "BLT_FORMS"
#: Another form than the default takes at most this part of its time.
LEAD = 0.92
#: Turns of the candidates, in which each computes once.
_TURNS = 9

Candidates = Mapping[str, Callable[[], object]]


class Forms:
    """The answers of a process."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        #: Whether questions without an answer have the default.
        self.closed = False
        self._heard: Callable[[Mapping[str, str]], None] | None = None
        self._lock = threading.RLock()

    def choose(self, question: str, candidates: Candidates) -> str:
        """The form to use; ``question`` names everything that the times depend on, but machine and threads."""
        question = f"{question}, {_threads()}"
        with self._lock:
            answer = self.answers.get(question)
            if answer is not None:
                if answer in candidates:
                    return answer
                log.warning(
                    "%s: the form %r is not known any more, so results differ by rounding", question, answer
                )
            answer = self.answers[question] = self._answer(question, candidates)
            if self._heard is not None:
                self._heard(self.answers)
            return answer

    def adopt(self, answers: Mapping[str, str], closed: bool) -> None:
        """Use these answers from now on: those of a run that is resumed, or of the first rank."""
        with self._lock:
            self.answers, self.closed = dict(answers), closed

    @contextmanager
    def restored(self) -> Iterator[None]:
        """What is adopted within is forgotten afterwards."""
        before = self.answers, self.closed
        try:
            yield
        finally:
            self.adopt(*before)

    @contextmanager
    def recorded(self, heard: Callable[[Mapping[str, str]], None]) -> Iterator[None]:
        """``heard`` is called with all answers after each new one."""
        before, self._heard = self._heard, heard
        try:
            yield
        finally:
            self._heard = before

    def _answer(self, question: str, candidates: Candidates) -> str:
        default, wanted = next(iter(candidates)), given_answers()
        if question in wanted:
            if wanted[question] in candidates:
                return wanted[question]
            choices = ", ".join(candidates)
            raise UsageError(
                f"{VARIABLE}: {question!r} has no form {wanted[question]!r}; choose from {choices}"
            )
        if self.closed or "default" in wanted:
            return default
        entry = _entry(question, tuple(candidates))
        if (kept := _read(entry)) in candidates:
            return kept
        times = measured(candidates)
        best = fastest(times)
        write_entry(entry, {"question": question, "form": best, "seconds": times})
        return best


#: There is one processor per process, and so one of these.
FORMS = Forms()


def choose_form(question: str, candidates: Candidates) -> str:
    """Which of several ways to compute the same thing this machine uses, the first one unless another is faster.

    ``candidates`` compute it once, on data of a typical size. ``question`` names everything that their times depend on
    but the machine and the number of threads; it is measured once, kept in the user's cache, and recorded in runs.
    """
    return FORMS.choose(question, candidates)


def given_answers() -> dict[str, str]:
    """The answers in ``BLT_FORMS``; `default` answers all others."""
    answers: dict[str, str] = {}
    for phrase in os.environ.get(VARIABLE, "").split(";"):
        question, _, form = phrase.partition("=")
        if not question.strip():
            continue
        if not form.strip() and question.strip() != "default":
            raise UsageError(f"{VARIABLE}: {phrase.strip()!r} is neither `default` nor `question = form`")
        answers[question.strip()] = form.strip()
    return answers


def measured(candidates: Candidates, turns: int = _TURNS) -> dict[str, float]:
    """The least seconds of each candidate, after one turn for caches of kernels and memory."""
    # On one thread, the time in which others had the processor does not count.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(candidates, float("inf"))
    with detached():
        for turn in range(turns + 1):
            for name, compute in candidates.items():
                began = clock()
                compute()
                if turn:
                    best[name] = min(best[name], clock() - began)
    return best


def fastest(times: Mapping[str, float]) -> str:
    """The default, which comes first, unless another form is clearly ahead of it."""
    default = next(iter(times))
    best = min(times, key=lambda name: times[name])
    return best if times[best] <= LEAD * times[default] else default


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


#: What Linux says about processors.
_CPU = Path("/proc/cpuinfo")


@cache
def machine() -> str:
    """The processor with its vector instructions, and the version of torch."""
    name = platform.processor() or platform.machine()
    try:
        lines = _CPU.read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _entry(question: str, candidates: tuple[str, ...]) -> Path:
    key = json.dumps([machine(), question, candidates])
    return cache_folder() / "forms" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(entry: Path) -> str:
    """The form in a file of the cache; empty if there is none."""
    try:
        return str(read_json(entry)["form"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, BltError):
        return ""
