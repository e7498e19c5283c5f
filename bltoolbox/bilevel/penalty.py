"""P(θ), the part of f that needs no task: exact, in float64, added once and not weighted by the sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bltoolbox.bilevel.derivatives import gradients_of
from bltoolbox.bilevel.records import Theta, Value
from bltoolbox.bilevel.roles import Problem
from bltoolbox.bilevel.tensors import ordinary


def penalty_at(problem: Problem, theta: Theta) -> float | None:
    """P(θ); None where the problem has no penalty."""
    penalty = problem.penalty({name: ordinary(value).detach().double() for name, value in theta.items()})
    return None if penalty is None else float(penalty.detach())


def penalty_gradient(problem: Problem, theta: Theta) -> tuple[float | None, dict[str, Tensor]]:
    """P(θ) and ∇P(θ) by parameter; None and nothing where the problem has no penalty."""
    if problem.penalty(theta) is None:  # before copies are made
        return None, {}
    with torch.enable_grad():
        leaves = {name: ordinary(value).detach().double().requires_grad_() for name, value in theta.items()}
        penalty = problem.penalty(leaves)
        assert penalty is not None
        return float(penalty.detach()), gradients_of(penalty, leaves)


def add_penalty(value: Value, penalty: float | None) -> Value:
    """f with P. It is exact, so it moves both bounds alike; a θ with a penalty that is not finite is worse than any
    other."""
    if penalty is None:
        return value
    if not math.isfinite(penalty):
        return replace(value, value=math.inf, upper=math.inf, certified=False, penalty=penalty, trial=None)
    return replace(
        value,
        value=value.value + penalty,
        lower=value.lower + penalty,
        upper=value.upper + penalty,
        penalty=penalty,
    )
