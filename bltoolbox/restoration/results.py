"""The result of a run, and the checks on images that are not trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bltoolbox.bilevel.records import Cost
from bltoolbox.config.shown import Shown
from bltoolbox.errors import UsageError
from bltoolbox.restoration.evaluation import Evaluation
from bltoolbox.restoration.model import Model
from bltoolbox.restoration.trained import Trained
from bltoolbox.runs.metric import Metric


@dataclass(frozen=True)
class Check:
    """The metric of θ after ``step`` steps, on images that are not used for training.

    ``validation`` and ``evaluation`` are means of ``metric``: None without held-out images, or unless the recipe
    requests the evaluation images at checks.
    """

    step: int
    computations: float
    metric: Metric
    validation: float | None = None
    evaluation: float | None = None
    #: Whether no earlier θ was better on the held-out images; always if there is a penalty, which they do not show.
    best: bool = False
    #: P(θ); None where no component has a penalty.
    penalty: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for checks.jsonl, which describes the metric that it names."""
        return {
            "step": self.step,
            "computations": self.computations,
            **self.figures(),
            **({} if self.penalty is None else {"penalty": self.penalty}),
            "best": self.best,
            "metric": self.metric.as_dict(),
        }

    def figures(self) -> dict[str, float | None]:
        """The measured values, under the names used in records, e.g. ``validation_psnr``."""
        return {
            f"validation_{self.metric.name}": self.validation,
            f"evaluation_{self.metric.name}": self.evaluation,
        }

    def __str__(self) -> str:
        parts = (("validation", self.validation), ("evaluation", self.evaluation))
        closer = replace(self.metric, digits=self.metric.digits + 1)
        said = ", ".join(
            f"{name} {closer.label} {closer.show(value)}" for name, value in parts if value is not None
        )
        penalty = "" if self.penalty is None else f", penalty {self.penalty:.6g}"
        best = " (best so far)" if self.best and self.penalty is None else ""
        return f"step {self.step}: {said or 'θ kept'}{penalty}{best}"


@dataclass(frozen=True, repr=False)
class RunResult(Shown):
    """The result of a run."""

    status: str
    steps: int
    cost: Cost
    seconds: float
    model: Trained
    last: dict[str, Tensor] = field(repr=False)
    chosen: str
    metric: Metric
    #: The best mean of the metric on the held-out images; the last one where there is a penalty.
    validation: float | None = None
    evaluation: Evaluation | None = None
    initial: Evaluation | None = None
    baseline: Evaluation | None = None
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    run_dir: Path | None = None
    #: The cost of interrupted calls. They were repeated, so ``cost`` is that of an uninterrupted run.
    interrupted: Cost = field(default_factory=Cost, repr=False)

    @property
    def theta(self) -> dict[str, Tensor]:
        """The chosen parameters."""
        return self.model.theta

    def __repr__(self) -> str:
        summary = "" if self.evaluation is None else self.evaluation.summary
        quality = f", {summary}" if summary else ""
        spent = f"{self.steps} steps, {self.cost.computations:,.0f} computations, {self.seconds:.1f} s"
        where = "" if self.run_dir is None else f", {str(self.run_dir)!r}"
        return f"RunResult({self.status!r}, {spent}{quality}{where})"

    def solve(
        self, y: Tensor, tol: float | None = None, *, context: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Restore ``y`` with the learned θ."""
        if not isinstance(self.model, Model):
            raise UsageError(f"problem {self.model.recipe.problem.name!r} has no images to restore")
        return self.model.solve(y, tol, context=context)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for ``--json`` and status.json."""
        metrics = (self.evaluation.metrics if self.evaluation else ()) or (self.metric,)
        return {
            "status": self.status,
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "metrics": [metric.as_dict() for metric in metrics],
            **{key: value for metric in metrics for key, value in self._means(metric.name).items()},
            f"{self.metric.name}_validation": self.validation,
            "steps": self.steps,
            **self.cost.as_dict(),
            "interrupted_computations": self.interrupted.computations,
            "seconds": round(self.seconds, 3),
            "theta_size": self.model.size,
            "learned": self.model.learned,
            "theta": self.chosen,
        }

    def _means(self, name: str) -> dict[str, float | None]:
        """The means of one metric over the evaluation images."""
        results = {"initial": self.initial, "baseline": self.baseline, "after": self.evaluation}
        before = None if self.evaluation is None else self.evaluation.mean_before(name)
        means = {
            when: None if evaluation is None else evaluation.mean(name)
            for when, evaluation in results.items()
        }
        return {f"{name}_{when}": value for when, value in {"before": before, **means}.items()}
