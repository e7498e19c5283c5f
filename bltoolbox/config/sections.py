"""Sections of a recipe that are not components: budget, validation, checkpoints and certificates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt


@dataclass(frozen=True)
class Budget:
    """How much a run may spend. It ends at the first limit reached; at least one must be set.

    Args:
        computations: Lower-level and linear iterations, summed over samples.
        steps: Upper-level steps.
        seconds: Wall-clock time of training with its checks and of tuning the baseline, for which a fifth is reserved
            if the recipe has one. The current oracle call or check is completed; the
            final evaluation, which every run needs, is extra.
    """

    computations: Annotated[float, Gt(0)] | None = None
    steps: Annotated[int, Gt(0)] | None = None
    seconds: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        if self.computations is None and self.steps is None and self.seconds is None:
            raise ValueError(
                "set at least one of computations, steps and seconds; otherwise the run would never end"
            )


@dataclass(frozen=True)
class Validation:
    """How the run chooses between the best θ and the last one; where there is a penalty on θ, the last one is kept.

    Args:
        count: Training images held out, with all others from the same photographs; 0 keeps the last θ. Other problems
            than variational have their own tasks for validation.
        checks: Number of times the held-out images are restored, evenly over the budget.
        patience: Checks without improvement after which the run stops early; never by default.
        evaluation: Also restore the evaluation images at each check and log their metric, which never affects the run.
        metric: Metric of the held-out images that decides which θ is best: psnr or ssim (higher is better), nrmse, or
            loss, the mean of the upper loss, which may need no true images. Other problems have other metrics
            (blt show problem/NAME). By default the first metric of the problem.
    """

    count: Annotated[int, Ge(0)] = 16
    checks: Annotated[int, Gt(0)] = 10
    patience: Annotated[int, Gt(0)] | None = None
    evaluation: bool = False
    metric: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are written, and what becomes of warm starts, which are most of their bytes.

    Args:
        every: Seconds between checkpoints; 0 writes one after every oracle call. Less often if they would take more
            than 5 % of the time.
        warm_starts: How warm starts are kept from step to step: full; float16, in half of the bytes and with 11 bits;
            or none, so that every step starts cold and memory and checkpoints hold one batch. A run is resumed
            exactly with each. Methods whose iterates are the warm starts need full.
        keep_finished: Keep the warm starts on disk when the run has finished. Without them a finished run can still be
            resumed with a larger budget, but starts cold, so the result is that of a longer run up to the
            tolerances only. Methods whose iterates are the warm starts always keep them.
    """

    every: Annotated[float, Ge(0)] = 60.0
    warm_starts: Literal["full", "float16", "none"] = "full"
    keep_finished: bool = False


@dataclass(frozen=True)
class Certificates:
    """What is logged about accuracy besides the distance to the lower-level minimiser, which is always logged.

    Args:
        bound: Error bound of the hypergradient: estimated, certified where all constants are known (else
            estimated; refused where more than the regularizer has parameters), or none.
        every: Hypergradients between two bounds; one costs about half a warm hypergradient.
    """

    bound: Literal["estimated", "certified", "none"] = "estimated"
    every: Annotated[int, Gt(0)] = 10
