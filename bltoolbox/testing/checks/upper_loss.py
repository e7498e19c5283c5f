"""Properties of upper losses, bound to a few images with noisy measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Bound
from bltoolbox.bilevel.tensors import dot, expand, keyed_generator, norm
from bltoolbox.restoration.roles import Sample, UpperLoss
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
from bltoolbox.testing.checks.numerics import (
    batches,
    best_difference,
    derivative_fails,
    describe_batch,
    noisy_images,
    shifted,
)
from bltoolbox.testing.problems import smooth_images

KIND = "upper_loss"
COUNT = 3
SHAPE = (3, 24, 26)
LEVEL = 0.1


def forward(x: Tensor) -> Tensor:
    """A linear operator that is not the identity, with measurements in the shape of images."""
    return 0.5 * x + 0.25 * (x.roll(1, -1) + x.roll(-1, -1))


@dataclass(frozen=True)
class Trial:
    """A loss bound to samples, and reconstructions to judge."""

    loss: UpperLoss
    sample: Sample
    upper: Upper
    x: Tensor


def sample_of(loss: UpperLoss, dtype: torch.dtype) -> Sample:
    """Measurements, divided by the loss where it holds some back, as in training."""
    truth = smooth_images(COUNT, SHAPE).double()
    rows, targets = [], []
    for i, y in enumerate(forward(truth) + LEVEL * normal(*truth.shape, seed=1)):
        kept, target = loss.split(y, LEVEL, keyed_generator("split", i))
        rows.append(kept)
        targets.append(target)
    held_back = [target for target in targets if target is not None]
    require(len(held_back) in (0, COUNT), "split must hold something back of every sample, or of none")
    target = torch.stack(held_back).to(dtype) if held_back else None
    true = truth.to(dtype) if loss.needs_truth else None
    return Sample(range(COUNT), torch.stack(rows).to(dtype), true, target)


def trial(subject: Subject, dtype: torch.dtype = torch.float64) -> Trial:
    loss = subject()
    sample = sample_of(loss, dtype)
    upper = loss.bind(sample, forward)
    require(isinstance(upper, Upper), f"bind must return an Upper, not a {type(upper).__name__}")
    return Trial(loss, sample, upper, noisy_images(COUNT, SHAPE, seed=5).to(dtype))


def places(one: Trial) -> dict[str, Tensor]:
    """Reconstructions to judge: solvers may come anywhere."""
    return {
        "noisy images": one.x,
        "the true images": smooth_images(COUNT, SHAPE).to(one.x),
        "zero images": torch.zeros_like(one.x),
        "images far out of range": 100 * normal(*one.x.shape, seed=6),
    }


@holds(KIND, "value is one float64 number per sample")
def value_shape(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        one = trial(subject, dtype)
        for where, x in places(one).items():
            found = one.upper.value(x)
            what = f"value of {COUNT} {str(dtype)[6:]} images"
            require_like(found, x.double(), what + ", summed in float64", (COUNT,))
            require(bool(torch.isfinite(found).all()), f"{what} is not finite for {where}: {found.tolist()}")


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    first, second = trial(subject), trial(subject)
    message = " of the same x differed between two losses built alike; is something drawn at random?"
    require(same(first.upper.value(first.x), second.upper.value(second.x)), "value" + message)
    require(same(first.upper.gradient(first.x), second.upper.gradient(second.x)), "gradient" + message)
    cause = "split with equal generators differed; draw only from the generator it is given"
    require(same([first.sample.y, first.sample.target], [second.sample.y, second.sample.target]), cause)


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    one = trial(subject)
    value, gradient = one.upper.value(one.x), one.upper.gradient(one.x)
    for index in batches(COUNT):
        part, x = one.upper.take(index), one.x[index]
        rebound = one.loss.bind(_rows(one.sample, index), forward)
        for name, upper in (("take", part), ("bind", rebound)):
            what = f"of {describe_batch(index)} by {name} differs from the same in a batch of {COUNT}"
            cause = "sums and means must leave out the first dimension, and take must divide all that is per sample"
            require_close(upper.value(x), value[index], 1e-10, f"value {what}", cause)
            require_close(upper.gradient(x), gradient[index], 1e-10, f"gradient {what}", cause)


@holds(KIND, "gradients have the dtype of the images")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        one = trial(subject, dtype)
        require_like(one.upper.gradient(one.x), one.x, f"gradient of {str(dtype)[6:]} images")


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    one = trial(subject)
    loss, y = one.loss, one.sample.y[0].clone()
    calls: dict[str, Callable[[], object]] = {
        "bind": lambda: loss.bind(one.sample, forward),
        "value": lambda: one.upper.value(one.x),
        "gradient": lambda: one.upper.gradient(one.x),
        "take": lambda: one.upper.take(torch.tensor([1])).value(one.x[1:2]),
        "split": lambda: loss.split(y, LEVEL, keyed_generator("split", 0)),
    }
    for name, call in calls.items():
        sample = one.sample
        guard = Untouched(x=one.x, truth=sample.truth, target=sample.target, measurements=sample.y, y=y)
        call()
        guard.verify(name)


@holds(KIND, "gradient matches finite differences of the value")
def gradient(subject: Subject) -> None:
    one = trial(subject)
    for seed, (where, x) in enumerate(places(one).items()):
        v = normal(*x.shape, seed=20 + seed)
        claimed = dot(one.upper.gradient(x), v)

        def along(t: float, x: Tensor = x, v: Tensor = v) -> Tensor:
            return one.upper.value(x + t * v)

        quotient, error = best_difference(along, claimed)
        if not (error <= 1e-5 or float((quotient - claimed).abs().max()) <= 1e-8):
            what = f"⟨gradient, v⟩ at {where}, v random,"
            derivative_fails(what, "differences of the value along v", claimed, quotient)


@holds(KIND, "lipschitz is a true bound")
def lipschitz(subject: Subject) -> None:
    one = trial(subject)
    bound = one.upper.lipschitz
    if bound is None:
        raise NotApplicable("no Lipschitz constant is known")
    limit = _column(bound, one.x)
    for where, x in places(one).items():
        v = normal(*x.shape, seed=30)
        for length in (1e-3, 1e-3, 1e-3, 1e-1, 1.0, 30.0):
            step = length * math.sqrt(x[0].numel()) * v / expand(norm(v).clamp_min(1e-300), v)
            change = one.upper.gradient(x + step) - one.upper.gradient(x)
            quotient = norm(change) / norm(step)
            worst = int((quotient - limit).argmax())
            require(
                bool((quotient <= limit * (1 + 1e-6) + 1e-12).all()),
                f"lipschitz is {float(limit[worst]):.6g}, but near {where} the gradient changes by"
                f" {float(quotient[worst]):.6g} per unit of x: it must bound ‖∇²g‖ for every image; return None where"
                " none is known",
            )
            # The change is the Hessian times the step, so that steps turn towards the steepest direction.
            v = change if float(change.abs().max()) > 0 else v


@holds(KIND, "convex as declared")
def convex(subject: Subject) -> None:
    one = trial(subject)
    if not one.upper.convex:
        raise NotApplicable("it declares convex = False")
    rounding = 1e-12 * float(one.upper.value(one.x).abs().max())
    for where, a in places(one).items():
        for other, b in places(one).items():
            for t in (0.1, 0.5, 0.9):
                inner = one.upper.value((1 - t) * a + t * b)
                chord = (1 - t) * one.upper.value(a) + t * one.upper.value(b)
                above = float((inner - chord).max())
                require(
                    above <= 1e-11 * float(chord.abs().max() + inner.abs().max()) + rounding,
                    f"g is not convex in x: between {where} and {other} it lies {above:.3g} above the chord; declare"
                    " convex = False",
                )


@holds(KIND, "no value is below the infimum")
def infimum(subject: Subject) -> None:
    one = trial(subject)
    bound = one.upper.infimum
    if bound == -math.inf:
        raise NotApplicable("no infimum is known")
    for where, x in {**places(one), "where descent led": _descended(one)}.items():
        smallest = float(one.upper.value(x).min())
        require(
            smallest >= bound - 1e-12 * (1 + abs(bound)),
            f"infimum is {bound:.6g}, but the value at {where} is {smallest:.6g}; bounds of f would be called certified"
            " that are not; −∞ means unknown",
        )


@holds(KIND, "blocks have the mean g")
def blocks(subject: Subject) -> None:
    one = trial(subject)
    count = one.upper.blocks
    if count == 1:
        raise NotApplicable("it is not a finite sum")
    parts = [one.upper.block(torch.full((COUNT,), j)) for j in range(count)]
    for name in ("value", "gradient"):
        mean = torch.stack([getattr(part, name)(one.x) for part in parts]).mean(0)
        cause = "the mean over all blocks is g, so that a block is its share times their number"
        require_close(
            mean, getattr(one.upper, name)(one.x), 1e-9, f"the mean {name} of {count} blocks", cause
        )


@holds(KIND, "theta_gradient is the derivative in θ")
def theta_gradient(subject: Subject) -> None:
    one = trial(subject)
    if not one.upper.depends_on_theta:
        raise NotApplicable("it does not depend on θ")
    weights = torch.linspace(0.5, 1.5, COUNT, dtype=one.x.dtype)
    whole = one.upper.theta_gradient(one.x, weights)
    alone = [
        one.upper.take(index).theta_gradient(one.x[index], weights[index]) for index in batches(COUNT)[:COUNT]
    ]
    for name, value in whole.items():
        total = torch.stack([part[name] for part in alone]).sum(0)
        cause = "it is Σ_i weights_i ∂_θ g_i"
        require_close(value, total, 1e-9, f"theta_gradient[{name!r}] against the sum over samples", cause)
    if "theta" not in getattr(type(one.upper), "__dataclass_fields__", {}):
        raise NotApplicable("it has no field theta to take differences in")
    _theta_differences(one, whole, weights)


def _theta_differences(one: Trial, whole: dict[str, Tensor], weights: Tensor) -> None:
    upper: Any = one.upper
    for name, value in whole.items():
        direction = {n: normal(*v.shape, seed=40) * (n == name) for n, v in upper.theta.items()}

        def along(t: float, direction: dict[str, Tensor] = direction) -> Tensor:
            moved: Any = replace(upper, theta=shifted(upper.theta, direction, t))
            return weights @ moved.value(one.x)

        claimed = (value * direction[name]).sum()
        quotient, error = best_difference(along, claimed)
        require(
            error <= 1e-5 or abs(float(quotient - claimed)) <= 1e-9,
            f"theta_gradient[{name!r}]: expected {float(quotient):.6g} along a random direction from finite differences"
            f" in θ, got {float(claimed):.6g}",
        )


@holds(KIND, "says what it needs")
def needs(subject: Subject) -> None:
    loss = subject()
    if not loss.needs_truth:
        trial(subject)  # bound without true images
        return
    y = forward(smooth_images(COUNT, SHAPE).double())
    try:
        loss.bind(Sample(range(COUNT), y, None), forward)
    except ValueError as error:
        require(bool(str(error).strip()), "bind refuses samples without true images, but without a sentence")
    else:
        require(False, "bind takes samples without true images; declare needs_truth = False")


def _rows(sample: Sample, index: Tensor) -> Sample:
    """Some rows of a sample."""

    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[index]

    y = sample.y[index]
    return Sample([sample.ids[i] for i in index.tolist()], y, rows(sample.truth), rows(sample.target))


def _column(bound: Bound, x: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=x.dtype).expand(len(x))


def _descended(one: Trial) -> Tensor:
    """A few steps downhill, each as long as it may be."""
    x = one.x
    for _ in range(30):
        slope = one.upper.gradient(x)
        for step in (1e3, 10.0, 1.0, 0.1, 1e-2, 1e-4):
            new = x - step * slope
            if bool((one.upper.value(new) < one.upper.value(x)).all()):
                x = new
                break
    return x
