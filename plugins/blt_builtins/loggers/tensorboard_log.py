"""Scalars and pictures for TensorBoard.

    tensorboard --logdir runs

Figures of steps are under `step/`, metrics of checks under `check/`, and the learned filters under `learned/`. A
resumed run writes to the same folder, and TensorBoard replaces repeated steps.

When to choose it: to follow many long runs in a browser. It needs the package tensorboard:
`pip install 'bltoolbox[tensorboard]'`.

Reference: Abadi et al., *TensorFlow: large-scale machine learning on heterogeneous systems*, 2015.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from torch import Tensor

from bltoolbox.plugin import (
    Check,
    Experiment,
    Logger,
    MissingError,
    Model,
    RunResult,
    make_folder,
    shown_filters,
    shown_parameters,
)


class TensorBoardLog(Logger):
    """Write event files.

    Args:
        folder: The folder, relative to the run directory, or to the current folder if there is none.
        every: Number of steps between two that are logged.
    """

    def __init__(self, folder: Path = Path("tensorboard"), every: Annotated[int, Gt(0)] = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingError(
                "logger 'tensorboard' needs the package tensorboard, which is not installed or cannot be imported;"
                " run pip install 'bltoolbox[tensorboard]', or remove the logger from the recipe"
            ) from error
        self.make: Any = SummaryWriter
        self.folder = folder
        self.every = every

    def started(self, experiment: Experiment) -> None:
        self.writer: Any = None
        self.step = 0
        #: Figures that are logged under `check/`, not under `step/`.
        self.checked_figures: frozenset[str] = frozenset()
        root = experiment.run_dir or Path()
        # The writer opens files by their path, so no folder on that path may be a link.
        make_folder(root / self.folder, within=root)
        self.place = str(root / self.folder)
        self.recipe = experiment.recipe

    def resumed(self, step: int) -> None:
        self.step = step
        self.writer = self.make(self.place, purge_step=step + 1)

    def stepped(self, record: Mapping[str, Any], seconds: float, fraction: float) -> None:
        self.step = record["step"]
        if self.step % self.every:
            return
        figures = {name: value for name, value in record.items() if name != "step"} | {"seconds": seconds}
        for name, value in figures.items():
            if isinstance(value, int | float) and name not in self.checked_figures:
                self._open().add_scalar(f"step/{name}", value, self.step)

    def checked(self, check: Check, theta: Mapping[str, Tensor]) -> None:
        self.checked_figures = frozenset(check.figures())
        for name, value in (("validation", check.validation), ("test", check.evaluation)):
            if value is not None:
                self._open().add_scalar(f"check/{name} {check.metric.label}", value, check.step)
        if self.writer is not None:
            self.writer.flush()

    def aborted(self, theta: Mapping[str, Tensor], reason: str) -> None:
        self._close()

    def finished(self, result: RunResult) -> None:
        if isinstance(result.model, Model):
            self._show_learned(result.model)
        if result.evaluation is not None:
            for metric in result.evaluation.metrics:
                value = result.evaluation.mean(metric.name)
                self._open().add_scalar(f"result/test {metric.label}", value, self.step)
        self._close()

    def _show_learned(self, model: Model) -> None:
        """The pictures that the components of a model of images make of θ."""
        pictures = shown_filters(model.problem, model.prepared)
        if pictures is not None and pictures.shape[1] in (1, 3):
            largest = pictures.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
            self._open().add_images(
                "learned/filters", (0.5 + 0.5 * pictures / largest).detach().cpu(), self.step
            )
        for shown in shown_parameters(model.problem, model.prepared):
            if shown.values.shape[1] in (1, 3):
                self._open().add_images(f"learned/{shown.role}", shown.shades, self.step)

    def _open(self) -> Any:
        if self.writer is None:
            self.writer = self.make(self.place)
        return self.writer

    def _close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
