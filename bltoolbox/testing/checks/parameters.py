"""Properties of everything that may have parameters: regularizers, operators and data terms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import Parametric
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.testing.checks.base import (
    Check,
    NotApplicable,
    Subject,
    Untouched,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
)
from bltoolbox.testing.checks.numerics import best_difference, cast, fitting_shape, parameters, shifted

KINDS = ("regularizer", "operator", "data_term")


def holds_for_all(name: str) -> Callable[[Check], Check]:
    """Declare a property of every kind that may have parameters."""

    def declare(check: Check) -> Check:
        for kind in KINDS:
            holds(kind, name)(check)
        return check

    return declare


def _initial(subject: Subject) -> tuple[Parametric, dict[str, Tensor]]:
    component: Parametric = subject()
    theta = component.init_params(fitting_shape(component), keyed_generator("θ", 0))
    if not theta:
        raise NotApplicable("it has no parameters")
    return component, theta


@holds_for_all("project and project_gradient are projections")
def projections(subject: Subject) -> None:
    component, start = _initial(subject)
    _same_theta(
        component.project(start), start, "project(init_params(…))", "the initial θ must be admissible"
    )
    a, b = _like(start, 32), _like(start, 33)
    guard = Untouched(theta=start, gradient=a)
    component.project(start)
    component.project_gradient(a)
    guard.verify("project or project_gradient")
    once = component.project(_like(start, 31))
    cause = "projecting a second time must change nothing"
    _same_theta(component.project(once), once, "project(project(θ))", cause)
    of_a, of_b = component.project_gradient(a), component.project_gradient(b)
    _same_theta(component.project_gradient(of_a), of_a, "project_gradient(project_gradient(z))", cause)
    combined = component.project_gradient({name: 2 * a[name] - 3 * b[name] for name in a})
    parts = {name: 2 * of_a[name] - 3 * of_b[name] for name in a}
    _same_theta(
        combined, parts, "project_gradient(2a − 3b)", "it must be linear; other constraints belong in project"
    )
    left, right = _inner(of_a, b), _inner(a, of_b)
    require(
        abs(left - right) <= 1e-9 * (_inner(a, a) * _inner(b, b)) ** 0.5,
        f"project_gradient is not symmetric: ⟨Pa, b⟩ = {left:.6g}, ⟨a, Pb⟩ = {right:.6g};"
        " an orthogonal projection must be",
    )


@holds_for_all("standard_params is an admissible θ, the same each time")
def standard(subject: Subject) -> None:
    component, start = _initial(subject)
    if not component.offers("standard_params"):
        raise NotApplicable("its standard parameters are the initial ones")
    shape = fitting_shape(component)
    try:
        params = component.standard_params(shape, keyed_generator("θ", 0))
    except ValueError as error:
        raise NotApplicable(f"it has none: {error}") from error
    names = list(params)
    require(set(names) == set(start), f"standard_params(…) has {names} instead of {list(start)}")
    for name, value in params.items():
        require_like(value, start[name], f"standard_params(…)[{name!r}]")
    _same_theta(component.project(params), params, "project(standard_params(…))", "it must be admissible")
    again = component.standard_params(shape, keyed_generator("θ", 0))
    _same_theta(again, params, "a second standard_params(…)", "whatever is random comes from the generator")


@holds_for_all("penalty is a finite scalar with the right derivative")
def penalty(subject: Subject) -> None:
    component, start = _initial(subject)
    if component.penalty(start) is None:
        raise NotApplicable("it has no penalty")
    theta = parameters(component, fitting_shape(component))
    for dtype in (torch.float32, torch.float64):
        given = cast(theta, dtype)
        guard = Untouched(theta=given)
        amount = component.penalty(given)
        guard.verify("penalty")
        require_like(amount, next(iter(given.values())), f"penalty of {str(dtype)[6:]} θ", ())
        assert amount is not None
        require(
            bool(torch.isfinite(amount)), f"penalty near the initial θ is {float(amount)}; it must be finite"
        )
    gradient = _penalty_gradient(component, theta)
    for k, (name, value) in enumerate(theta.items()):
        direction = {other: torch.zeros_like(entry) for other, entry in theta.items()}
        direction[name] = normal(*value.shape, seed=90 + k) / max(value.numel(), 1) ** 0.5
        _derivative(component, theta, name, direction, gradient[name])


def _penalty_gradient(component: Parametric, theta: Theta) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
        total = component.penalty(leaves)
    if total is None or not total.requires_grad:
        fail(
            "penalty is not differentiable in θ; compute it with torch operations, without detach or .item()"
        )
    parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), parts, strict=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in pairs
    }


def _derivative(component: Parametric, theta: Theta, name: str, direction: Theta, gradient: Tensor) -> None:
    def along(t: float) -> Tensor:
        value = component.penalty(shifted(theta, direction, t))
        assert value is not None
        return value

    claimed = (gradient * direction[name]).sum()
    quotient, error = best_difference(along, claimed)
    require(
        error <= 1e-5 or abs(float(quotient - claimed)) <= 1e-9 * (1 + abs(float(along(0.0)))),
        f"the derivative of penalty in θ[{name!r}]: expected {float(quotient):.6g} from finite differences, got"
        f" {float(claimed):.6g} from autograd; a part of it may not depend on θ for autograd",
    )


@holds_for_all("pictures can be drawn")
def pictures(subject: Subject) -> None:
    component, raw = _initial(subject)
    theta = component.prepare(raw)
    guard = Untouched(theta=dict(theta))
    images = component.pictures(theta)
    guard.verify("pictures")
    if images is None:
        raise NotApplicable("it has no pictures")
    fine = images.ndim == 4 and images.numel() > 0 and bool(torch.isfinite(images).all())
    require(fine, f"pictures must be finite, of shape (N, C, H, W), got {tuple(images.shape)}")


@holds_for_all("upgrade leaves a current θ unchanged")
def upgrade_keeps(subject: Subject) -> None:
    component, start = _initial(subject)
    _same_theta(
        component.upgrade(start), start, "upgrade(θ)", "it must change only the θ of earlier versions"
    )


def _like(theta: Theta, seed: int) -> dict[str, Tensor]:
    return {name: normal(*value.shape, seed=seed + 7 * k) for k, (name, value) in enumerate(theta.items())}


def _same_theta(theta: Theta, expected: Theta, what: str, cause: str) -> None:
    names = list(theta)
    require(set(names) == set(expected), f"{what} has the parameters {names} instead of {list(expected)}")
    for name in names:
        if expected[name].numel():
            require_close(theta[name], expected[name], 1e-9, f"{what}[{name!r}]", cause)


def _inner(a: Theta, b: Theta) -> float:
    return float(sum((a[name] * b[name]).sum() for name in a))
