"""What the upper-level optimizers share: decaying sequences, the step itself, and the numbers every log line has."""

from __future__ import annotations

from torch import Tensor

from bltoolbox.interfaces import Oracle, Theta
from bltoolbox.tensors import theta_norm


def power_decay(first: float, decay: float, k: int) -> float:
    """a_k = a_0 (k+1)^{−decay}; summable for a decay above 1."""
    return float(first * (k + 1) ** -decay)


def descend(oracle: Oracle, theta: Theta, direction: Theta, alpha: float) -> dict[str, Tensor]:
    """θ⁺ = Π(θ − α·direction)."""
    return oracle.project({name: value - alpha * direction[name] for name, value in theta.items()})


def step_metrics(alpha: float, tol: float, adjoint_tol: float, z: Theta) -> dict[str, float | int | str]:
    """How long the step was, how accurate its z, and how long that."""
    return {
        "step_size": alpha,
        "tol": tol,
        "adjoint_tol": adjoint_tol,
        "gradient_norm": theta_norm(z.values()),
    }
