"""What a run found, and what the images that are not trained on said about it on the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from bltoolbox.bilevel.records import Cost
from bltoolbox.config.shown import Shown
from bltoolbox.restoration.evaluation import Evaluation
from bltoolbox.restoration.model import Model


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


@dataclass(frozen=True, repr=False)
class RunResult(Shown):
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
