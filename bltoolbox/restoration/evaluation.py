"""How good a θ is: cold solves to a tight tolerance, and PSNR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Solution, Status, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import detached
from bltoolbox.config.shown import Shown
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.distributed.signals import allowed
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.samples import Samples
from bltoolbox.restoration.variational import Variational


def psnr(x: Tensor, x_true: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, for peak 1; x is clipped to [0, 1] first."""
    error = (x.clamp(0, 1) - x_true).double().square().flatten(1).mean(1)
    return -10 * error.log10()


@dataclass(frozen=True)
class Restored:
    """One evaluated image, kept for pictures (CPU)."""

    x_true: Tensor
    start: Tensor
    x: Tensor


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """PSNR of each image, before (the cold start) and after."""

    before: list[float]
    after: list[float]
    labels: list[str]
    iterations: int
    images: list[Restored] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        count = len(self.after)
        return f"Evaluation({count} image{'s' * (count != 1)}, PSNR {self.psnr_before:.2f} -> {self.psnr:.2f} dB)"

    @property
    def psnr_before(self) -> float:
        return sum(self.before) / len(self.before)

    @property
    def psnr(self) -> float:
        return sum(self.after) / len(self.after)


def solve_cold(solver: LowerSolver, lower: Lower, tol: float, limit: int) -> Solution:
    """From the operator's start to a distance ``tol`` (a gradient norm where no μ > 0 is known). Not differentiable."""
    with detached():
        solution = solve(solver, lower, lower.start(), lower.gradient_tol(tol), limit=limit)
    for status in solution.status:
        if status in (Status.NOT_FINITE, Status.DIVERGED):
            raise NumericalError(f"lower-level solver {type(solver).__name__}: {status.value}")
    return solution


def evaluate(
    problem: Variational,
    theta: Theta,
    samples: Samples,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int = 32,
    limit: int = 2000,
    positions: Sequence[int] | None = None,
    keep: int = 0,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Restore ``samples`` from a cold start; the first ``keep`` images are returned with the figures.

    On several ranks each restores some; all get the figures, and rank 0 the images.
    """
    at = problem.at(theta, samples.shape)
    positions = range(len(samples)) if positions is None else positions
    mine = range(ranks.rank, len(positions), ranks.size)
    images: dict[int, Restored] = {}

    def work() -> dict[str, Any]:
        before: list[float] = []
        after: list[float] = []
        iterations = 0
        with allowed(), detached():
            for first in range(0, len(mine), chunk):
                places = mine[first : first + chunk]
                sample = samples.batch([positions[place] for place in places])
                x_true, lower = sample.truth, at.on(sample.y, sample.context)
                assert x_true is not None
                solution = solve_cold(solver, lower, tol, limit)
                start = lower.start()
                before += psnr(start, x_true).tolist()
                after += psnr(solution.x, x_true).tolist()
                iterations += int(solution.iterations.sum())
                for place, *triple in zip(places, x_true, start, solution.x, strict=True):
                    if place < keep:
                        images[place] = Restored(*(image.cpu().contiguous() for image in triple))
        return {"before": before, "after": after, "iterations": iterations}

    words = ranks.each("evaluation", work)
    _bring_to_first(ranks, images, min(keep, len(positions)), samples)
    labels = [samples.label(position) for position in positions]
    return Evaluation(
        _in_order([word["before"] for word in words]),
        _in_order([word["after"] for word in words]),
        labels,
        sum(word["iterations"] for word in words),
        [images[place] for place in sorted(images)],
    )


def _in_order(parts: Sequence[Sequence[float]]) -> list[float]:
    """The results of all ranks, which took turns."""
    return [parts[k % len(parts)][k // len(parts)] for k in range(sum(len(part) for part in parts))]


def _bring_to_first(ranks: Ranks, images: dict[int, Restored], keep: int, samples: Samples) -> None:
    """Send rank 0 the images that it draws."""
    for place in range(keep):
        home = place % ranks.size
        if home == 0 or ranks.rank not in (0, home):
            continue
        buffer = torch.empty((3, *samples.shape), dtype=samples.dtype)
        if ranks.first:
            ranks.exchange({}, {home: buffer})
            images[place] = Restored(*buffer)
        else:
            one = images[place]
            ranks.exchange({0: torch.stack([one.x_true, one.start, one.x], out=buffer)}, {})
