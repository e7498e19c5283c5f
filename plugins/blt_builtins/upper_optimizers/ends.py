"""Why an upper-level optimizer ends by itself."""

from __future__ import annotations

import torch

from bltoolbox.plugin import HypergradientResult, Theta, theta_norm

ZERO = "converged: the hypergradient is zero"
TOO_SHORT = "converged-to-precision: no step that changes θ decreases the loss"
_FLOOR = "converged-to-precision: the accuracy this step needs is below the floor of the dtype"


def is_lost(theta: Theta, length: float) -> bool:
    """Whether a step of this length changes θ by less than its rounding."""
    precision = torch.finfo(next(iter(theta.values())).dtype).eps
    return length < precision * theta_norm(theta.values())


def exhausted(theta: Theta, result: HypergradientResult, accurate: bool, alpha: float) -> str | None:
    """Why tightening the accuracies cannot help any more, or None."""
    length = theta_norm(result.gradient.values())
    if length == 0 and not result.bound:
        return ZERO
    if result.at_floor:
        return _FLOOR
    return TOO_SHORT if accurate and is_lost(theta, alpha * length) else None
