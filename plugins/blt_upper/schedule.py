"""What the upper-level optimizers share: decaying sequences, the step itself, and the numbers every log line has."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from bltoolbox.interfaces import Oracle, Theta
from bltoolbox.tensors import theta_norm

#: A number, or one found at θ_0.
Auto = Literal["auto"]

#: `auto`: accuracies relative to the sizes at θ_0, and the length of the first step relative to that of θ_0.
_ACCURACY, _FIRST_STEP = 0.02, 0.05


def accuracies(
    oracle: Oracle, theta: Theta, tol: float | Auto, adjoint_tol: float | None
) -> tuple[float, float]:
    """ε_0 and δ_0. With `auto`, ε_0 is relative to how far the lower level moves and δ_0 to the right-hand side."""
    if tol != "auto":
        return tol, tol if adjoint_tol is None else adjoint_tol
    scales = oracle.scales(theta)
    return _ACCURACY * scales.distance, adjoint_tol or _ACCURACY * scales.slope


def first_step(step: float | Auto, theta: Theta, z: Theta) -> float:
    """α_0. With `auto`, the first step changes θ by a twentieth of its norm."""
    if step != "auto":
        return step
    length = theta_norm(z.values())
    return _FIRST_STEP * theta_norm(theta.values()) / length if length else 1.0


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
