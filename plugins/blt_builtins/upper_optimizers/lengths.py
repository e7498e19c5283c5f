"""Step lengths that upper-level optimizers choose: the first one, and the next one by the curvature of f."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from blt_builtins.upper_optimizers.schedule import Auto, descend
from bltoolbox.plugin import Accuracy, HypergradientResult, Oracle, Theta, theta_norm

#: `auto`: the first step predicts a decrease by at most this fraction of the loss and changes θ by at most this
#: fraction of its norm.
_PROMISE, _CHANGE = 0.25, 0.05
_HALVINGS = 30
#: The largest change of the step length from one step to the next that a measured curvature may cause.
_FACTOR = 4


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
