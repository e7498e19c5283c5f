"""The answers of the oracle in the current step.

One step of a full-batch method can take hours, in many oracle calls. A checkpoint between two of them contains the
state at the beginning of the step and the answers since: on resume the optimizer repeats the step, receives the
same answers at once, and continues where it was. No optimizer has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import HypergradientResult, Scales, Value
from bltoolbox.errors import BltError

Answer = Value | HypergradientResult | Scales | None
#: Solutions, and what the solver persists, by their stores and with their samples, chunk by chunk.
Trial = list[tuple[list[int], dict[str, Tensor]]]
#: The store of solutions.
SOLUTIONS = "solutions"


class Journal:
    """Answers in order; those from a checkpoint are replayed first."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Answer]] = []
        self._position = 0

    @property
    def replaying(self) -> bool:
        """Whether the next question was answered before the interruption."""
        return self._position < len(self._entries)

    def replay(self, question: str) -> Any:
        """The answer given before."""
        recorded, answer = self._entries[self._position]
        if recorded != question:
            raise BltError(
                f"the upper optimizer asked for {question} where it had asked for {recorded} before the interruption:"
                " it is not deterministic, so this step cannot be resumed"
            )
        self._position += 1
        return answer

    def append(self, question: str, answer: Answer) -> None:
        self._entries.append((question, answer))
        self._position = len(self._entries)

    def clear(self) -> None:
        """The step is complete."""
        self._entries, self._position = [], 0

    def pack(self) -> list[dict[str, Any]]:
        """As plain data and tensors, without the solutions of trial values."""
        return [{"question": question, **_pack(answer)} for question, answer in self._entries]

    def trials(self) -> dict[int, Trial]:
        """The solutions of trial values that this rank holds, by the number of the answer."""
        by_number = {}
        for number, (_, answer) in enumerate(self._entries):
            if isinstance(answer, Value) and answer.trial:
                by_number[number] = [
                    (list(samples), {name: values.cpu() for name, values in rows.items()})
                    for samples, rows in answer.trial
                ]
        return by_number

    def restore(
        self,
        entries: list[dict[str, Any]],
        trials: Sequence[Mapping[int, Trial]],
        device: torch.device,
        lives_here: Callable[[int], bool] = lambda sample: True,
    ) -> None:
        """What ``pack`` and, on each rank, ``trials`` gave, to be replayed from the start.

        In earlier formats a trial has the solutions alone.
        """
        self._entries = []
        for number, entry in enumerate(entries):
            saved = [entry.get("trial", []), *(by_number.get(number, []) for by_number in trials)]
            trial = []
            for samples, content in chain.from_iterable(saved):
                rows = {SOLUTIONS: content} if isinstance(content, Tensor) else content
                if mine := [k for k, sample in enumerate(samples) if lives_here(sample)]:
                    here = {name: values[mine].to(device) for name, values in rows.items()}
                    trial.append(([samples[k] for k in mine], here))
            self._entries.append((entry["question"], _unpack(entry, trial, device)))
        self._position = 0


def _pack(answer: Answer) -> dict[str, Any]:
    if answer is None:
        return {}
    content = {entry.name: getattr(answer, entry.name) for entry in fields(answer)}
    if isinstance(answer, HypergradientResult):
        return content | {"value": _pack(answer.value), "certificate": dict(answer.certificate)}
    if isinstance(answer, Scales):
        return content
    del content["trial"]
    return content | {"short": dict(answer.short)}


def _unpack(entry: dict[str, Any], trial: Trial, device: torch.device) -> Answer:
    content = {name: value for name, value in entry.items() if name not in ("question", "trial")}
    if not content:
        return None
    if "slope" in content:
        return Scales(**content)
    if "gradient" in content:
        gradient = {name: values.to(device) for name, values in content["gradient"].items()}
        value = _unpack(content["value"], [], device)
        assert isinstance(value, Value)
        return HypergradientResult(**content | {"gradient": gradient, "value": value})
    return Value(**content, trial=trial)
