"""Properties of operators, without parameters and, if they have any, near the initial θ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.restoration.roles import Operator
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    Untouched,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.numerics import (
    batches,
    best_difference,
    cast,
    describe_batch,
    extreme_eigenvalues,
    fitting_shape,
    noisy_images,
    parameters,
    require_check_refuses,
    shifted,
)

KIND = "operator"
COUNT = 3


def thetas(operator: Operator, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Theta]:
    """The empty θ, with which measurements are made, and one near the initial θ if there are parameters; prepared."""
    learned = cast(parameters(operator, shape), dtype)
    return [operator.prepare(theta) for theta in ([{}, learned] if learned else [{}])]


def images(operator: Operator, dtype: torch.dtype = torch.float64) -> Tensor:
    return noisy_images(COUNT, fitting_shape(operator)).to(dtype)


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    first, second = subject(), subject()
    x = images(first)
    require(
        same(_measure(first, x), _measure(second, x)) and same(_measure(first, x), _measure(first, x)),
        "apply(x) differed between two calls with the same x; draw masks and kernels once, from a seed",
    )
    init = [component.init_params(x.shape[1:], keyed_generator("θ", 0)) for component in (first, second)]
    require(same(*init), "init_params differed for equal generators; draw only from the given generator")


@holds(KIND, "linear in x")
def linear(subject: Subject) -> None:
    operator = subject()
    x, other = images(operator), normal(*images(operator).shape, seed=3)
    for theta in thetas(operator, x.shape[1:]):
        expected = 2 * operator.apply(x, theta, {}) - 3 * operator.apply(other, theta, {})
        cause = "A must be linear; offsets, clipping and noise do not belong in apply"
        require_close(operator.apply(2 * x - 3 * other, theta, {}), expected, 1e-10, "apply(2x − 3x')", cause)


@holds(KIND, "adjoint is exact")
def adjoint(subject: Subject) -> None:
    operator = subject()
    x = images(operator)
    for theta in thetas(operator, x.shape[1:]):
        image = operator.apply(x, theta, {})
        y = normal(*image.shape, seed=4)
        back = operator.adjoint(y, theta, {})
        require_like(back, x, "adjoint(y)")
        left, right = dot(image, y), dot(x, back)
        worst = int((left - right).abs().argmax())
        scale = float(image.norm() * y.norm())
        require(
            float((left - right).abs().max()) <= 1e-11 * scale,
            f"adjoint is not the adjoint of apply: for random x and y, ⟨Ax, y⟩ = {float(left[worst]):.8g}, but"
            f" ⟨x, Aᵀy⟩ = {float(right[worst]):.8g}; check the boundary rule, the orientation of kernels"
            " and constant factors",
        )


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    operator = subject()
    x = images(operator)
    theta, y = operator.prepare({}), _measure(operator, x)
    for name, given in (("apply", x), ("adjoint", y), ("start", y)):
        method = getattr(operator, name)
        together = method(given, theta, {})
        for index in batches(COUNT):
            what = f"{name} of {describe_batch(index)} differs from the result in a batch of {COUNT}"
            cause = "the first dimension is the sample, and samples must not be mixed"
            require_close(method(given[index], theta, {}), together[index], 1e-10, what, cause)


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    operator = subject()
    for dtype in (torch.float32, torch.float64):
        x = images(operator, dtype)
        for theta in thetas(operator, x.shape[1:], dtype):
            y = operator.apply(x, theta, {})
            require_like(y, x, f"apply of {str(dtype)[6:]} images", tuple(y.shape))
            require_like(operator.adjoint(y, theta, {}), x, f"adjoint of {str(dtype)[6:]} measurements")
            require_like(operator.start(y, theta, {}), x, f"start of {str(dtype)[6:]} measurements")


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    operator = subject()
    x = images(operator)
    for theta in thetas(operator, x.shape[1:]):
        y = operator.apply(x, theta, {}).clone()
        for name, given in (("apply", x), ("adjoint", y), ("start", y)):
            guard = Untouched(**{"x" if name == "apply" else "y": given, "theta": theta})
            getattr(operator, name)(given, theta, {})
            guard.verify(name)


@holds(KIND, "spectrum gives valid bounds")
def spectrum(subject: Subject) -> None:
    operator = subject()
    x = images(operator)[:1]
    shape = tuple(x.shape[1:])
    for theta in thetas(operator, shape):
        least, most = operator.spectrum(theta, shape, {})
        smallest, largest = extreme_eigenvalues(_normal_map(operator, theta), x)
        if least is not None:
            require(
                float(least) >= 0,
                f"spectrum claims {float(least):.6g} ≤ AᵀA, although 0 is always a valid bound",
            )
            require(
                smallest >= float(least) * (1 - 1e-9) - 1e-9 * largest,
                f"spectrum claims {float(least):.6g} ≤ AᵀA, but its smallest eigenvalue is {smallest:.6g}; accuracies"
                " would be wrongly called certified",
            )
        if most is not None:
            require(
                largest <= float(most) * (1 + 1e-9) + 1e-12,
                f"spectrum claims AᵀA ≤ {float(most):.6g}, but ‖A‖² is {largest:.6g}; a solver that trusts it will"
                " diverge",
            )


@holds(KIND, "start is an image")
def start(subject: Subject) -> None:
    operator = subject()
    x = images(operator)
    for theta in thetas(operator, x.shape[1:]):
        result = operator.start(operator.apply(x, theta, {}), theta, {})
        require_like(result, x, "start(y)")
        require(bool(torch.isfinite(result).all()), "start(y) is not finite")


@holds(KIND, "measured is a mask")
def measured(subject: Subject) -> None:
    operator = subject()
    y = _measure(operator, images(operator))
    mask = operator.measured(y, {})
    if mask is None:
        raise NotApplicable("all of y is measured")
    require(
        bool(((mask == 0) | (mask == 1)).all()),
        "measured must be 1 where y contains measurements and 0 elsewhere, so that the noise level is right",
    )
    outside = float((y * (1 - mask.to(y))).abs().max())
    require(outside == 0, f"A x must be zero where nothing is measured, but reaches {outside:.3g} there")


@holds(KIND, "apply is differentiable in θ")
def differentiable(subject: Subject) -> None:
    operator = subject()
    x = images(operator)
    theta = parameters(operator, x.shape[1:])
    if not theta:
        raise NotApplicable("it has no parameters")
    u = normal(*_measure(operator, x, theta).shape, seed=9)
    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    total = dot(_measure(operator, x, leaves), u).sum()
    require(total.requires_grad, "apply must be differentiable in θ; avoid detach, .item() and no_grad")
    result = torch.autograd.grad(total, list(leaves.values()))
    direction = {name: normal(*value.shape, seed=10) for name, value in theta.items()}
    claimed = torch.stack([(g * d).sum() for g, d in zip(result, direction.values(), strict=True)]).sum()

    def along(t: float) -> Tensor:
        return dot(_measure(operator, x, shifted(theta, direction, t)), u).sum()

    quotient, error = best_difference(along, claimed)
    require(
        error <= 1e-5,
        f"the derivative of ⟨A_θ x, u⟩ in θ: expected {float(quotient):.6g} from finite differences, got"
        f" {float(claimed):.6g} from autograd; part of apply may be hidden from autograd",
    )


@holds(KIND, "check refuses images that cannot be measured")
def check_respected(subject: Subject) -> None:
    operator = subject()

    def measured(shape: Sequence[int]) -> Tensor:
        x = noisy_images(2, shape)
        back = operator.start(_measure(operator, x), operator.prepare({}), {})
        require_like(back, x, f"start(apply(x)) of images of {'×'.join(map(str, shape))}")
        return back

    require_check_refuses(operator, measured, "measuring them")


def _measure(operator: Operator, x: Tensor, theta: Theta | None = None) -> Tensor:
    """A_θ x for a θ that is not prepared yet; the empty θ by default, as when measurements are made."""
    return operator.apply(x, operator.prepare(theta or {}), {})


def _normal_map(operator: Operator, theta: Theta) -> Callable[[Tensor], Tensor]:
    """v ↦ AᵀA v with the adjoint by autograd, since another property tests ``adjoint``."""

    def product(v: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.zeros_like(v).requires_grad_()
            image = operator.apply(leaf, theta, {})
        if not image.requires_grad:
            fail("apply is not differentiable in x; avoid detach, .item() and no_grad")
        return torch.autograd.grad(image, leaf, operator.apply(v, theta, {}))[0]

    return product
