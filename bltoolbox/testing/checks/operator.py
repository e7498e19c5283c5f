"""Properties of operators, without parameters and, if they have any, near the initial θ, in each example context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.restoration.roles import Operator
from bltoolbox.testing.checks.base import (
    NotApplicable,
    NotVerified,
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
from bltoolbox.testing.checks.hidden_state import stateless
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
    require_initial_parameters,
    shifted,
    two_shapes,
)

KIND = "operator"
COUNT = 3


@dataclass(frozen=True)
class Case:
    """An operator with images, θ (prepared, as a solve would have it) and what is known about each image."""

    operator: Operator
    x: Tensor
    theta: Theta
    context: Rows

    def __str__(self) -> str:
        learned = " at the initial θ, slightly changed" if self.theta else ""
        context = f" with {' and '.join(self.context)} in the context" if self.context else ""
        return learned + context

    def apply(self, x: Tensor) -> Tensor:
        return self.operator.apply(x, self.theta, self.context)

    def adjoint(self, y: Tensor) -> Tensor:
        return self.operator.adjoint(y, self.theta, self.context)

    def start(self, y: Tensor) -> Tensor:
        return self.operator.start(y, self.theta, self.context)

    def take(self, index: Tensor) -> Case:
        context = Known({name: rows[index] for name, rows in self.context.items()})
        return replace(self, x=self.x[index], context=context)


class _Missing(NotVerified, KeyError):
    """Something that the operator reads is not in its example contexts."""

    def __str__(self) -> str:
        name = self.args[0]
        return (
            f"it reads {name!r} from the context, which its example contexts do not have; implement"
            f" example_contexts(shape, count) and return a list such as [{{{name!r}: …}}] with one row per image"
        )


class Known(dict[str, Tensor]):
    """An example context, which says what it lacks."""

    def __missing__(self, name: str) -> Tensor:
        raise _Missing(name)


def cases(
    operator: Operator,
    dtype: torch.dtype = torch.float64,
    shape: Sequence[int] | None = None,
    count: int = COUNT,
    seed: int = 0,
) -> Iterator[Case]:
    """No θ, with which measurements are made, and one near the initial θ if there are parameters; every context."""
    shape = fitting_shape(operator) if shape is None else shape
    x = noisy_images(count, shape, seed).to(dtype)
    learned = cast(parameters(operator, shape, seed), dtype)
    for context in _contexts(operator, shape, count):
        for theta in [{}, learned] if learned else [{}]:
            yield Case(
                operator,
                x,
                operator.prepare(theta),
                Known({name: _converted(rows, dtype) for name, rows in context.items()}),
            )


def _contexts(operator: Operator, shape: Sequence[int], count: int) -> list[Rows]:
    """As example_contexts gives them."""
    examples = operator.example_contexts(shape, count)
    rows = [value for context in examples for value in context.values()] if isinstance(examples, list) else []
    good = (
        isinstance(examples, list)
        and examples
        and all(isinstance(row, Tensor) and len(row) == count for row in rows)
    )
    require(
        bool(good),
        "example_contexts must return a list of mappings, at least one, each of tensors whose first dimension is the"
        f" image ({count} were asked for)",
    )
    return [Known(context) for context in examples]


def _converted(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """As the samples of a run do: real and complex numbers to its precision, whole numbers and masks as they are."""
    if rows.is_complex():
        return rows.to(dtype.to_complex())
    return rows.to(dtype) if rows.is_floating_point() else rows


@holds(KIND, "its example contexts have what it reads")
def context(subject: Subject) -> None:
    try:
        for case in cases(subject()):
            case.adjoint(case.apply(case.x))
    except _Missing as missing:
        fail(str(missing))


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    first, second = subject(), subject()
    for case, other in zip(cases(first), cases(second), strict=True):
        require(
            same(case.apply(case.x), other.apply(case.x)) and same(case.apply(case.x), case.apply(case.x)),
            f"apply(x) differed between two calls with the same x{case}; draw masks and kernels once, from a seed",
        )
    require_initial_parameters(first, second)


@stateless(KIND)
def use(subject: Subject, operator: Operator, problem: int) -> Iterator[tuple[str, Any]]:
    shape = two_shapes(operator)[problem]
    yield "the initial θ", operator.init_params(shape, keyed_generator("θ", problem))
    for case in cases(operator, shape=shape, seed=problem):
        y = case.apply(case.x)
        yield f"apply(x){case}", y
        yield f"adjoint(y){case}", case.adjoint(y)
        yield f"start(y){case}", case.start(y)
        yield f"spectrum{case}", operator.spectrum(case.theta, shape, case.context)
        yield f"measured(y){case}", operator.measured(y, case.context)
        yield f"symbol{case}", operator.symbol(case.theta, shape)


@holds(KIND, "linear in x")
def linear(subject: Subject) -> None:
    for case in cases(subject()):
        x, other = case.x, normal(*case.x.shape, seed=3)
        expected = 2 * case.apply(x) - 3 * case.apply(other)
        cause = "A must be linear; offsets, clipping and noise do not belong in apply"
        require_close(case.apply(2 * x - 3 * other), expected, 1e-10, f"apply(2x − 3x'){case}", cause)


@holds(KIND, "adjoint is exact")
def adjoint(subject: Subject) -> None:
    for case in cases(subject()):
        image = case.apply(case.x)
        y = normal(*image.shape, seed=4)
        back = case.adjoint(y)
        require_like(back, case.x, f"adjoint(y){case}")
        left, right = dot(image, y), dot(case.x, back)
        worst = int((left - right).abs().argmax())
        scale = float(image.norm() * y.norm())
        require(
            float((left - right).abs().max()) <= 1e-11 * scale,
            f"adjoint is not the adjoint of apply{case}: for random x and y, ⟨Ax, y⟩ = {float(left[worst]):.8g}, but"
            f" ⟨x, Aᵀy⟩ = {float(right[worst]):.8g}; check the boundary rule, the orientation of kernels"
            " and constant factors",
        )


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    for case in cases(subject()):
        y = normal(*case.apply(case.x).shape, seed=4)  # not zero where nothing is measured
        for name, given in (("apply", case.x), ("adjoint", y), ("start", y)):
            together = getattr(case, name)(given)
            for index in batches(COUNT):
                what = (
                    f"{name} of {describe_batch(index)}{case} differs from the result in a batch of {COUNT}"
                )
                cause = "the first dimension is the sample; samples and their context must not be mixed"
                alone = getattr(case.take(index), name)(given[index])
                require_close(alone, together[index], 1e-10, what, cause)


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        for case in cases(subject(), dtype):
            y, of = case.apply(case.x), f"of {str(dtype)[6:]}"
            require_like(y, case.x, f"apply {of} images{case}", tuple(y.shape))
            require_like(case.adjoint(y), case.x, f"adjoint {of} measurements{case}")
            require_like(case.start(y), case.x, f"start {of} measurements{case}")


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    for case in cases(subject()):
        y = case.apply(case.x).clone()
        for name, given in (("apply", case.x), ("adjoint", y), ("start", y)):
            inputs = {"x" if name == "apply" else "y": given, "theta": case.theta, "context": case.context}
            guard = Untouched(**inputs)
            getattr(case, name)(given)
            guard.verify(name)


@holds(KIND, "spectrum gives valid bounds")
def spectrum(subject: Subject) -> None:
    for case in cases(subject()):
        shape = tuple(case.x.shape[1:])
        bounds = case.operator.spectrum(case.theta, shape, case.context)
        for bound in bounds:
            good = bound is None or torch.as_tensor(bound).numel() in (1, COUNT)
            require(good, f"spectrum{case} must give a number, one per sample, or None")
        for i in range(COUNT if case.context else 1):
            least, most = (_entry(bound, i) for bound in bounds)
            smallest, largest = extreme_eigenvalues(_normal_map(case, i), case.x[:1])
            if least is not None:
                require(least >= 0, f"spectrum claims {least:.6g} ≤ AᵀA, although 0 is always a valid bound")
                require(
                    smallest >= least * (1 - 1e-9) - 1e-9 * largest,
                    f"spectrum{case} claims {least:.6g} ≤ AᵀA, but its smallest eigenvalue is {smallest:.6g};"
                    " accuracies would be wrongly called certified",
                )
            if most is not None:
                require(
                    largest <= most * (1 + 1e-9) + 1e-12,
                    f"spectrum{case} claims AᵀA ≤ {most:.6g}, but ‖A‖² is {largest:.6g}; a solver that trusts it will"
                    " diverge",
                )


def _entry(bound: Tensor | float | None, i: int) -> float | None:
    """The bound of sample ``i``."""
    if bound is None:
        return None
    values = torch.as_tensor(bound, dtype=torch.float64).flatten()
    return float(values[i if len(values) > 1 else 0])


@holds(KIND, "start is an image")
def start(subject: Subject) -> None:
    for case in cases(subject()):
        start = case.start(case.apply(case.x))
        require_like(start, case.x, f"start(y){case}")
        require(bool(torch.isfinite(start).all()), f"start(y){case} is not finite")


@holds(KIND, "measured is a mask")
def measured(subject: Subject) -> None:
    masks = []
    for case in cases(subject()):
        y = case.apply(case.x)
        mask = case.operator.measured(y, case.context)
        masks.append(mask)
        if mask is None:
            continue
        require(
            bool(((mask == 0) | (mask == 1)).all()),
            "measured must be 1 where y contains measurements and 0 elsewhere, so that the noise level is right",
        )
        outside = float((y * (1 - mask.to(y))).abs().max())
        require(
            outside == 0, f"A x must be zero where nothing is measured, but reaches {outside:.3g} there{case}"
        )
    if all(mask is None for mask in masks):
        raise NotApplicable("all of y is measured")


@holds(KIND, "apply is differentiable in θ")
def differentiable(subject: Subject) -> None:
    operator = subject()
    shape = fitting_shape(operator)
    theta = parameters(operator, shape)
    if not theta:
        raise NotApplicable("it has no parameters")
    x = noisy_images(COUNT, shape)
    for context in _contexts(operator, shape, COUNT):
        u = normal(*operator.apply(x, operator.prepare(theta), context).shape, seed=9)

        def total(theta: Theta, context: Rows = context, u: Tensor = u) -> Tensor:
            return dot(operator.apply(x, operator.prepare(theta), context), u).sum()

        for name in theta:
            _require_derivative(name, theta, total)


def _require_derivative(name: str, theta: dict[str, Tensor], total: Callable[[Theta], Tensor]) -> None:
    """The derivative of ``total`` in one of the parameters, against finite differences."""
    leaf = theta[name].clone().requires_grad_()
    value = total(theta | {name: leaf})
    require(
        value.requires_grad,
        f"apply must be differentiable in θ, and does not depend on {name!r}; avoid detach, .item() and no_grad",
    )
    direction = {name: normal(*leaf.shape, seed=10)}
    claimed = (torch.autograd.grad(value, leaf)[0] * direction[name]).sum()

    def along(t: float) -> Tensor:
        return total(theta | shifted({name: theta[name]}, direction, t))

    quotient, error = best_difference(along, claimed)
    require(
        error <= 1e-5,
        f"the derivative of ⟨A_θ x, u⟩ in {name!r}: expected {float(quotient):.6g} from finite differences, got"
        f" {float(claimed):.6g} from autograd; part of apply may be hidden from autograd",
    )


@holds(KIND, "check refuses images that cannot be measured")
def check_respected(subject: Subject) -> None:
    operator = subject()

    def measured(shape: Sequence[int]) -> Tensor:
        for case in cases(operator, shape=shape, count=2):
            back = case.start(case.apply(case.x))
            size = "×".join(map(str, shape))
            require_like(back, case.x, f"start(apply(x)) of images of {size}{case}")
            if not bool(torch.isfinite(back).all()):
                break
        return back

    require_check_refuses(operator, measured, "measuring them")


def _normal_map(case: Case, i: int) -> Callable[[Tensor], Tensor]:
    """v ↦ AᵀA v for sample ``i``, with the adjoint by autograd, since another property tests ``adjoint``."""

    def product(v: Tensor) -> Tensor:
        every = case.take(torch.full((len(v),), i))
        with torch.enable_grad():
            leaf = torch.zeros_like(v).requires_grad_()
            image = every.apply(leaf)
        if not image.requires_grad:
            fail("apply is not differentiable in x; avoid detach, .item() and no_grad")
        return torch.autograd.grad(image, leaf, every.apply(v))[0]

    return product
