"""No component keeps state between calls: whatever evolves is returned, and comes back as an argument.

Each kind declares how a component is used on two problems. One object is then used on both, one after the other and in
turn, and must return bit for bit what a new object returns on each problem alone. A cache that changes no result is
allowed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from bltoolbox.testing.checks.base import Check, Subject, fail, holds, same, snapshot

NAME = "keeps no state between calls"

#: The results of a component on problem 0 or 1, each with its name, as they are computed.
Use = Callable[[Subject, Any, int], Iterator[tuple[str, Any]]]
Results = list[tuple[str, Any]]


def stateless(kind: str) -> Callable[[Use], Use]:
    """Declare how components of a kind are used, and so that they must not keep state between calls."""

    def declare(use: Use) -> Use:
        holds(kind, NAME)(_check(use))
        return use

    return declare


def _check(use: Use) -> Check:
    def check(subject: Subject) -> None:
        alone = [_results(use(subject, subject(), problem)) for problem in (0, 1)]
        again = _results(use(subject, subject(), 0))
        if label := _difference(alone[0], again):
            fail(
                f"{label} of a new object differs after another object was used{_culprits(subject, use)}: state is"
                " shared between objects; whatever evolves must be returned, and come back as an argument"
            )
        component = subject()
        for problem in (1, 0):
            results = _results(use(subject, component, problem))
            _require_same(alone[problem], results, "on another problem before", subject, use)
        component = subject()
        pair = _in_turn(use(subject, component, 0), use(subject, component, 1))
        for problem in (0, 1):
            _require_same(alone[problem], pair[problem], "on two problems in turn", subject, use)

    return check


def _require_same(expected: Results, results: Results, how: str, subject: Subject, use: Use) -> None:
    if label := _difference(expected, results):
        fail(
            f"{label} differs from that of a new object if the same object has worked {how}{_culprits(subject, use)};"
            " whatever evolves must be returned, and come back as an argument, not stay in self"
        )


def _results(steps: Iterator[tuple[str, Any]]) -> Results:
    """Copies, since a later call might write to what an earlier one returned."""
    return [(label, snapshot(value)) for label, value in steps]


def _in_turn(*uses: Iterator[tuple[str, Any]]) -> list[Results]:
    """One result of each at a time."""
    by_use: list[Results] = [[] for _ in uses]
    for row in zip_longest(*uses):
        for results, entry in zip(by_use, row, strict=True):
            if entry is not None:
                results.append((entry[0], snapshot(entry[1])))
    return by_use


def _difference(expected: Results, results: Results) -> str | None:
    """The name of the first result that differs."""
    pairs = zip(expected, results, strict=True)
    return next((label for (label, value), (_, other) in pairs if not same(value, other)), None)


def _culprits(subject: Subject, use: Use) -> str:
    """The attributes that change when a component is used, in brackets."""
    component = subject()
    before = _attributes(component)
    for problem in (1, 0):
        for _ in use(subject, component, problem):
            pass
    after = _attributes(component)
    changed = [name for name, value in after.items() if before.get(name) != value]
    return f" (using it changes {', '.join(sorted(changed))})" if changed else ""


def _attributes(component: Any) -> dict[str, bytes]:
    """The attributes of an object and of its class as bytes, which can be compared whatever they are."""
    own = {f"self.{name}": value for name, value in getattr(component, "__dict__", {}).items()}
    cls = type(component)
    shared = {
        f"{cls.__name__}.{name}": value
        for name, value in vars(cls).items()
        if not name.startswith("_") and not callable(value) and not hasattr(value, "__get__")
    }
    return {name: _bytes(value) for name, value in {**shared, **own}.items()}


def _bytes(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        return repr(value).encode()
