"""Numerical tools of the checks: finite differences that avoid kinks, spectra, test images and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import Parametric
from bltoolbox.bilevel.tensors import dot, expand, keyed_generator, norm
from bltoolbox.testing.checks.base import (
    ConformanceFailure,
    NotApplicable,
    NotVerified,
    fail,
    normal,
    require,
    require_close,
    same,
)
from bltoolbox.testing.problems import smooth_images

#: Image shapes (C, H, W), of which the first that a component's ``check`` accepts is used. They are not square, to
#: catch components that confuse height and width.
SHAPES = (
    (3, 12, 14),
    (2, 12, 14),
    (3, 12, 12),
    (1, 12, 14),
    (3, 16, 16),
    (2, 16, 16),
    (3, 24, 24),
    (3, 32, 32),
    (1, 28, 28),
    (2, 32, 32),
    (3, 64, 64),
    (1, 96, 96),
)
#: Images of any size that ``check`` accepts must work.
ACCEPTED = ((3, 12, 14), (1, 12, 14), (3, 4, 4), (3, 2, 3), (2, 8, 8), (3, 9, 5), (1, 33, 20))
#: Up to this many pixels, the Hessian is computed as a matrix.
DENSE = 600
#: Lengths of difference steps. The smallest error counts: a wrong derivative is wrong for all lengths, while a kink
#: affects only the long steps and rounding only the short ones.
STEPS = (1e-3, 1e-4, 1e-5, 1e-6)


def fitting_shape(component: Parametric) -> tuple[int, ...]:
    for shape in SHAPES:
        if component.check(shape) is None:
            return shape
    sizes = ", ".join("×".join(map(str, shape)) for shape in SHAPES)
    raise NotApplicable(
        f"check() refuses images of all sizes tried ({sizes}); let example() return options for small images"
    )


def two_shapes(component: Parametric) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first shape that ``check`` accepts, and another one if it accepts several."""
    first = fitting_shape(component)
    others = [shape for shape in (*SHAPES, *ACCEPTED) if shape != first and component.check(shape) is None]
    return first, others[0] if others else first


def noisy_images(count: int, shape: Sequence[int], seed: int = 0, noise: float = 0.1) -> Tensor:
    """Images in float64: smooth with an edge, and noisy, so that no value is exactly at a kink."""
    return smooth_images(count, shape, seed).double() + noise * normal(count, *shape, seed=seed)


def parameters(
    component: Parametric, shape: Sequence[int], seed: int = 0, vary: float = 0.1
) -> dict[str, Tensor]:
    """An admissible θ near the initial one, perturbed so that equal entries do not hide a mistake."""
    theta = component.init_params(shape, keyed_generator("theta", seed))
    moved = {}
    for k, (name, value) in enumerate(theta.items()):
        size = float(value.double().square().mean().sqrt()) or 1.0
        moved[name] = value.double() + vary * size * normal(*value.shape, seed=1000 * seed + k)
    return component.project(moved)


def cast(theta: Theta, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in theta.items()}


def difference(function: Callable[[float], Tensor], h: float) -> Tensor:
    """The derivative at 0 of a function of one number, by fourth-order central differences."""
    near, far = function(h) - function(-h), function(2 * h) - function(-2 * h)
    return (8 * near - far) / (12 * h)


def best_difference(function: Callable[[float], Tensor], claimed: Tensor) -> tuple[Tensor, float]:
    """The difference quotient nearest to a claimed derivative, and its distance relative to the larger of the two."""
    best, smallest = claimed, float("inf")
    for h in STEPS:
        quotient = difference(function, h)
        size = max(float(quotient.norm()), float(claimed.norm()), 1e-300)
        error = float((quotient - claimed).norm()) / size
        if error < smallest or smallest == float("inf"):
            best, smallest = quotient, error
    return best, smallest


def best_entries(function: Callable[[float], Tensor], claimed: Tensor) -> tuple[Tensor, Tensor]:
    """The same for each entry separately: the quotients nearest to the claimed values, and their distances."""
    best, smallest = claimed, torch.full_like(claimed, float("inf"))
    for h in STEPS:
        quotient = difference(function, h)
        error = (quotient - claimed).abs().nan_to_num(float("inf"))
        best = torch.where(error < smallest, quotient, best)
        smallest = torch.minimum(error, smallest)
    return best, smallest


def shifted(theta: Theta, direction: Theta, t: float) -> dict[str, Tensor]:
    return {name: value + t * direction[name] for name, value in theta.items()}


def require_theta_derivative(
    function: Callable[[Theta], Tensor],
    theta: Theta,
    direction: Theta,
    claimed: Tensor,
    what: str,
    cause: str,
) -> None:
    """A claimed derivative of a number in θ along ``direction`` against difference quotients."""
    quotient, error = best_difference(lambda t: function(shifted(theta, direction, t)), claimed)
    require(
        error <= 1e-5 or abs(float(quotient - claimed)) <= 1e-9,
        f"{what}: expected {float(quotient):.6g} from finite differences in θ along a random direction, got"
        f" {float(claimed):.6g}; {cause}",
    )


def extreme_eigenvalues(product: Callable[[Tensor], Tensor], like: Tensor) -> tuple[float, float]:
    """Smallest and largest eigenvalue of a symmetric map of images like (1, C, H, W).

    Exact for small images; for larger ones, Rayleigh quotients of a power iteration, which lie between the two.
    """
    if like.numel() <= DENSE:
        units = torch.eye(like.numel(), dtype=like.dtype).view(-1, *like.shape[1:])
        matrix = product(units).flatten(1)
        values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        return float(values[0]), float(values[-1])
    largest = _power(product, like, 0.0)
    return largest + _power(product, like, -max(largest, 0.0)), largest


def _power(product: Callable[[Tensor], Tensor], like: Tensor, shift: float) -> float:
    """The eigenvalue of largest modulus of H + shift."""
    v, value = normal(*like.shape, seed=5), 0.0
    for _ in range(60):
        v = v / expand(norm(v).clamp_min(1e-300), v)
        image = product(v) + shift * v
        value = float(dot(v, image))
        v = image
    return value


def batches(count: int) -> list[Tensor]:
    """Index sets: each sample alone, and all samples in another order."""
    return [torch.tensor([i]) for i in range(count)] + [torch.arange(count).flip(0)]


def describe_batch(index: Tensor) -> str:
    return f"sample {int(index[0])} alone" if len(index) == 1 else "the samples in reverse order"


def derivative_fails(what: str, than: str, claimed: Tensor, quotient: Tensor) -> None:
    """Fail, naming the wrong factor if it is the same for all samples."""
    worst = int((claimed - quotient).abs().argmax())
    ratio = claimed / quotient
    factor = ""
    if bool(torch.isfinite(ratio).all()) and float((ratio - ratio.mean()).abs().max()) < 1e-3 * abs(
        float(ratio.mean())
    ):
        factor = f"; it is {float(ratio.mean()):.4g} times too large, so a constant factor is wrong"
    fail(
        f"{what}: expected {float(quotient[worst]):.6g} from {than},"
        f" got {float(claimed[worst]):.6g}{factor or '; the derivative does not match the function'}"
    )


def require_check_refuses(component: Parametric, use: Callable[[Sequence[int]], Tensor], what: str) -> None:
    """For every shape that ``check`` accepts, ``use`` must work and return finite values."""
    for shape in ACCEPTED:
        size = "×".join(map(str, shape))
        sentence = component.check(shape)
        if sentence is not None:
            good = isinstance(sentence, str) and bool(sentence.strip())
            require(good, f"check({shape}) must return None or a sentence, got {sentence!r}")
            continue
        try:
            value = use(shape)
        except (ConformanceFailure, NotVerified):
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0]
            fail(
                f"check accepts images of {size}, but {what} raises {type(error).__name__} ({reason});"
                " let check return a sentence for such images"
            )
        finite = bool(torch.isfinite(value).all())
        require(finite, f"check accepts images of {size}, but the result of {what} is not finite")


def require_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor], given: str) -> None:
    """Two components with the same options must return the same for the same ``given``."""
    for name, value in first.items():
        require(
            same(value, second[name]),
            f"{name} of the same {given} differed between two components with the same options;"
            " use no unseeded randomness",
        )


def require_batch_independent(results: Callable[[Tensor | None], Mapping[str, Tensor]], count: int) -> None:
    """``results`` of some of the ``count`` samples must equal those in the full batch."""
    together = results(None)
    for index in batches(count):
        for name, value in results(index).items():
            require_close(
                value,
                together[name][index],
                1e-10,
                f"{name} of {describe_batch(index)} differs from the result in a batch of {count}",
                "sums and means must not run over the first dimension",
            )


def require_initial_parameters(first: Parametric, second: Parametric) -> dict[str, Tensor]:
    """Two components with the same options and equal generators must start with the same finite float64 θ."""
    shape = fitting_shape(first)
    theta, again = (component.init_params(shape, keyed_generator("θ", 0)) for component in (first, second))
    for name, value in theta.items():
        good = isinstance(value, Tensor) and value.dtype == torch.float64 and value.device.type == "cpu"
        kind = (
            f"{str(value.dtype)[6:]} on {value.device}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        require(good, f"init_params must return float64 CPU tensors, but {name!r} is {kind}")
        require(bool(torch.isfinite(value).all()), f"init_params returns NaN or infinity in {name!r}")
    require(
        same(theta, again),
        "init_params called twice with equal generators returned different θ; draw only from the given generator",
    )
    return theta
