"""Properties of loggers: told the events of a small run, they take them and leave them as they are."""

from __future__ import annotations

from typing import Any

from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.roles import Logger
from bltoolbox.config.wording import reason_of
from bltoolbox.testing.checks.base import Subject, Untouched, fail, holds

KIND = "logger"
#: A run of a blink that tells everything there is to tell.
RECIPE: dict[str, Any] = {
    "device": "cpu",
    "data": {"name": "dead-leaves", "count": 4, "size": 16},
    "evaluation": {"name": "dead-leaves", "count": 2, "size": 16, "seed": 1},
    "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
    "sampler": {"size": 2},
    "validation": {"count": 1, "checks": 2},
    "budget": {"steps": 4},
}

Event = tuple[str, tuple[Any, ...]]


class _Recorder(Listener):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in vars(Listener) or name.startswith("_"):
            return super().__getattribute__(name)
        return lambda *details: self.events.append((name, details))


def _events(subject: Subject) -> list[Event]:
    """The events of a run that would be in a directory that is there."""
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.training.assemble import assemble

    recorder = _Recorder()
    experiment = assemble(recipe_from_dict(RECIPE))
    experiment.run_dir = subject.folder / "run"
    experiment.run_dir.mkdir(parents=True, exist_ok=True)
    experiment.run([recorder])
    return recorder.events


def _tell(logger: Logger, event: str, *details: Any) -> None:
    try:
        getattr(logger, event)(*details)
    except Exception as error:
        fail(f"{event} raised {reason_of(error)}; in a run it would be told nothing more from there on")


@holds(KIND, "a run can be told from its beginning to its end")
def told(subject: Subject) -> None:
    logger = subject()
    for name, details in _events(subject):
        _tell(logger, name, *details)


@holds(KIND, "a run that stopped can be told on")
def told_on(subject: Subject) -> None:
    events = _events(subject)
    theta = events[0][1][0].theta
    steps = [details for name, details in events if name == "stepped"]
    first = subject()
    _tell(first, "started", *events[0][1])
    for details in steps[:3]:
        _tell(first, "stepped", *details)
    _tell(first, "aborted", theta, "interrupted")
    # Another process: a new logger, the same directory, and the third step comes again.
    second = subject()
    _tell(second, "started", *events[0][1])
    _tell(second, "resumed", 2)
    for details in steps[2:]:
        _tell(second, "stepped", *details)
    _tell(second, *(events[-1][0], *events[-1][1]))


@holds(KIND, "what it receives is left unchanged")
def untouched(subject: Subject) -> None:
    logger = subject()
    for name, details in _events(subject):
        guard = Untouched(**{f"number {k + 1}": one for k, one in enumerate(details)})
        theta = details[0].theta if name in ("started", "finished") else {}
        parameters = Untouched(theta=theta)
        _tell(logger, name, *details)
        guard.verify(name)
        parameters.verify(name)
