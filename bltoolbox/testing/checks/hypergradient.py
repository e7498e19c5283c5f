"""Properties of hypergradients, against a closed form and against finite differences of f."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Bound, Estimate, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.bilevel.tensors import norm
from bltoolbox.restoration.theta import split
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    Untouched,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.numerics import batches, describe_batch, difference, shifted
from bltoolbox.testing.checks.partners import quadratic, smooth
from bltoolbox.testing.checks.questions import TIGHT, closed_form, flat, questions, some_weights
from bltoolbox.testing.limits import SMALL, ask_at, repeated
from bltoolbox.testing.problems import SquaredDistance
from bltoolbox.testing.reference import reference_solve

KIND = "hypergradient"


def _ask(
    estimator: HypergradientEstimator,
    lower: Lower,
    x_true: Tensor,
    x: Tensor,
    weights: Tensor,
    tol: float = TIGHT,
    warm: Tensor | None = None,
) -> Estimate:
    upper = SquaredDistance(x_true.to(x))
    memory = {}
    if warm is not None:
        kept = estimator.keeps(lower, upper)
        memory = {name: row.new_zeros(len(x), *row.shape[1:]) for name, row in kept.items()}
        memory |= {"adjoint": warm} if "adjoint" in kept else {}
    return estimator.estimate(ask_at(lower, upper, x, weights, tol, memory))


@holds(KIND, "returns z for each parameter and a residual for each sample")
def shapes(subject: Subject) -> None:
    bench = quadratic(subject)
    for dtype in (torch.float32, torch.float64):
        lower = bench.lower(dtype)
        x, _ = closed_form(bench)
        estimate = _ask(subject(), lower, bench.x_true, x.to(dtype), some_weights(3, dtype), 1e-3)
        require(
            isinstance(estimate, Estimate),
            f"estimate must return an Estimate, not a {type(estimate).__name__}",
        )
        names = list(lower.theta)
        require(
            set(estimate.gradient) == set(names),
            f"gradient must have the names {names}, not {list(estimate.gradient)}",
        )
        for name, value in lower.theta.items():
            require_like(estimate.gradient[name], value, f"gradient[{name!r}] in {str(dtype)[6:]}")
        require_like(estimate.residual, lower.mu, f"residual in {str(dtype)[6:]} (one per sample)", (3,))
        whole = estimate.iterations.shape == (3,) and not estimate.iterations.is_floating_point()
        require(whole, "iterations must be integers, one per sample")
        if subject.cls.gives_adjoint:
            require(estimate.adjoint is not None, "it returns no adjoint; set gives_adjoint = False")
            require_like(estimate.adjoint, x.to(dtype), f"adjoint in {str(dtype)[6:]}")


@holds(KIND, "points downhill")
def downhill(subject: Subject) -> None:
    bench = quadratic(subject)
    x, expected = closed_form(bench)
    limit = subject.cls.limit
    ask = ask_at(bench.lower(), SquaredDistance(bench.x_true), x, some_weights(3), TIGHT)
    # A method that iterates from call to call begins with an adjoint of zero.
    calls = limit.calls_at(len(limit) - 1) if limit is not None else 1
    z, truth = flat(repeated(subject(), ask, calls).gradient), flat(expected)
    cosine = float(z @ truth / (z.norm() * truth.norm()).clamp_min(1e-300))
    require(
        cosine > 0.1,
        f"−z does not point downhill on a quadratic problem: the cosine of z and ∇f is {cosine:.3g}, but should be"
        " near 1; check the sign of the mixed derivative (z = −∂_θ⟨∇h, q⟩)",
    )


@holds(KIND, "equals the closed form")
def equals_closed_form(subject: Subject) -> None:
    _exact(subject)
    cause = "z = −Σ v_i ∂_θ⟨∇h_i, q_i⟩ with ∇²h q = ∇g; weights scale z, not the system"
    for question in questions(subject):
        z = repeated(subject(), question.ask()).gradient
        what = f"z of {question.what} at tolerance {TIGHT:g}, with weights from 0.5 to 1.5"
        require_close(flat(z), question.expected, 1e-6, what, cause)


@holds(KIND, "matches finite differences of f")
def finite_differences(subject: Subject) -> None:
    _exact(subject)
    bench = smooth(subject, count=2)
    start = bench.lower().start()
    x = reference_solve(bench.lower(), start, 1e-12)
    weights = some_weights(2)
    z = _ask(subject(), bench.lower(), bench.x_true, x, weights).gradient
    z = bench.problem.project_gradient(z)
    raw = {name: normal(*value.shape, seed=k) for k, (name, value) in enumerate(bench.theta.items())}
    direction = bench.problem.project_gradient(raw)

    def along(t: float) -> Tensor:
        moved = bench.lower(theta=shifted(bench.theta, direction, t))
        return weights @ SquaredDistance(bench.x_true).value(reference_solve(moved, x, 1e-12))

    claimed, quotient = float(flat(z) @ flat(direction)), float(difference(along, 1e-3))
    require(
        abs(claimed - quotient) <= 1e-4 * max(abs(quotient), 1e-3 * float(flat(z).norm())),
        f"⟨z, d⟩ for a random direction d at tolerance {TIGHT:g}: expected {quotient:.8g} from central"
        f" differences of f, got {claimed:.8g}; declare exact = False if the estimate is biased by design",
    )


@holds(KIND, "∂_θ g is part of z")
def theta_gradient(subject: Subject) -> None:
    bench = quadratic(subject)
    x, _ = closed_form(bench)
    lower, weights = bench.lower(), some_weights(3)
    plain = SquaredDistance(bench.x_true.to(x))
    learned = _Priced(plain, lower.theta)
    expected = flat(learned.theta_gradient(x, weights))

    def added(options: Mapping[str, Any], calls: int) -> Tensor:
        asks = [ask_at(lower, upper, x, weights, TIGHT) for upper in (plain, learned)]
        without, total = (flat(repeated(subject.having(options)(), ask, calls).gradient) for ask in asks)
        return total - without

    change, tol, declared = added({}, 1), 1e-5, subject.cls.limit
    if not subject.cls.exact and declared is not None and not torch.allclose(change, expected, rtol=tol):
        # A biased method may form ∂_θ g at another x, or with another weight; in its limit it must not.
        last = len(declared) - 1
        change, tol = added(declared.options_at(last), declared.calls_at(last)), SMALL
    cause = "add upper.theta_gradient(x, weights) to z, once and with these weights"
    require_close(change, expected, tol, "what ∂_θ g adds to z", cause)


@dataclass(frozen=True)
class _Priced(Upper):
    """∂_θ g_i = ‖x_i‖²/100 in every parameter, besides a g that does not depend on θ."""

    plain: Upper
    theta: Theta

    @property
    def lipschitz(self) -> Bound:  # type: ignore[override]
        return self.plain.lipschitz

    def value(self, x: Tensor) -> Tensor:
        return self.plain.value(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.plain.gradient(x)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        price = 0.01 * (weights * norm(x).square()).sum()
        return {name: torch.full_like(value, float(price)) for name, value in self.theta.items()}

    def take(self, index: Tensor) -> _Priced:
        return _Priced(self.plain.take(index), self.theta)


@holds(KIND, "the error shrinks with the tolerance")
def converges(subject: Subject) -> None:
    _exact(subject)
    bench = quadratic(subject)
    lower = bench.lower()
    x, expected = closed_form(bench)
    slope = norm(bench.problem.regularizer.gradient(split(bench.theta, "regularizer"), x))
    for tol in (1e-1, 1e-3, 1e-6, 1e-9):
        estimate = _ask(subject(), lower, bench.x_true, x, some_weights(3), tol)
        if estimate.adjoint is not None:
            true = norm(SquaredDistance(bench.x_true).gradient(x) - lower.linearize(x).hvp(estimate.adjoint))
            gap = float((estimate.residual - true).abs().max())
            require(
                gap <= 1e-3 * float(true.max()) + 1e-13,
                f"at tolerance {tol:g} it reports the residuals {estimate.residual.tolist()}, but recomputed from its"
                f" q they are {true.tolist()}; recompute ‖∇g − ∇²h q‖ from the q returned",
            )
        worst = float(estimate.residual.max())
        require(
            worst <= 1.01 * tol,
            f"asked for a residual of {tol:g}, it stops at {worst:.3g}; raise its iteration limit",
        )
        error = float((flat(estimate.gradient) - flat(expected)).norm())
        # ‖Bᵀ(q − q*)‖ ≤ ‖B‖ tol/μ, and ‖B‖ ≤ ‖∇R‖ for an R that is linear in e^θ.
        allowed = float((some_weights(3) * slope / lower.mu).sum()) * tol + 1e-9 * float(
            flat(expected).norm()
        )
        require(
            error <= allowed,
            f"at tolerance {tol:g} the error of z is {error:.3g} on a quadratic problem, more than such a residual"
            f" allows ({allowed:.3g}); declare exact = False if no tolerance makes it exact",
        )


@holds(KIND, "z is the weighted sum over samples, whatever the batch")
def batch_independent(subject: Subject) -> None:
    bench = smooth(subject)
    lower = bench.lower()
    x = reference_solve(lower, lower.start(), 1e-8)
    weights = some_weights(3)
    estimator = subject()
    together = _ask(estimator, lower, bench.x_true, x, weights)
    total = torch.zeros_like(flat(together.gradient))
    for index in batches(3):
        alone = _ask(estimator, lower.take(index), bench.x_true[index], x[index], weights[index])
        gap = int((alone.iterations - together.iterations[index]).abs().max())
        cause = "scalars and stopping criteria must be per sample"
        counts = (alone.iterations.tolist(), together.iterations[index].tolist())
        require(
            gap <= 2,
            f"{describe_batch(index)} took {counts[0]} iterations, but {counts[1]} in a batch; {cause}",
        )
        if len(index) == 1:
            total = total + flat(alone.gradient)
        else:
            what = "z of the samples in reverse order"
            require_close(flat(alone.gradient), flat(together.gradient), 1e-6, what, cause)
    what, cause = (
        "z of a batch of 3 against the sum over its samples",
        "z = Σ weights_i z_i, not their mean",
    )
    require_close(flat(together.gradient), total, 1e-6, what, cause)


@holds(KIND, "a warm start changes the cost, not the result")
def warm_start(subject: Subject) -> None:
    bench = quadratic(subject)
    x, _ = closed_form(bench)
    cold = _ask(subject(), bench.lower(), bench.x_true, x, some_weights(3))
    if cold.adjoint is None:
        raise NotApplicable("it has no adjoint to start from")
    warm = _ask(subject(), bench.lower(), bench.x_true, x, some_weights(3), warm=cold.adjoint)
    what = "z started from the adjoint of the previous call"
    require_close(
        flat(warm.gradient), flat(cold.gradient), 1e-6, what, "a warm start must only change the cost"
    )
    require(
        int(warm.iterations.sum()) <= int(cold.iterations.sum()),
        f"started at the solution, it takes {warm.iterations.tolist()} iterations;"
        f" started at zero, {cold.iterations.tolist()}",
    )


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    bench = quadratic(subject)
    x, _ = closed_form(bench)
    first, second = (
        _ask(subject(), bench.lower(), bench.x_true, x, some_weights(3)).gradient for _ in range(2)
    )
    require(same(first, second), "two estimators with the same options returned different z for the same x")


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    bench = quadratic(subject)
    x, _ = closed_form(bench)
    lower, weights, warm = bench.lower(), some_weights(3), 0.1 * normal(*x.shape)
    guard = Untouched(x=x, y=bench.y, theta=lower.theta, weights=weights, warm=warm, x_true=bench.x_true)
    _ask(subject(), lower, bench.x_true, x, weights, 1e-3, warm)
    guard.verify("estimate")


def _exact(subject: Subject) -> None:
    if not subject.cls.exact:
        raise NotApplicable("it declares exact = False")
