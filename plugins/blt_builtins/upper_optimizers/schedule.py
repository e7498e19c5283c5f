"""Shared by the upper-level optimizers: decaying sequences, the step, and the figures of every log line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from bltoolbox.plugin import Accuracy, HypergradientResult, Oracle, Theta, theta_norm

#: A number, or `auto` for one determined at θ_0.
Auto = Literal["auto"]
Fraction = Annotated[float, Gt(0), Lt(1)]

#: Why a method ends by itself.
ZERO = "converged: the hypergradient is zero"
TOO_SHORT = "converged-to-precision: no step that changes θ decreases the loss"

#: `auto`: accuracies relative to the sizes at θ_0; the first step predicts a decrease by at most this fraction of the
#: loss and changes θ by at most this fraction of its norm.
_ACCURACY, _PROMISE, _CHANGE = 0.02, 0.25, 0.05
_HALVINGS = 30
#: The largest change of the step length from one step to the next that a measured curvature may cause.
_FACTOR = 4


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


def first_step(step: float | Auto, theta: Theta, result: HypergradientResult) -> float:
    """α_0. With `auto`, the largest step for which α‖z‖² is at most a quarter of the loss, as in Polyak's rule for a
    loss that can reach zero, and α‖z‖ at most a twentieth of ‖θ‖; so θ does not depend on the scale of the loss."""
    if step != "auto":
        return step
    length = theta_norm(result.gradient.values())
    if length == 0:
        return 1.0
    # If θ or f is zero, a fraction of it is meaningless; a penalty may make f negative.
    size, loss = theta_norm(theta.values()) or math.inf, abs(result.value.value) or math.inf
    alpha = min(_PROMISE * loss / length**2, _CHANGE * size / length)
    return alpha if math.isfinite(alpha) else 1 / length


def safe_first_step(
    step: float | Auto, theta: Theta, oracle: Oracle, result: HypergradientResult, tol: float
) -> float:
    """α_0 for a method without line search.

    With `auto`, half of the first of α, α/2, α/4, … that achieves a quarter of its predicted decrease on the first
    batch, where α‖z‖² is the decrease of a linear f.
    """
    alpha = first_step(step, theta, result)
    length = theta_norm(result.gradient.values())
    if step != "auto" or length == 0:
        return alpha
    for _ in range(_HALVINGS):
        value = oracle.value(descend(oracle, theta, result.gradient, alpha), Accuracy(tol)).value
        if value <= result.value.value - alpha * length**2 / 4:
            break
        alpha /= 2
    return alpha / 2


def spectral_step(theta: Theta, z: Theta, previous: Mapping[str, Tensor], last: float) -> float | None:
    """The step of Barzilai & Borwein, ⟨s, y⟩/‖y‖² for the last step s and the change y of z along it, within a factor
    of ``last``; None where no positive curvature was met. ``previous`` has θ and z before the step: `theta/…`, `z/…`.

    Of their two steps this is the shorter one, which a monotone line search rejects less often.
    """
    product = square = 0.0
    for name, value in theta.items():
        change = (z[name] - previous[f"z/{name}"]).double()
        product += float(((value - previous[f"theta/{name}"]).double() * change).sum())
        square += float(change.square().sum())
    if not product > 0:
        return None
    return min(max(product / square, last / _FACTOR), last * _FACTOR)


def power_decay(first: float, decay: float, k: int) -> float:
    """a_k = a_0 (k+1)^{−decay}; summable for a decay above 1."""
    return float(first * (k + 1) ** -decay)


def descend(oracle: Oracle, theta: Theta, direction: Theta, alpha: float) -> dict[str, Tensor]:
    """θ⁺ = Π(θ − α·direction)."""
    return oracle.project({name: value - alpha * direction[name] for name, value in theta.items()})


def is_lost(theta: Theta, length: float) -> bool:
    """Whether a step of this length changes θ by less than its rounding."""
    precision = torch.finfo(next(iter(theta.values())).dtype).eps
    return length < precision * theta_norm(theta.values())


def step_metrics(alpha: float, tol: float, adjoint_tol: float, z: Theta) -> dict[str, float | int | str]:
    """The length of the step, the accuracies of z, and the norm of z."""
    return {
        "step_size": alpha,
        "tol": tol,
        "adjoint_tol": adjoint_tol,
        "gradient_norm": theta_norm(z.values()),
    }
