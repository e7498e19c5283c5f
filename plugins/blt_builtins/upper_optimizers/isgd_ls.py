"""Inexact stochastic gradient descent that measures its step length.

    θ_{k+1} = Π(θ_k − α_k z_{v_k}(θ_k)),        r(α) = (f_v(θ_k) − f_v(θ_k − αz)) / (α‖z‖²)

r is the actual decrease of a step divided by the decrease that z predicts, measured on the batch of z. On a quadratic
it falls linearly, from 1 for a vanishing step through ½ for the best step to 0 for a step that gains nothing, so one
measurement shows whether to lengthen or shorten the step. It is taken at the first steps, at regular intervals after
that, and whenever a step would go further than the last one measured (the curvature of f grows along the way): α is
doubled if r > `high`, halved while r < `low`, and kept in between. All other steps are those of ISGD, at no extra cost.

Values of f_v are inexact, too: both are solved to the accuracy `value_tol`·ε_k from the same warm starts. A first step
whose predicted decrease is smaller than the error of such values is lengthened tenfold without a measurement; one that
predicts more than a quarter of the loss is shortened to that. Then it is doubled or halved as often as necessary: a
first step that is wrong by orders of magnitude costs a few solves, not a run.

Is it unbiased? Steps between measurements are: their α comes from earlier batches, so that E[α_k z_v] = α_k E[z_v]. A
measured step is not: α and z come from the same batch, and batches of low curvature get longer steps, so that the mean
step need not vanish at a minimiser. In denoising with `foe`, batches of 8 and a learned θ, the mean measured step
differed from mean α times mean z by 19 %, where 8 % would be chance and a single z differs from its mean by 177 %; and
about one step in ten is measured. Measuring on another batch would remove this bias, but a step could then increase the
loss of its own batch unnoticed, which is what the measurement is there to prevent; it is not offered.

When to choose it: mini-batches with an unknown step length. A tuned `isgd` is as good, but not better.

References: Vaswani et al., *Painless stochastic gradient: interpolation, line-search, and convergence rates*, NeurIPS
2019; Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning with inexact stochastic gradients*, 2024, which
leaves an adaptive step as an open question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from blt_builtins.upper_optimizers.lengths import first_step
from blt_builtins.upper_optimizers.measured_step import measured_step
from blt_builtins.upper_optimizers.schedule import Auto, Fraction, descend, sampled_gradient, step_metrics
from bltoolbox.plugin import HypergradientResult, Oracle, Step, Theta, UpperOptimizer, theta_norm

#: Number of steps measured at the beginning.
_FIRST = 3
#: A step is also measured if it is longer than this times the last one measured.
_FAR = 1.5


class ISGDLineSearch(UpperOptimizer):
    """Inexact stochastic gradient descent with a measured step.

    Args:
        step: α_0, the first step length tried; a poor choice costs a few trials.
        every: steps between two measurements of the step length.
        low: the fraction of the predicted decrease below which a step is halved.
        high: the fraction of the predicted decrease above which a step is doubled.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser; `auto` is 2 % of the
            distance that the lower level moves at θ_0.
        tol_decay: exponent b of the accuracies.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as `tol`,
            or 2 % of the right-hand side at θ_0 if `tol` is `auto`.
        value_tol: accuracy of the values with which steps are measured, as a fraction of ε_k.
    """

    def __init__(
        self,
        step: Annotated[float, Gt(0)] | Auto = "auto",
        every: Annotated[int, Gt(0)] = 10,
        low: Annotated[float, Ge(0), Lt(1)] = 0.3,
        high: Fraction = 0.7,
        tol: Annotated[float, Gt(0)] | Auto = 0.1,
        tol_decay: Annotated[float, Ge(0)] = 0.0,
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
        value_tol: Annotated[float, Gt(0), Le(1)] = 0.2,
    ) -> None:
        if low >= high:
            raise ValueError(f"low {low} is not below high {high}; 0.3 and 0.7 are usual")
        self.step_size = step
        self.every = every
        self.low = low
        self.high = high
        self.tol = tol
        self.tol_decay = tol_decay
        self.adjoint_tol = adjoint_tol
        self.value_tol = value_tol

    def init(self, theta: Theta) -> dict[str, Any]:
        return {"k": 0}

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        return dict(state) | ({"step": state["step"] * factor} if "step" in state else {})

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        sampled = sampled_gradient(oracle, theta, state, self.tol, self.adjoint_tol, self.tol_decay)
        z, value, after, k = sampled.result.gradient, sampled.result.value, sampled.state, state["k"]
        length, trials = theta_norm(z.values()), 0
        if length == 0:  # an empty draw gives no information about the step
            metrics = step_metrics(0.0, sampled.tol, sampled.adjoint_tol, z) | {"trials": trials}
            return Step(dict(theta), after | {"k": k + 1}, value.value, metrics, penalty=value.penalty)
        first = "reach" not in after
        alpha = self._first(theta, sampled.result) if first else after["step"]
        if first or k < _FIRST or k % self.every == 0 or alpha * length > _FAR * after["reach"]:
            tol, limits = self.value_tol * sampled.tol, (self.low, self.high)
            alpha, trials = measured_step(theta, oracle, z, alpha, tol, limits, search=first)
            after["reach"] = alpha * length
        moved = descend(oracle, theta, z, alpha)
        metrics = step_metrics(alpha, sampled.tol, sampled.adjoint_tol, z) | {"trials": trials}
        after |= {"k": k + 1, "step": alpha}
        return Step(moved, after, value.value, metrics, penalty=value.penalty)

    def _first(self, theta: Theta, result: HypergradientResult) -> float:
        """α_0, limited to the step that `auto` would try: at a distant θ, one value may cost more than a run."""
        safe = first_step("auto", theta, result)
        return safe if self.step_size == "auto" else min(self.step_size, safe)
