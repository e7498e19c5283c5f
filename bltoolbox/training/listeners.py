"""The listeners around an experiment, and its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from bltoolbox.bilevel.events import Listener as Listener
from bltoolbox.bilevel.records import Theta
from bltoolbox.errors import BltError
from bltoolbox.restoration.results import Check, RunResult

if TYPE_CHECKING:
    from bltoolbox.training.experiment import Experiment


class Guarded(Listener):
    """A logger of the recipe: after it fails it receives no further events, and the run continues without it."""

    def __init__(self, name: str, logger: Listener) -> None:
        self.name, self.logger, self.broken = name, logger, False

    def _pass_on(self, event: str, *details: Any) -> None:
        if self.broken:
            return
        try:
            getattr(self.logger, event)(*details)
        except Exception as error:
            self.broken = True
            reason = error if isinstance(error, BltError) else f"{type(error).__name__}: {error}"
            logging.getLogger(__name__).warning(
                "logger %r failed (%s); the run continues without it", self.name, reason
            )

    def started(self, experiment: Experiment) -> None:
        self._pass_on("started", experiment)

    def resumed(self, step: int) -> None:
        self._pass_on("resumed", step)

    def phase(self, sentence: str) -> None:
        self._pass_on("phase", sentence)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self._pass_on("stepped", record, seconds, fraction)

    def checked(self, check: Check, theta: Theta) -> None:
        self._pass_on("checked", check, theta)

    def aborted(self, theta: Theta, reason: str) -> None:
        self._pass_on("aborted", theta, reason)

    def finished(self, result: RunResult) -> None:
        self._pass_on("finished", result)


class Keeper(Protocol):
    """Writes checkpoints; a run directory is one."""

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        ...

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write a checkpoint: ``content``, and the warm starts of the experiment's oracle."""
        ...

    def finish(self) -> None:
        """The run has finished: drop what only a run with a larger budget would need."""
        ...
