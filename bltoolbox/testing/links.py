"""The links of a hypergradient, each tested separately, in the order in which an error propagates.

The energy is trusted: derivatives that a component implements itself are compared with those of its energy, so that a
wrong gradient is not also blamed on the Hessian and on the mixed derivative, which may be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.penalty import penalty_at, penalty_gradient
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Accuracy, Ask, Estimate, Solution, Theta
from bltoolbox.bilevel.roles import Problem
from bltoolbox.bilevel.tensors import dot, expand, norm
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing.checks.base import normal
from bltoolbox.testing.checks.numerics import best_difference, shifted
from bltoolbox.testing.reference import energy_gradient, true_residual

LOWER, LINEAR, MIXED, LOSS, PENALTY = "lower level", "linear system", "mixed derivative", "loss", "penalty"
#: Accepted relative errors of derivatives.
GRADIENT, HESSIAN, THETA = 1e-5, 1e-3, 1e-3
#: Errors of a derivative that rounding explains, relative to the size of the function.
ROUNDING = 1e-9
#: Factor by which residuals may exceed their tolerance, since the recipe's own limits are tight for it.
SLACK = 10.0


@dataclass(frozen=True)
class Link:
    """One quantity that was tested: its error, the largest error allowed, and the message if it is larger."""

    place: str
    what: str
    error: float
    allowed: float
    sentence: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


def solvable(lower: Lower, reference: Tensor, allowed: float) -> Link:
    """Whether the reference solver converged."""
    residual = float(true_residual(lower, reference).max())
    sentence = (
        f"the reference solver cannot minimise the energy either: the gradient norm remains at {residual:.2g}; set"
        " strong_convexity in the recipe if the minimiser is not unique, and make sure that gradients are finite"
    )
    return Link(LOWER, "residual of the reference solution", residual, allowed, sentence)


def hypergradient_links(
    oracle: BilevelOracle, lower: Lower, upper: Upper, reference: Tensor, weights: Tensor, tol: float
) -> tuple[tuple[Link, ...], dict[str, Tensor], Ask]:
    """All links, z as the recipe's components compute it at tight tolerances, and the request for it."""
    solver, estimator = oracle.solver, oracle.hypergradient
    limit, with_state = max(oracle.iteration_limit, 5_000), oracle.needs_inverse
    solution = solve(solver, lower, lower.start(), tol, limit=limit, with_state=with_state)
    inverse = partial(solver.inverse, solution.state) if with_state else None
    ask = Ask(
        lower,
        upper,
        solution.x,
        lower.start(),
        weights,
        Accuracy(tol),
        minimise=oracle.minimise,
        inverse=inverse,
    )
    try:
        estimate = estimator.estimate(ask)
        refusal = ""
    except NumericalError as error:
        nothing = {name: torch.full_like(value, float("nan")) for name, value in lower.theta.items()}
        infinite = torch.full_like(lower.mu, float("inf"))
        estimate = Estimate(nothing, infinite, torch.zeros_like(infinite, dtype=torch.long))
        refusal = str(error)
    q = _adjoint(lower, upper, solution.x, estimate)
    prior = (
        type(oracle.problem.regularizer).__name__
        if isinstance(oracle.problem, Variational)
        else "the problem"
    )
    method = type(solver).__name__
    links = (
        _gradient(lower, reference, prior),
        _residual(lower, solution, tol, method),
        _distance(lower, solution, reference, tol, method),
        _hessian(lower, reference, q, prior),
        _adjoint_residual(lower, upper, solution.x, estimate, tol, refusal or type(estimator).__name__),
        _mixed(lower, reference, q, prior),
    )
    return links, estimate.gradient, ask


def loss_link(bind: Callable[[Theta], Upper], theta: Theta, x: Tensor, weights: Tensor) -> Link | None:
    """∂_θg at fixed x, ``bind`` giving the loss at another θ; None where the loss does not depend on θ."""
    claimed = bind(theta).theta_gradient(x, weights)
    mine, quotient, error = _in_theta(lambda moved: weights @ bind(moved).value(x), theta, claimed)
    if mine == quotient == 0:
        return None
    sentence = (
        f"the derivative of the loss in θ at fixed x is {mine:.6g} along a random direction, and {quotient:.6g} by"
        " differences; look at theta_gradient() of the loss"
    )
    return Link(LOSS, "∂_θg against differences in θ", error, THETA, sentence)


def penalty_link(problem: Problem, theta: Theta) -> Link | None:
    """∇P; None where there is no penalty."""
    value, claimed = penalty_gradient(problem, theta)
    if value is None:
        return None

    def penalty(moved: Theta) -> Tensor:
        return torch.tensor(penalty_at(problem, moved), dtype=torch.float64)

    mine, quotient, error = _in_theta(penalty, theta, claimed)
    sentence = (
        f"the derivative of the penalty is {mine:.6g} along a random direction, and {quotient:.6g} by differences;"
        " compute penalty() from θ with torch operations, without detach or .item()"
    )
    return Link(PENALTY, "∇P against differences of P", error, THETA, sentence)


def _in_theta(
    function: Callable[[Theta], Tensor], theta: Theta, claimed: Theta
) -> tuple[float, float, float]:
    """The derivative along a random direction as claimed and by differences, and their relative distance."""
    d = {
        name: normal(*value.shape, seed=70 + k) / max(value.numel(), 1) ** 0.5
        for k, (name, value) in enumerate(theta.items())
    }
    mine = torch.tensor(inner(claimed, d), dtype=torch.float64)
    quotient, error = best_difference(lambda t: function(shifted(theta, d, t)), mine)
    if abs(float(quotient - mine)) <= ROUNDING * abs(float(function(theta))):
        error = 0.0
    return float(mine), float(quotient), error


def inner(a: Theta, b: Theta) -> float:
    return float(sum((a[name].double() * b[name].double()).sum() for name in a))


def theta_size(theta: Theta) -> float:
    return inner(theta, theta) ** 0.5


def _gradient(lower: Lower, x: Tensor, who: str) -> Link:
    """∇h along a random direction, away from the minimiser, where it is not zero."""
    x = x + 0.05 * normal(*x.shape, seed=3)
    v = normal(*x.shape, seed=4)
    claimed = dot(lower.gradient(x), v)
    quotient, error = best_difference(lambda t: lower.energy(x + t * v), claimed)
    sentence = (
        f"the gradient of h does not match differences of its energy ({float(claimed[0]):.6g} instead of"
        f" {float(quotient[0]):.6g} along a random direction); check gradient() of {who} and the operator's adjoint"
    )
    return Link(LOWER, "∇h against differences of h", error, GRADIENT, sentence)


def _residual(lower: Lower, solution: Solution, tol: float, who: str) -> Link:
    residual = float(lower.residual(solution.x).max())
    sentence = (
        f"{who} ends at a residual of {residual:.2g}, although {tol:g} was requested"
        f" ({solution.status[int(solution.residual.argmax())].value})"
    )
    return Link(LOWER, "residual ‖∇h(x̃)‖", residual, SLACK * tol, sentence)


def _distance(lower: Lower, solution: Solution, reference: Tensor, tol: float, who: str) -> Link:
    """‖x̃ − x̂‖ ≤ tol/μ; where no μ > 0 is known, only a gross error is detected."""
    mu = torch.where(lower.mu > 0, lower.mu, 1e-4)
    distance = norm(solution.x - reference) * mu
    error = float(distance.max())
    apart = float(norm(solution.x - reference).max())
    sentence = (
        f"{who} ends at a distance of {apart:.2g} from the minimiser found by the reference solver, more than its"
        " residual allows"
    )
    return Link(LOWER, "μ‖x̃ − x̂‖ against the reference", error, SLACK * tol, sentence)


def _hessian(lower: Lower, x: Tensor, q: Tensor, who: str) -> Link:
    """∇²h along the adjoint, the relevant direction, on the free pixels of x."""
    v = q / expand(norm(q).clamp_min(1e-300), q)
    linearization = lower.linearize(x)
    free = torch.ones_like(x) if linearization.free is None else linearization.free.to(x)
    v = v * free
    claimed = linearization.hvp(v)
    quotient, error = best_difference(lambda t: energy_gradient(lower, x + t * v) * free, claimed)
    along = float(dot(v, claimed)[0]), float(dot(v, quotient)[0])
    sentence = (
        f"Hessian products do not match differences of the gradient (⟨v, ∇²h v⟩ = {along[0]:.6g} instead of"
        f" {along[1]:.6g}); check linearize() of {who}"
    )
    return Link(LINEAR, "∇²h v against differences of ∇h", error, HESSIAN, sentence)


def _adjoint_residual(
    lower: Lower, upper: Upper, x: Tensor, estimate: Estimate, tol: float, who: str
) -> Link:
    if estimate.adjoint is None:
        residual = float(estimate.residual.max())
    else:
        right = upper.gradient(x)
        residual = float(norm(right - lower.linearize(x).hvp(estimate.adjoint)).max())
    sentence = (
        f"{who} leaves a residual ‖∇g − ∇²h q‖ of {residual:.2g}, although {tol:g} was requested; raise its iteration"
        " limit, or choose another hypergradient"
        if residual < float("inf")
        else who
    )
    return Link(LINEAR, "residual ‖∇g − ∇²h q‖", residual, SLACK * tol, sentence)


def _mixed(lower: Lower, x: Tensor, q: Tensor, who: str) -> Link:
    """∂_θ⟨∇h, q⟩ of the worst block, at the reference point, with the gradient of the energy."""
    free = lower.linearize(x).free
    q = q if free is None else q * free
    claimed = lower.mixed(x, q, torch.ones_like(lower.mu))
    size = theta_size(claimed)
    worst = Link(MIXED, "∂_θ⟨∇h, q⟩ against differences in θ", 0.0, THETA)
    for k, (name, value) in enumerate(lower.theta.items()):
        d = normal(*value.shape, seed=60 + k) / max(value.numel(), 1) ** 0.5
        mine = (claimed[name] * d).sum()

        def along(t: float, name: str = name, d: Tensor = d) -> Tensor:
            moved = lower.at_theta({**lower.theta, name: lower.theta[name] + t * d})
            return dot(energy_gradient(moved, x), q).sum()

        quotient, _ = best_difference(along, mine)
        scale = max(abs(float(quotient)), abs(float(mine)), 1e-4 * size, 1e-300)
        error = abs(float(quotient - mine)) / scale
        if not error <= worst.error:
            sentence = (
                f"the derivative of ⟨∇h, q⟩ in {name} is {float(mine):.6g}, but {float(quotient):.6g} by"
                f" differences; check pairing() of {who if name.startswith('regularizer') else 'the operator'}"
            )
            worst = Link(MIXED, worst.what, error, THETA, sentence)
    return worst


def _adjoint(lower: Lower, upper: Upper, x: Tensor, estimate: Estimate) -> Tensor:
    """The estimator's own q, or one by conjugate gradients if it has none."""
    if estimate.adjoint is not None and bool(torch.isfinite(estimate.adjoint).all()):
        return estimate.adjoint
    right, tol = upper.gradient(x), torch.full_like(lower.mu, 1e-6)
    try:
        with torch.no_grad():
            method = ConjugateGradients("the check")
            return solve_linear(method, lower.linearize(x), right, torch.zeros_like(right), tol, 500)[0]
    except NumericalError:
        return right
