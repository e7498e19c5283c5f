"""What happens in a run, as those are told who listen: progress displays, run directories, loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bltoolbox.restoration.results import Check, RunResult
    from bltoolbox.training.experiment import Experiment


class Listener:
    """Is told what happens, on rank 0 alone; every method may be left out. What it is given must not be changed."""

    def started(self, experiment: Experiment) -> None:
        """Everything is built; nothing has been computed.

        ``experiment.recipe`` says what is run and ``experiment.run_dir`` where it is written, None if nowhere.
        """

    def resumed(self, step: int) -> None:
        """Told after ``started`` when a run goes on: steps behind ``step`` come again, whatever was told of them."""

    def phase(self, sentence: str) -> None:
        """Something that is not a training step takes time now."""

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        """One step is done: its log record, the time since the start, and the part of the budget that is used."""

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        """The held-out images were restored with θ."""

    def aborted(self, theta: Mapping[str, Tensor], reason: str) -> None:
        """The run ended without a result; ``theta`` is the last good one."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""
