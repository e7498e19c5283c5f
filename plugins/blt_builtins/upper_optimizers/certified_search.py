"""The line search of MAID: steps of several lengths and accuracies, until the decrease of one of them is beyond doubt.

    accept θ⁺ = Π(θ − αz)  if  F⁺ − F⁻ ≤ −η² ‖θ⁺ − θ‖²/α

with F⁺ above f(θ⁺) and F⁻ below f(θ). The adaptive search tells a step that is too long from values that are too
inaccurate; the published one shortens the step in either case. A trial starts from the solutions of a rejected one if
θ⁺ is the same, and on the way to them if the step is shorter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from blt_builtins.upper_optimizers.schedule import descend
from blt_builtins.upper_optimizers.trial import Trial
from bltoolbox.plugin import Accuracy, HypergradientResult, Oracle, Theta, theta_norm


@dataclass(frozen=True)
class CertifiedSearch:
    """A line search along z from θ."""

    #: A step must gain η² of the decrease that z predicts.
    eta: float
    #: Factors by which a step is shortened and an accuracy tightened.
    shrink: float
    tighten: float
    #: Whether a decrease of the plain values suffices.
    plain: bool
    #: Whether the accuracy is tightened at once if only the error bounds reject a step.
    adaptive: bool

    def run(
        self, theta: Theta, oracle: Oracle, result: HypergradientResult, alpha: float, trials: int, tol: float
    ) -> Trial:
        """The first trial that is accepted, or the last one."""
        before, rejected, restart, tightenings, number = result.value, None, alpha, 0, 0
        while True:
            number += 1
            moved = descend(oracle, theta, result.gradient, alpha)
            distance = theta_norm(moved[name] - value for name, value in theta.items())
            # x̂ is nearly linear in α, so at ρα it lies near the point at ρ of the way to that at α.
            after = oracle.value(moved, Accuracy(tol), bound=True, towards=rejected, fraction=self.shrink)
            predicted = distance**2 / alpha
            promise = self.eta**2 * predicted
            trial = Trial(moved, alpha, tol, before, after, predicted, promise, restart, tightenings, number)
            if self.adaptive:
                trial = self._sharpen(theta, oracle, trial)
                before, rejected, tol, tightenings = trial.before, trial.after, trial.tol, trial.tightenings
            alpha *= self.shrink
            if self.adaptive and trial.too_long:
                restart = alpha
            if number == trials or self.accepts(trial):
                return replace(trial, restart=restart)

    def accepts(self, trial: Trial) -> bool:
        return trial.certified or (self.plain and trial.plain)

    def _sharpen(self, theta: Theta, oracle: Oracle, trial: Trial) -> Trial:
        """The same step at ever tighter ε, as long as nothing but its error bounds rejects it."""
        while self._needs_accuracy(trial):
            effort = Accuracy(self.tighten * trial.tol)
            before = oracle.value(theta, effort, bound=True)
            if not math.isfinite(before.value):
                break
            oracle.accept(before)
            after = oracle.value(trial.theta, effort, bound=True, towards=trial.after)
            trial = replace(
                trial, tol=effort.tol, before=before, after=after, tightenings=trial.tightenings + 1
            )
        return trial

    def _needs_accuracy(self, trial: Trial) -> bool:
        """Whether nothing but its error bounds rejects a trial, and they can be made smaller."""
        # An infinite bound says that h is not convex at θ⁺, for which accuracy is no remedy.
        tightenable = math.isfinite(trial.after.upper) and not trial.at_floor
        return trial.plain and tightenable and not trial.barely and not self.accepts(trial)
