"""MAID, the method of adaptive inexact descent, which chooses the accuracy and length of each step.

    1. compute z with an error bound ω at accuracies (ε, δ); while ω > (1−η)‖z‖ tighten δ by ρ_a, and ε to δ ε_0/δ_0
    2. θ⁺ = Π(θ − αz); accept if  F⁺ − F⁻ ≤ −η² ‖θ⁺ − θ‖²/α;  otherwise
         too inaccurate, if g(x̃⁺) − g(x̃) ≤ −η² ‖θ⁺ − θ‖²/α: tighten ε, solve again at θ and θ⁺, and compare again
         too long, if not (or so barely that a shorter step is easier to certify): shorten α, try again, up to N lengths
    3. if none of them is accepted: tighten (ε, δ), N ← N + 1, go to 1; otherwise: loosen (ε, δ), reset N,
       α ← ⟨s, y⟩/‖y‖² with s = θ⁺ − θ and y = z⁺ − z, at most four times longer or shorter than the last one

F⁺ = g(x̃⁺) + ‖∇g(x̃⁺)‖ε⁺ + (L_g/2)ε⁺² lies above f(θ⁺) and F⁻ = g(x̃) − ‖∇g(x̃)‖ε below f(θ), with the
accuracies ε actually achieved. If the strong convexity μ is known, an accepted step is certain to decrease the true f.
Otherwise, as in deblurring, ε = ‖∇h‖/μ̂ with the Ritz value μ̂ that ω also uses, and the step is logged as `estimated`.

F⁺ − F⁻ exceeds the plain difference by about 2‖∇g‖ε, which shorter steps do not reduce: they promise less, and fail
as well. So the two reasons to reject a step have two remedies. z is sufficiently accurate by 1, so only f is computed
again. The first α of a step is that of Barzilai and Borwein, the inverse of a curvature of f, so that the first trial
is rarely too long. `line_search: paper` is the published method instead: a rejected step is always shortened, and an
accepted one lengthened by a fixed factor.

`acceptance: plain` also accepts a step whose plain values decrease enough, as the scripts of the authors do. It is
cheaper, and certain of nothing: the log has `plain` for a decrease without a certificate.

When to choose it: no step size to tune and a guaranteed decrease, at the cost of using all data at each step (sampler
`full`).

Reference: Salehi, Mukherjee, Roberts & Ehrhardt, *An adaptively inexact first-order method for bilevel optimization
with application to hyperparameter learning*, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Gt

from blt_builtins.upper_optimizers.certified_search import CertifiedSearch
from blt_builtins.upper_optimizers.ends import exhausted
from blt_builtins.upper_optimizers.lengths import first_step, spectral_step
from blt_builtins.upper_optimizers.schedule import Auto, Fraction, accuracies, step_metrics
from blt_builtins.upper_optimizers.trial import Trial
from bltoolbox.plugin import Accuracy, HypergradientResult, Oracle, Step, Theta, UpperOptimizer, theta_norm


class MAID(UpperOptimizer):
    """Adaptive inexact descent with a line search that accounts for errors.

    Args:
        step: α_0, the first step length tried; `auto` predicts a decrease by a quarter of the loss, or moves θ by 5 %.
        tol: ε_0, accuracy of the lower level as a distance to the exact minimiser; `auto` is 2 % of the
            distance that the lower level moves at θ_0.
        adjoint_tol: δ_0, residual norm of the adjoint system, times `loss_scale`; by default the same number as `tol`,
            or 2 % of the right-hand side at θ_0 if `tol` is `auto`.
        eta: η; the relative error of z may be 1 − η, and a step must gain η² of the decrease that z predicts.
        shrink: ρ, the factor by which the line search shortens the step.
        grow: factor by which the step grows after it is accepted, where no positive curvature was measured.
        tighten: factor by which the accuracies are tightened if they do not suffice.
        loosen: factor by which they are loosened after an accepted step.
        trials: N, the number of step lengths tried before the accuracies are tightened.
        acceptance: `certified` accepts a step that decreases f whatever the errors of its values; `plain` also one
            whose values decrease.
        line_search: `adaptive` tightens the accuracy at once if only the error bounds reject a step, and measures the
            curvature of f for the next; `paper` shortens it first, and lengthens the next by `grow`, as published.
    """

    full_batch = True
    needs_bound = True
    handles_floor = True

    def __init__(
        self,
        step: Annotated[float, Gt(0)] | Auto = "auto",
        tol: Annotated[float, Gt(0)] | Auto = "auto",
        adjoint_tol: Annotated[float, Gt(0)] | None = None,
        eta: Fraction = 0.1,
        shrink: Fraction = 0.5,
        grow: Annotated[float, Gt(1)] = 1.5,
        tighten: Fraction = 0.5,
        loosen: Annotated[float, Gt(1)] = 1.25,
        trials: Annotated[int, Gt(0)] = 5,
        acceptance: Literal["certified", "plain"] = "certified",
        line_search: Literal["adaptive", "paper"] = "adaptive",
    ) -> None:
        self.step_size = step
        self.tol = tol
        self.adjoint_tol = adjoint_tol
        self.eta = eta
        self.shrink = shrink
        self.grow = grow
        self.tighten = tighten
        self.loosen = loosen
        self.trials = trials
        self.acceptance = acceptance
        self.line_search = line_search

    def init(self, theta: Theta) -> dict[str, Any]:
        return {}

    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        state, trials, gradients = dict(state), self.trials, 0
        # Earlier versions had one line search and no such entry: their runs, interrupted in a step, continue with it.
        state.setdefault("line_search", "paper" if "alpha" in state else self.line_search)
        previous = {name: state.pop(name) for name in list(state) if name.startswith(("theta/", "z/"))}
        if "tol" not in state:
            state["tol"], state["adjoint_tol"] = accuracies(oracle, theta, self.tol, self.adjoint_tol)
        tol, adjoint_tol = state["tol"], state["adjoint_tol"]
        ratio, adaptive = state.setdefault("ratio", tol / adjoint_tol), state["line_search"] == "adaptive"
        search = CertifiedSearch(self.eta, self.shrink, self.tighten, self.acceptance == "plain", adaptive)
        while True:
            result = oracle.hypergradient(theta, Accuracy(tol), Accuracy(adjoint_tol), bound=True)
            gradients += 1
            if "alpha" not in state:
                state["alpha"] = first_step(self.step_size, theta, result)
            length = theta_norm(result.gradient.values())
            accurate = result.bound is not None and result.bound <= (1 - self.eta) * length
            if accurate:
                if previous:
                    last = state["alpha"] / self.grow
                    state["alpha"] = spectral_step(theta, result.gradient, previous, last) or state["alpha"]
                    previous = {}
                trial = search.run(theta, oracle, result, state["alpha"], trials, tol)
                if search.accepts(trial):
                    oracle.accept(trial.after)
                    return self._accepted(
                        theta, state | {"adjoint_tol": adjoint_tol}, trial, result, gradients
                    )
                state["alpha"], tol = trial.restart, trial.tol
                trials += 1
            if reason := exhausted(theta, result, accurate, state["alpha"] * self.shrink**trials):
                value = result.value
                return Step(dict(theta), state, value.value, finished=reason, penalty=value.penalty)
            adjoint_tol *= self.tighten
            # Values may have needed a tighter ε than z: an inaccurate z is then due to δ.
            spare = not accurate and adaptive
            tol = min(tol, ratio * adjoint_tol) if spare else self.tighten * tol

    def _accepted(
        self, theta: Theta, state: dict[str, Any], trial: Trial, result: HypergradientResult, gradients: int
    ) -> Step:
        adjoint_tol = state["adjoint_tol"]
        metrics = step_metrics(trial.alpha, trial.tol, adjoint_tol, result.gradient) | trial.metrics()
        metrics |= {"bound": result.bound or 0.0, "attempts": gradients}
        metrics |= {"trials": trial.number, "tightenings": trial.tightenings}
        after = state | {"alpha": self.grow * trial.alpha, "tol": self.loosen * trial.tol}
        after["adjoint_tol"] = self.loosen * adjoint_tol
        if state["line_search"] == "adaptive":
            after |= {f"theta/{name}": value for name, value in theta.items()}
            after |= {f"z/{name}": value for name, value in result.gradient.items()}
        return Step(trial.theta, after, trial.after.value, metrics, penalty=trial.after.penalty)
