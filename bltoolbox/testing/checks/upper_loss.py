"""Properties of upper losses, tested on a few images with noisy measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Bound, Theta
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
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import (
    batches,
    best_difference,
    derivative_fails,
    describe_batch,
    noisy_images,
    require_theta_derivative,
)
from bltoolbox.testing.problems import smooth_images

KIND = "upper_loss"
COUNT = 3
SHAPE = (3, 24, 26)
LEVEL = 0.1


@dataclass(frozen=True)
class Averaging:
    """A linear operator that is not the same for all samples, with measurements in the shape of images."""

    gain: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return expand(self.gain, x).to(x) * (0.5 * x + 0.25 * (x.roll(1, -1) + x.roll(-1, -1)))

    def adjoint(self, t: Tensor) -> Tensor:
        return self(t)

    @property
    def squared_norm(self) -> Tensor:
        return self.gain.square()

    def take(self, index: Tensor) -> Averaging:
        return Averaging(self.gain[index])


forward = Averaging(torch.linspace(0.8, 1.2, COUNT, dtype=torch.float64))


@dataclass(frozen=True)
class Trial:
    """A loss bound to samples, and reconstructions to evaluate."""

    loss: UpperLoss
    sample: Sample
    upper: Upper
    x: Tensor


def sample_of(loss: UpperLoss, dtype: torch.dtype, seed: int = 0) -> Sample:
    """Measurements, split by the loss if it holds some back, as in training."""
    truth = smooth_images(COUNT, SHAPE, seed).double()
    rows, targets = [], []
    for i, y in enumerate(forward(truth) + LEVEL * normal(*truth.shape, seed=1)):
        kept, target = loss.split(y, LEVEL, keyed_generator("split", i, *([seed] if seed else [])))
        rows.append(kept)
        targets.append(target)
    held_back = [target for target in targets if target is not None]
    require(len(held_back) in (0, COUNT), "split must hold back part of every sample, or of none")
    target = torch.stack(held_back).to(dtype) if held_back else None
    true = truth.to(dtype) if loss.needs_truth else None
    return Sample(range(COUNT), torch.stack(rows).to(dtype), true, target)


def trial(subject: Subject, dtype: torch.dtype = torch.float64) -> Trial:
    loss = subject()
    sample = sample_of(loss, dtype)
    upper = loss.bind(sample, forward)
    require(isinstance(upper, Upper), f"bind must return an Upper, not a {type(upper).__name__}")
    return Trial(loss, sample, upper, noisy_images(COUNT, SHAPE, seed=5).to(dtype))


def places(case: Trial) -> dict[str, Tensor]:
    """Reconstructions to evaluate: iterates of a solver may be anywhere."""
    return {
        "noisy images": case.x,
        "the true images": smooth_images(COUNT, SHAPE).to(case.x),
        "zero images": torch.zeros_like(case.x),
        "images far out of range": 100 * normal(*case.x.shape, seed=6),
    }


@holds(KIND, "value is one float64 number per sample")
def value_shape(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        case = trial(subject, dtype)
        for where, x in places(case).items():
            value = case.upper.value(x)
            what = f"value of {COUNT} {str(dtype)[6:]} images"
            require_like(value, x.double(), what + ", summed in float64", (COUNT,))
            require(bool(torch.isfinite(value).all()), f"{what} is not finite for {where}: {value.tolist()}")


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    first, second = trial(subject), trial(subject)
    cause = "split differed for equal generators; draw only from the given generator"
    require(same([first.sample.y, first.sample.target], [second.sample.y, second.sample.target]), cause)
    message = " of the same x differed between two losses with the same options; use no unseeded randomness"
    require(same(first.upper.value(first.x), second.upper.value(second.x)), "value" + message)
    require(same(first.upper.gradient(first.x), second.upper.gradient(second.x)), "gradient" + message)


@stateless(KIND)
def use(subject: Subject, loss: UpperLoss, problem: int) -> Iterator[tuple[str, Any]]:
    sample = sample_of(loss, torch.float64, seed=problem)
    yield "split", [sample.y, sample.target]
    upper, x = loss.bind(sample, forward), noisy_images(COUNT, SHAPE, seed=5 + problem)
    for _ in range(2):
        yield "value", upper.value(x)
        yield "gradient", upper.gradient(x)


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    case = trial(subject)
    value, gradient = case.upper.value(case.x), case.upper.gradient(case.x)
    for index in batches(COUNT):
        taken, x = case.upper.take(index), case.x[index]
        rebound = case.loss.bind(_rows(case.sample, index), forward.take(index))
        for name, upper in (("take", taken), ("bind", rebound)):
            what = f"of {describe_batch(index)} by {name} differs from the result in a batch of {COUNT}"
            cause = "sums and means must not run over the first dimension, and take must select every per-sample field"
            require_close(upper.value(x), value[index], 1e-10, f"value {what}", cause)
            require_close(upper.gradient(x), gradient[index], 1e-10, f"gradient {what}", cause)


@holds(KIND, "gradients have the dtype of the images")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        case = trial(subject, dtype)
        require_like(case.upper.gradient(case.x), case.x, f"gradient of {str(dtype)[6:]} images")


@holds(KIND, "noise_gain is what split does to the noise")
def noise_gain(subject: Subject) -> None:
    loss = subject()
    y = normal(200, 200, seed=2)
    kept, _ = loss.split(LEVEL * y, LEVEL, keyed_generator("split", 0))
    gain, error = float(kept.std()) / LEVEL, loss.noise_gain / math.sqrt(2 * y.numel())
    require(
        abs(gain - loss.noise_gain) <= 6 * error,
        f"noise_gain is {loss.noise_gain:.6g}, but split makes noise of level 1 one of level {gain:.4g}",
    )


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    case = trial(subject)
    loss, y = case.loss, case.sample.y[0].clone()
    calls: dict[str, Callable[[], object]] = {
        "bind": lambda: loss.bind(case.sample, forward),
        "value": lambda: case.upper.value(case.x),
        "gradient": lambda: case.upper.gradient(case.x),
        "take": lambda: case.upper.take(torch.tensor([1])).value(case.x[1:2]),
        "split": lambda: loss.split(y, LEVEL, keyed_generator("split", 0)),
    }
    for name, call in calls.items():
        sample = case.sample
        guard = Untouched(x=case.x, truth=sample.truth, target=sample.target, measurements=sample.y, y=y)
        call()
        guard.verify(name)


@holds(KIND, "gradient matches finite differences of the value")
def gradient(subject: Subject) -> None:
    case = trial(subject)
    for seed, (where, x) in enumerate(places(case).items()):
        v = normal(*x.shape, seed=20 + seed)
        claimed = dot(case.upper.gradient(x), v)

        def along(t: float, x: Tensor = x, v: Tensor = v) -> Tensor:
            return case.upper.value(x + t * v)

        quotient, error = best_difference(along, claimed)
        if not (error <= 1e-5 or float((quotient - claimed).abs().max()) <= 1e-8):
            what = f"⟨gradient, v⟩ at {where}, v random,"
            derivative_fails(what, "differences of the value along v", claimed, quotient)


@holds(KIND, "lipschitz is a valid bound")
def lipschitz(subject: Subject) -> None:
    case = trial(subject)
    bound = case.upper.lipschitz
    if bound is None:
        raise NotApplicable("no Lipschitz constant is known")
    limit = _column(bound, case.x)
    for where, x in places(case).items():
        v = normal(*x.shape, seed=30)
        for length in (1e-3, 1e-3, 1e-3, 1e-1, 1.0, 30.0):
            step = length * math.sqrt(x[0].numel()) * v / expand(norm(v).clamp_min(1e-300), v)
            change = case.upper.gradient(x + step) - case.upper.gradient(x)
            quotient = norm(change) / norm(step)
            worst = int((quotient - limit).argmax())
            require(
                bool((quotient <= limit * (1 + 1e-6) + 1e-12).all()),
                f"lipschitz is {float(limit[worst]):.6g}, but near {where} the gradient changes by"
                f" {float(quotient[worst]):.6g} per unit of x: it must bound ‖∇²g‖ for every image; return None if no"
                " bound is known",
            )
            # The change is the Hessian times the step, so the steps turn towards the direction of largest curvature.
            v = change if float(change.abs().max()) > 0 else v


@holds(KIND, "convex as declared")
def convex(subject: Subject) -> None:
    case = trial(subject)
    if not case.upper.convex:
        raise NotApplicable("it declares convex = False")
    rounding = 1e-12 * float(case.upper.value(case.x).abs().max())
    for where, a in places(case).items():
        for other, b in places(case).items():
            for t in (0.1, 0.5, 0.9):
                inner = case.upper.value((1 - t) * a + t * b)
                chord = (1 - t) * case.upper.value(a) + t * case.upper.value(b)
                above = float((inner - chord).max())
                require(
                    above <= 1e-11 * float(chord.abs().max() + inner.abs().max()) + rounding,
                    f"g is not convex in x: between {where} and {other} it lies {above:.3g} above the chord; declare"
                    " convex = False",
                )


@holds(KIND, "no value is below the infimum")
def infimum(subject: Subject) -> None:
    case = trial(subject)
    bound = case.upper.infimum
    if bound == -math.inf:
        raise NotApplicable("no infimum is known")
    for where, x in {**places(case), "the end of a descent": _descended(case)}.items():
        smallest = float(case.upper.value(x).min())
        require(
            smallest >= bound - 1e-12 * (1 + abs(bound)),
            f"infimum is {bound:.6g}, but the value at {where} is {smallest:.6g}; bounds on f would be wrongly called"
            " certified; use −∞ if it is unknown",
        )


@holds(KIND, "the mean of the blocks is g")
def blocks(subject: Subject) -> None:
    case = trial(subject)
    count = case.upper.blocks
    if count == 1:
        raise NotApplicable("it is not a finite sum")
    parts = [case.upper.block(torch.full((COUNT,), j)) for j in range(count)]
    for name in ("value", "gradient"):
        mean = torch.stack([getattr(block, name)(case.x) for block in parts]).mean(0)
        cause = "the mean over all blocks must be g, so a block is its share of g times the number of blocks"
        require_close(
            mean, getattr(case.upper, name)(case.x), 1e-9, f"the mean {name} of {count} blocks", cause
        )


@holds(KIND, "theta_gradient is the derivative in θ")
def theta_gradient(subject: Subject) -> None:
    case = trial(subject)
    if not case.upper.depends_on_theta:
        raise NotApplicable("it does not depend on θ")
    weights = torch.linspace(0.5, 1.5, COUNT, dtype=case.x.dtype)
    whole = case.upper.theta_gradient(case.x, weights)
    alone = [
        case.upper.take(index).theta_gradient(case.x[index], weights[index])
        for index in batches(COUNT)[:COUNT]
    ]
    for name, value in whole.items():
        total = torch.stack([gradient[name] for gradient in alone]).sum(0)
        cause = "it must be Σ_i weights_i ∂_θ g_i"
        require_close(value, total, 1e-9, f"theta_gradient[{name!r}] against the sum over samples", cause)
    if "theta" not in getattr(type(case.upper), "__dataclass_fields__", {}):
        raise NotApplicable("it has no field theta, so no differences can be computed")
    _theta_differences(case, whole, weights)


def _theta_differences(case: Trial, whole: dict[str, Tensor], weights: Tensor) -> None:
    upper: Any = case.upper

    def at_theta(theta: Theta) -> Tensor:
        moved: Any = replace(upper, theta=theta)
        return weights @ moved.value(case.x)

    for name, value in whole.items():
        direction = {n: normal(*v.shape, seed=40) * (n == name) for n, v in upper.theta.items()}
        claimed = (value * direction[name]).sum()
        cause = "it is Σ_i weights_i ∂_θ g_i at fixed x"
        require_theta_derivative(
            at_theta, upper.theta, direction, claimed, f"theta_gradient[{name!r}]", cause
        )


@holds(KIND, "declares what it needs")
def needs(subject: Subject) -> None:
    loss = subject()
    if not loss.needs_truth:
        trial(subject)  # must work without true images
        return
    y = forward(smooth_images(COUNT, SHAPE).double())
    try:
        loss.bind(Sample(range(COUNT), y, None), forward)
    except ValueError as error:
        require(
            bool(str(error).strip()),
            "bind refuses samples without true images, but its ValueError has no message",
        )
    else:
        require(False, "bind accepts samples without true images; declare needs_truth = False")


def _rows(sample: Sample, index: Tensor) -> Sample:
    """Some rows of a sample."""

    def rows(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[index]

    y = sample.y[index]
    return Sample([sample.ids[i] for i in index.tolist()], y, rows(sample.truth), rows(sample.target))


def _column(bound: Bound, x: Tensor) -> Tensor:
    return torch.as_tensor(bound, dtype=x.dtype).expand(len(x))


def _descended(case: Trial) -> Tensor:
    """A few descent steps, each as long as possible."""
    x = case.x
    for _ in range(30):
        slope = case.upper.gradient(x)
        for step in (1e3, 10.0, 1.0, 0.1, 1e-2, 1e-4):
            new = x - step * slope
            if bool((case.upper.value(new) < case.upper.value(x)).all()):
                x = new
                break
    return x
