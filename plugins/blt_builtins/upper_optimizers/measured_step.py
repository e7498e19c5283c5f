"""The step length of `isgd-ls`, by the decrease that a step achieves.

    r(α) = (f(θ) − f(θ − αz)) / (α‖z‖²)

α is doubled while r > high, and halved while r < low.
"""

from __future__ import annotations

import math

import torch

from blt_builtins.upper_optimizers.schedule import descend
from bltoolbox.plugin import Accuracy, NumericalError, Oracle, Theta, theta_norm

#: Trials per measurement.
_TRIALS = 40
#: The fraction of the loss below which a predicted decrease is hidden by the error of the values.
_UNSEEN = 1e-3
#: The fraction of the loss below which a change is lost in the rounding of values.
_ROUNDING = 1e-10


def measured_step(
    theta: Theta,
    oracle: Oracle,
    z: Theta,
    alpha: float,
    tol: float,
    limits: tuple[float, float],
    *,
    search: bool,
) -> tuple[float, int]:
    """A step length that achieves enough of its predicted decrease, and the number of values computed.

    With ``search`` it is doubled as often as necessary, otherwise at most once, to limit the effect of a single batch.
    """
    slope = theta_norm(z.values()) ** 2
    base = _value(theta, oracle, tol)
    while search and alpha * slope < _UNSEEN * abs(base):
        alpha *= 10
    visible = alpha * slope > _UNSEEN * abs(base)
    responds = visible and _differ(descend(oracle, theta, z, alpha), theta)
    (low, high), last = limits, 0
    for trial in range(1, _TRIALS + 1):
        predicted = alpha * slope
        if predicted <= _ROUNDING * abs(base):
            # Later, θ is stationary as far as can be measured; at the first step nothing has worked yet.
            if not (search and responds):
                return alpha, trial
            raise NumericalError(
                f"no step, however short, decreases the loss as its gradient of norm {math.sqrt(slope):.3g}"
                f" predicts; solutions to the accuracy {tol:.3g} may not follow θ; decrease upper_optimizer.tol"
            )
        gain = (base - oracle.value(descend(oracle, theta, z, alpha), Accuracy(tol)).value) / predicted
        wish = -1 if gain < low else 1 if gain > high and (search or last == 0) else 0
        if wish == 0 or wish == -last:
            # After a change of direction, take the shorter of the two neighbours, which has the higher gain.
            return alpha if wish >= 0 else alpha / 2, trial + 1
        alpha *= 2.0**wish
        last = wish
    return alpha, _TRIALS + 1


def _value(theta: Theta, oracle: Oracle, tol: float) -> float:
    value = oracle.value(theta, Accuracy(tol)).value
    if not math.isfinite(value):
        raise NumericalError(
            f"the loss cannot be computed to the accuracy {tol:.3g} that its changes are measured with; increase"
            " upper_optimizer.tol or value_tol, or use dtype: float64"
        )
    return value


def _differ(first: Theta, second: Theta) -> bool:
    """Whether a step has an effect; at a constraint it may have none."""
    return any(not torch.equal(value, second[name]) for name, value in first.items())
