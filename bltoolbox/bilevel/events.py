"""The events of a run, for its listeners: progress displays, run directories, loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bltoolbox.restoration.results import Check, RunResult
    from bltoolbox.training.experiment import Experiment


class Listener:
    """Receives the events of a run, on rank 0 only; every method is optional. Arguments must not be changed."""

    def started(self, experiment: Experiment) -> None:
        """Everything is built; nothing has been computed.

        ``experiment.recipe`` is the recipe and ``experiment.run_dir`` the run directory, None if nothing is written.
        """

    def resumed(self, step: int) -> None:
        """Follows ``started`` when a run is resumed: steps after ``step`` are repeated, even if they were reported
        before."""

    def phase(self, sentence: str) -> None:
        """Something other than a training step takes time now."""

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        """A step is done: its log record, the time since the start, and the fraction of the budget used."""

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        """The held-out tasks were solved with θ."""

    def aborted(self, theta: Mapping[str, Tensor], reason: str) -> None:
        """The run ended without a result; ``theta`` is the last good one."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""
