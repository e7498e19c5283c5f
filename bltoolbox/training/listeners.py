"""What a run tells, and what it finds: the listeners around an experiment, and its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from bltoolbox.bilevel.events import Listener as Listener
from bltoolbox.bilevel.records import Cost
from bltoolbox.bilevel.roles import Theta
from bltoolbox.errors import BltError
from bltoolbox.restoration.evaluation import Evaluation
from bltoolbox.restoration.model import Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bltoolbox.training.experiment import Experiment


@dataclass(frozen=True)
class Check:
    """What the images that are not trained on said about θ after ``step`` steps.

    ``validation_psnr`` is None without held-out images, ``evaluation_psnr`` unless the recipe asks for it at checks.
    """

    step: int
    computations: int
    validation_psnr: float | None = None
    evaluation_psnr: float | None = None
    #: Whether no θ before was better on the held-out images.
    best: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data for checks.jsonl."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (("validation", self.validation_psnr), ("evaluation", self.evaluation_psnr))
        said = ", ".join(f"{name} PSNR {psnr:.3f} dB" for name, psnr in parts if psnr is not None)
        return f"step {self.step}: {said or 'θ kept'}" + (" (best so far)" if self.best else "")


class Guarded(Listener):
    """A logger of the recipe: once it fails it is told nothing more, and the run goes on without it."""

    def __init__(self, name: str, logger: Listener) -> None:
        self.name, self.logger, self.broken = name, logger, False

    def _pass_on(self, event: str, *details: Any) -> None:
        if self.broken:
            return
        try:
            getattr(self.logger, event)(*details)
        except Exception as error:
            self.broken = True
            logging.getLogger(__name__).warning(
                "logger %r failed (%s: %s); the run goes on without it",
                self.name,
                type(error).__name__,
                error,
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


@dataclass(frozen=True, repr=False)
class RunResult:
    """What a run found."""

    status: str
    steps: int
    cost: Cost
    seconds: float
    model: Model
    last: dict[str, Tensor] = field(repr=False)
    chosen: str
    validation_psnr: float | None = None
    evaluation: Evaluation | None = None
    initial: Evaluation | None = None
    baseline: Evaluation | None = None
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    run_dir: Path | None = None
    #: What calls cost that an interruption cut off. They were repeated, so ``cost`` is that of an uninterrupted run.
    interrupted: Cost = field(default_factory=Cost, repr=False)

    @property
    def theta(self) -> dict[str, Tensor]:
        """The chosen parameters."""
        return self.model.theta

    def __repr__(self) -> str:
        before = "" if self.evaluation is None else f"{self.evaluation.psnr_before:.2f} -> "
        psnr = "" if self.evaluation is None else f", PSNR {before}{self.evaluation.psnr:.2f} dB"
        spent = f"{self.steps} steps, {self.cost.computations:,} computations, {self.seconds:.1f} s"
        where = "" if self.run_dir is None else f", {str(self.run_dir)!r}"
        return f"RunResult({self.status!r}, {spent}{psnr}{where})"

    def _repr_html_(self) -> str:
        from bltoolbox.reports.notebook import result_html

        return result_html(self)

    def plot(self) -> Figure:
        """Loss and PSNR against computations, as a figure that a notebook shows; ``savefig`` writes it to a file."""
        from bltoolbox.reports.figures import curves

        if (figure := curves(self)) is None:
            raise BltError("there is nothing to plot: the run made no step")
        return figure

    def images(self) -> Figure:
        """Evaluation images, true, measured and restored, as a figure that a notebook shows."""
        from bltoolbox.reports.figures import restored

        if (figure := restored(self)) is None:
            raise BltError("there is no image to show: the recipe has no evaluation images")
        return figure

    def solve(self, y: Tensor, tol: float | None = None) -> Tensor:
        """Restore ``y`` with what was learned."""
        return self.model.solve(y, tol)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json`` and status.json."""

        def mean(evaluation: Evaluation | None) -> float | None:
            return None if evaluation is None else evaluation.psnr

        return {
            "status": self.status,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "psnr_before": None if self.evaluation is None else self.evaluation.psnr_before,
            "psnr_initial": mean(self.initial),
            "psnr_baseline": mean(self.baseline),
            "psnr_after": mean(self.evaluation),
            "psnr_validation": self.validation_psnr,
            "steps": self.steps,
            **self.cost.as_dict(),
            "interrupted_computations": self.interrupted.computations,
            "seconds": round(self.seconds, 3),
            "theta_size": self.model.size,
            "theta": self.chosen,
        }


class Keeper(Protocol):
    """Keeps checkpoints: a run directory is one."""

    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        ...

    def keep(self, content: Mapping[str, Any]) -> None:
        """Write a checkpoint: ``content``, and the warm starts of the experiment's oracle."""
        ...
