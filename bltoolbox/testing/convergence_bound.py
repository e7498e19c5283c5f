"""The convergence theorem of inexact stochastic gradient descent, as numbers.

    θ_{t+1} = θ_t − α z_t,    z_t = ∇f_v(θ_t) + e_v,    E‖∇f_v‖² ≤ 2A(f − f_inf) + B‖∇f‖² + C

    min_{t<T} E‖∇f(θ_t)‖² ≤ c₂(1 + c₃Lα²)^T δ₀/(αT) + c₄Lα + c₅        for α ≤ 1/(4LB),  δ₀ = f(θ_0) − f_inf
    c₂ = 4,    c₃ = 2A,    c₄ = 4(C + E‖e_v‖²),    c₅ = 2E‖e_v‖²

A, B, C are the constants of expected smoothness, L is the Lipschitz constant of ∇f. Proof: ⟨∇f, E z⟩ ≥ ½‖∇f‖² − ½E‖e‖²
and E‖z‖² ≤ 2E‖∇f_v‖² + 2E‖e‖² in the descent lemma give, with r = E‖∇f‖², δ = E f − f_inf and ρ = 1 + 2ALα²,

    δ_{t+1} ≤ ρδ_t − (α/4)r_t + (α/2)E‖e_t‖² + Lα²(C + E‖e_t‖²)

Multiply by w_t = ρ^{−t−1}, add up, and use W_T = Σ_{t<T} w_t ≥ Tρ^{−T}. Where accuracies change from step to step, the
same sum has the mean of E‖e_t‖² with the weights w_t in place of its maximum: if Σ ε_t² is finite, it vanishes like
1/T.

Batches are uniformly random subsets of S of m tasks, so that with V = 1/m Σ_i ‖∇f_i − ∇f‖² exactly

    E‖∇f_v‖² = ‖∇f‖² + κV,    κ = (m − S)/(S(m − 1)),    hence B = 1,  κV ≤ 2A(f − f_inf) + C

The same constants follow from biased SGD. With ⟨∇f, E z⟩ ≥ b‖∇f‖² − c and E‖z‖² ≤ 2A'(f − f_inf) + B'‖∇f‖² + C', the
descent lemma gives for α ≤ b/(LB')

    min_{t<T} E‖∇f(θ_t)‖² ≤ 2(1 + A'Lα²)^T δ₀/(bαT) + C'Lα/b + 2c/b

and here b = ½, c = ½E‖e‖², A' = 2A, B' = 2B, C' = 2C + 2E‖e‖².

How sharp are they? c₅ cannot be less than E‖e‖², for e = −∇f cancels a gradient of that length. The factors of c₂, c₄
and c₅ are for the longest step: with ½ − LBα in place of the ¼ above, all three are up to twice smaller for short ones.

References: Salehi, Mukherjee, Roberts & Ehrhardt, *Bilevel learning with inexact stochastic gradients*, 2024, has a
bound of this form, from the theory of biased SGD. The constants were derived here, in the two ways above, and not
compared with the paper's. The sum with weights is due to Khaled & Richtárik, *Better theory for SGD in the nonconvex
world*, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: B of batches drawn without replacement.
GROWTH = 1.0
#: Values of A that are tried.
_TRIALS = 200


@dataclass(frozen=True)
class Terms:
    """The right-hand side after some number of steps, term by term."""

    #: c₂(1 + c₃Lα²)^T δ₀/(αT), from the start.
    start: float
    #: 4CLα, from the batches.
    noise: float
    #: 4E‖e‖²Lα + c₅, from inexact solutions.
    error: float

    @property
    def total(self) -> float:
        return self.start + self.noise + self.error


@dataclass(frozen=True)
class ExpectedSmoothness:
    """L, A and C; B is 1."""

    lipschitz: float
    slope: float
    offset: float

    def growth(self, step: float) -> float:
        """ρ = 1 + 2ALα²."""
        return 1 + 2 * self.slope * self.lipschitz * step**2

    def longest_step(self) -> float:
        """1/(4LB), the longest step of the theorem."""
        return 1 / (4 * self.lipschitz * GROWTH)

    def fixed(self, step: float, gap: float, error: float, count: int) -> Terms:
        """The theorem after ``count`` steps, with E‖e‖² ≤ ``error`` at each."""
        return self._terms(step, gap, error, count * self.growth(step) ** -count)

    def scheduled(self, step: float, gap: float, errors: Sequence[float]) -> Terms:
        """The same with the E‖e_t‖² of every step, which may fall."""
        growth = self.growth(step)
        weights = [growth ** -(t + 1) for t in range(len(errors))]
        mean = math.fsum(w * e for w, e in zip(weights, errors, strict=True)) / math.fsum(weights)
        return self._terms(step, gap, mean, math.fsum(weights))

    def _terms(self, step: float, gap: float, error: float, weight: float) -> Terms:
        curvature = 4 * self.lipschitz * step
        return Terms(4 * gap / (step * weight), curvature * self.offset, (curvature + 2) * error)


def sampling_factor(tasks: int, batch: int) -> float:
    """κ, which is 0 for all tasks at once and 1 for one at a time."""
    return 0.0 if batch >= tasks else (tasks - batch) / (batch * (tasks - 1))


def tightest(
    points: Sequence[tuple[float, float]],
    factor: float,
    lipschitz: float,
    step: float,
    gap: float,
    count: int,
) -> ExpectedSmoothness:
    """Of all A and C with κV ≤ 2A(f − f_inf) + C at the ``points`` (f − f_inf, V), those with the smallest bound."""
    steepest = max((v / (2 * delta) for delta, v in points if delta > 0), default=0.0)
    candidates = []
    for trial in range(_TRIALS):
        slope = steepest * (trial / (_TRIALS - 1)) ** 3
        offset = max((v - 2 * slope * delta for delta, v in points), default=0.0)
        constants = ExpectedSmoothness(lipschitz, factor * slope, factor * max(offset, 0.0))
        candidates.append((constants.fixed(step, gap, 0.0, count).total, trial, constants))
    return min(candidates)[2]


def order_of(accuracies: Sequence[float], errors: Sequence[float]) -> float | None:
    """p in error ∝ accuracy^p, by least squares of the logarithms; None for fewer than two accuracies."""
    pairs = [(math.log(a), math.log(e)) for a, e in zip(accuracies, errors, strict=True) if a > 0 and e > 0]
    if len({a for a, _ in pairs}) < 2:
        return None
    centre = math.fsum(a for a, _ in pairs) / len(pairs)
    spread = math.fsum((a - centre) ** 2 for a, _ in pairs)
    return math.fsum((a - centre) * e for a, e in pairs) / spread
