"""How good a θ is: cold solves to a tight tolerance, and PSNR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bltoolbox.errors import NumericalError
from bltoolbox.interfaces import LowerSolver, Theta
from bltoolbox.loop import solve
from bltoolbox.problem import LowerLevel, Problem
from bltoolbox.results import Solution, Status
from bltoolbox.samples import Samples


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


@dataclass(frozen=True)
class Evaluation:
    """PSNR of each image, before (the cold start) and after."""

    before: list[float]
    after: list[float]
    labels: list[str]
    iterations: int
    images: list[Restored] = field(default_factory=list, repr=False)

    @property
    def psnr_before(self) -> float:
        return sum(self.before) / len(self.before)

    @property
    def psnr(self) -> float:
        return sum(self.after) / len(self.after)


def solve_cold(solver: LowerSolver, lower: LowerLevel, tol: float, limit: int) -> Solution:
    """From the operator's start to a distance ``tol`` (a gradient norm where μ is unknown)."""
    mu = torch.where(lower.mu > 0, lower.mu, 1.0)
    solution = solve(solver, lower, lower.start(), tol * mu, limit=limit)
    for status in solution.status:
        if status in (Status.NOT_FINITE, Status.DIVERGED):
            raise NumericalError(f"lower-level solver {type(solver).__name__}: {status.value}")
    return solution


def evaluate(
    problem: Problem,
    theta: Theta,
    samples: Samples,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int = 32,
    limit: int = 2000,
    positions: Sequence[int] | None = None,
    keep: int = 0,
) -> Evaluation:
    """Restore ``samples`` from a cold start; the first ``keep`` images are returned with the figures."""
    at = problem.at(theta, samples.shape)
    positions = range(len(samples)) if positions is None else positions
    before: list[float] = []
    after: list[float] = []
    images: list[Restored] = []
    iterations = 0
    for first in range(0, len(positions), chunk):
        x_true, y = samples.batch(positions[first : first + chunk])
        lower = at.on(y)
        solution = solve_cold(solver, lower, tol, limit)
        start = lower.start()
        before += psnr(start, x_true).tolist()
        after += psnr(solution.x, x_true).tolist()
        iterations += int(solution.iterations.sum())
        for triple in zip(x_true, start, solution.x, strict=True):
            if len(images) < keep:
                images.append(Restored(*(image.cpu().contiguous() for image in triple)))
    labels = [samples.label(position) for position in positions]
    return Evaluation(before, after, labels, iterations, images)
