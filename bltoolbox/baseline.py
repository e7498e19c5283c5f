"""A reference to beat: a regularizer with one or two parameters, tuned on the training data.

Derivative-free on purpose: coordinate-wise golden-section search needs nothing of what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from bltoolbox.errors import BltError
from bltoolbox.evaluation import evaluate
from bltoolbox.interfaces import LowerSolver, Theta
from bltoolbox.problem import Problem
from bltoolbox.ranks import ALONE, Ranks
from bltoolbox.samples import Samples

#: Training images to tune on, half-width of the first search interval (in the parameter, usually a logarithm),
#: and its final width.
_IMAGES, _RADIUS, _WIDTH = 16, 2.0, 0.05
_SWEEPS = 2
_GOLDEN = (math.sqrt(5) - 1) / 2


def tune(
    problem: Problem,
    theta: Theta,
    samples: Samples,
    solver: LowerSolver,
    *,
    tol: float,
    chunk: int,
    limit: int,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """θ with the best mean PSNR on the first training images."""
    best = {name: value.clone() for name, value in theta.items()}
    if sum(value.numel() for value in best.values()) > 2:
        raise BltError("a baseline must be a regularizer with at most two parameters, such as tv")
    positions = range(min(_IMAGES, len(samples)))

    def loss(name: str, value: float) -> float:
        trial = best | {name: best[name].new_full(best[name].shape, value)}
        return -evaluate(
            problem,
            trial,
            samples,
            solver,
            tol=tol,
            chunk=chunk,
            limit=limit,
            positions=positions,
            ranks=ranks,
        ).psnr

    radius = _RADIUS
    for _ in range(_SWEEPS):
        for name in best:
            centre = float(best[name])
            cost = partial(loss, name)
            value = golden_section(cost, centre - radius, centre + radius, _WIDTH)
            best[name] = best[name].new_full(best[name].shape, value)
        radius /= 4
    return best


def golden_section(function: Callable[[float], float], low: float, high: float, width: float) -> float:
    """The minimiser of a unimodal function on [low, high], to within ``width``."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return left if at_left <= at_right else right
