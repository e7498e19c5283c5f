"""Properties of loggers: they handle the events of a small run and do not change them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.roles import Logger
from bltoolbox.config.reading import LOG, read_bytes
from bltoolbox.config.wording import reason_of
from bltoolbox.testing.checks.base import Subject, Untouched, fail, holds, require
from bltoolbox.testing.checks.hidden_state import NAME

KIND = "logger"
#: A very short run that emits every kind of event.
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
    """Records every event with its arguments."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in vars(Listener) or name.startswith("_"):
            return super().__getattribute__(name)
        return lambda *details: self.events.append((name, details))


def _events(subject: Subject) -> list[Event]:
    """The events of a run whose directory exists."""
    from bltoolbox.config.recipe import recipe_from_dict
    from bltoolbox.training.assemble import assemble

    recorder = _Recorder()
    experiment = assemble(recipe_from_dict(RECIPE))
    experiment.run_dir = subject.folder / "run"
    experiment.run_dir.mkdir(parents=True, exist_ok=True)
    experiment.run([recorder])
    return recorder.events


def _notify(logger: Logger, event: str, *details: Any) -> None:
    try:
        getattr(logger, event)(*details)
    except Exception as error:
        fail(f"{event} raised {reason_of(error)}; in a run, the logger would receive no further events")


@holds(KIND, "handles the events of a complete run")
def complete_run(subject: Subject) -> None:
    logger = subject()
    for name, details in _events(subject):
        _notify(logger, name, *details)


@holds(KIND, "handles the events of a resumed run")
def resumed_run(subject: Subject) -> None:
    events = _events(subject)
    theta = events[0][1][0].theta
    steps = [details for name, details in events if name == "stepped"]
    first = subject()
    _notify(first, "started", *events[0][1])
    for details in steps[:3]:
        _notify(first, "stepped", *details)
    _notify(first, "aborted", theta, "interrupted")
    # Another process: a new logger, the same directory, and the third step is repeated.
    second = subject()
    _notify(second, "started", *events[0][1])
    _notify(second, "resumed", 2)
    for details in steps[2:]:
        _notify(second, "stepped", *details)
    _notify(second, *(events[-1][0], *events[-1][1]))


@holds(KIND, NAME)
def no_hidden_state(subject: Subject) -> None:
    """A logger that is used for a second run starts anew: files of the first are closed, and no figure is carried
    over."""
    events = _events(subject)
    used = subject()
    first, alone = (
        _logged(logger, events, subject.folder / name) for logger, name in ((used, "a"), (subject(), "b"))
    )
    second = _logged(used, events, subject.folder / "c")
    cause = "whatever belongs to a run must begin with started"
    require(
        first == _contents(subject.folder / "a"),
        f"a second run with the same logger changed the files of the first; {cause}",
    )
    # Files that contain times or host names differ between any two runs.
    require(
        first != alone or second == alone,
        f"the files of a second run with the same logger differ from those of a new logger; {cause}",
    )


def _logged(logger: Logger, events: Sequence[Event], folder: Path) -> dict[str, bytes]:
    """The files that a logger writes about a run in ``folder``."""
    folder.mkdir()
    experiment = events[0][1][0]
    experiment.run_dir = folder
    for name, details in events:
        _notify(logger, name, *details)
    return _contents(folder)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): read_bytes(file, LOG)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@holds(KIND, "arguments are left unchanged")
def untouched(subject: Subject) -> None:
    logger = subject()
    for name, details in _events(subject):
        guard = Untouched(**{f"number {k + 1}": detail for k, detail in enumerate(details)})
        theta = details[0].theta if name in ("started", "finished") else {}
        parameters = Untouched(theta=theta)
        _notify(logger, name, *details)
        guard.verify(name)
        parameters.verify(name)
