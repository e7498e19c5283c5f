"""Shared by the upper-level optimizers: decaying sequences, the step, and the figures of every log line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt
from torch import Tensor

from bltoolbox.plugin import Accuracy, HypergradientResult, Oracle, Theta, theta_norm

#: A number, or `auto` for one determined at θ_0.
Auto = Literal["auto"]
Fraction = Annotated[float, Gt(0), Lt(1)]

#: `auto`: accuracies relative to the sizes at θ_0.
_ACCURACY = 0.02


def accuracies(
    oracle: Oracle, theta: Theta, tol: float | Auto, adjoint_tol: float | None
) -> tuple[float, float]:
    """ε_0 and δ_0. With `auto`, ε_0 is relative to how far the lower level moves and δ_0 to the right-hand side."""
    if tol != "auto":
        return tol, tol if adjoint_tol is None else adjoint_tol
    scales = oracle.scales(theta)
    return _ACCURACY * scales.distance, adjoint_tol or _ACCURACY * scales.slope


@dataclass(frozen=True)
class Sampled:
    """z_k with its accuracies, and the state that stores their initial values."""

    result: HypergradientResult
    tol: float
    adjoint_tol: float
    state: dict[str, Any]


def sampled_gradient(
    oracle: Oracle,
    theta: Theta,
    state: Mapping[str, Any],
    tol: float | Auto,
    adjoint_tol: float | None,
    decay: float,
) -> Sampled:
    """z_k at ε_k = ε_0 (k+1)^{−decay} and δ_k likewise, k = ``state["k"]``; ε_0 and δ_0 are determined once."""
    after = dict(state)
    if "tol" not in after:
        after["tol"], after["adjoint_tol"] = accuracies(oracle, theta, tol, adjoint_tol)
    accuracy = power_decay(after["tol"], decay, state["k"])
    adjoint_accuracy = power_decay(after["adjoint_tol"], decay, state["k"])
    result = oracle.hypergradient(theta, Accuracy(accuracy), Accuracy(adjoint_accuracy))
    return Sampled(result, accuracy, adjoint_accuracy, after)


def power_decay(first: float, decay: float, k: int, hold: int = 1) -> float:
    """a_k = a_0 ((k+1)/hold)^{−decay}, and a_0 for the first ``hold`` steps; summable for a decay above 1."""
    return float(first * max(1.0, (k + 1) / hold) ** -decay)


def descend(oracle: Oracle, theta: Theta, direction: Theta, alpha: float) -> dict[str, Tensor]:
    """θ⁺ = Π(θ − α·direction)."""
    return oracle.project({name: value - alpha * direction[name] for name, value in theta.items()})


def step_metrics(alpha: float, tol: float, adjoint_tol: float, z: Theta) -> dict[str, float | int | str]:
    """The length of the step, the accuracies of z, and the norm of z."""
    return {
        "step_size": alpha,
        "tol": tol,
        "adjoint_tol": adjoint_tol,
        "gradient_norm": theta_norm(z.values()),
    }
