"""Whether a θ can be used: the parameters that the components expect, finite, with finite energies and constants.

θ is often a logarithm, and one that is finite may have an infinite exponential. So the regularizer is asked about a
small picture: its energy, its gradient and its constants there show what θ makes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import detached, keyed_generator
from bltoolbox.errors import UsageError
from bltoolbox.restoration.layout import with_channels
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.restoration.variational import Variational

#: Sides of the pictures that are tried, the first that the regularizer can treat.
_SIDES = (16, 64, 256)
_DTYPES = (torch.float32, torch.float64)


def find_flaw(
    problem: Variational,
    theta: Theta,
    expected: Iterable[Theta],
    channels: Iterable[int] = (3, 1, 2, 4),
    constants: bool = True,
    shape: Sequence[int] | None = None,
) -> str | None:
    """Why ``theta`` cannot be used, as the end of a sentence; None if it can.

    Names and shapes must be those of one of the ``expected`` θ, which are for images of different ``channels``, or of
    ``shape`` where θ is for images of one size. The regularizer's ``constants`` take longer than its energy, so that
    they are not asked for after every step.
    """
    if (misfit := find_misfit(theta, expected)) is not None:
        return misfit
    return _find_overflow(problem, split(theta, "regularizer"), channels, constants, shape)


def find_misfit(theta: Theta, expected: Iterable[Theta]) -> str | None:
    """Why ``theta`` is none of the ``expected`` ones with other values, of one precision and finite; None if it is."""
    shapes, first = _shapes(theta), None
    for wanted in map(_shapes, expected):
        if shapes == wanted:
            break
        first = first or wanted
    else:
        return f"it has {shapes}, but the components of the recipe have {first}"
    kinds = {value.dtype for value in theta.values()}
    if len(kinds) > 1 or not kinds <= set(_DTYPES):
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"its entries are {names}, but θ is either float32 or float64"
    for name, value in theta.items():
        if bad := int((~torch.isfinite(value)).sum()):
            return f"{bad} of the {value.numel()} entries of {name} are NaN or infinite"
    return None


def find_overflow_in_task(tasks: Tasks, theta: Theta, constants: bool) -> str | None:
    """Which quantity of the first task is not finite at θ; its ``constants`` may be unknown, but are not NaN."""
    lower, upper = tasks.at(theta, Counter()).on([0])
    start = lower.start()
    with detached():
        values = {
            "energy": lower.energy(start),
            "gradient": lower.gradient(start),
            "loss": upper.value(start),
        }
        bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
        if constants and not bad:
            bounds = {"Lipschitz constant": lower.lipschitz, "strong convexity": lower.mu}
            bad = [name for name, value in bounds.items() if bool(torch.isnan(value).any())]
    return f"the {bad[0]} of the first task is not finite there, so θ is out of range" if bad else None


def find_size_misfit(
    problem: Variational, theta: Theta, trained: Sequence[int], shape: Sequence[int]
) -> tuple[str, str] | None:
    """The role whose parameters belong to images of the size they were ``trained`` on and not to those of ``shape``,
    with a sentence; None where θ is for images of any size, or of this one."""
    if tuple(trained[1:]) == tuple(shape[1:]):
        return None
    for role, component in problem.components.items():
        if (own := split(theta, role)) and _shapes(own) != _shapes(
            component.init_params((trained[0], *shape[1:]), keyed_generator("theta", 0))
        ):
            sizes = ("×".join(map(str, size[1:])) for size in (trained, shape))
            what = role.replace("_", " ")
            return role, "the {} was learned for images of {} pixels, not of {}".format(what, *sizes)
    return None


def initial_thetas(
    problem: Variational, shapes: Iterable[Sequence[int]], with_operator: bool = True
) -> Iterator[dict[str, Tensor]]:
    """What the components begin with, for images of each of the shapes (C, H, W) that they accept.

    Without parameters, a learned operator is the true one.
    """
    for shape in shapes:
        generator = keyed_generator("theta", 0)
        try:
            yield join(
                **{
                    role: component.init_params(shape, generator)
                    for role, component in problem.components.items()
                    if role != "operator" or with_operator
                }
            )
        except ValueError:
            continue


def initial_theta(
    problem: Variational, color: str, seed: int, shape: Sequence[int] | None
) -> dict[str, Tensor]:
    """The θ with which training begins, for images of ``shape`` (C, H, W) or, if it does not depend on it, of any
    size; as float64 CPU tensors."""

    def begin(images: Sequence[int]) -> dict[str, Tensor]:
        generator = keyed_generator("theta", seed)
        return join(
            **{
                role: component.init_params(images, generator)
                for role, component in problem.components.items()
            }
        )

    if shape is not None:
        return begin(tuple(shape))
    channels = 1 if color == "gray" else 3
    theta, other = (begin((channels, side, side)) for side in _SIDES[-2:])
    if _shapes(theta) != _shapes(other):
        raise UsageError("θ depends on the size of the images; give shape=(C, H, W)")
    return theta


def any_size(channels: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Shapes that stand for images of any size."""
    return ((count, _SIDES[1], _SIDES[1]) for count in channels)


def _to_try(
    regularizer: Regularizer, channels: Iterable[int], shape: Sequence[int] | None
) -> Iterator[Sequence[int]]:
    """Small pictures of each number of channels, then those that θ is for."""
    for count in channels:
        small = (square for side in _SIDES if not regularizer.check(square := (count, side, side)))
        yield from itertools.islice(small, 1)
    if shape is not None:
        yield shape


def _find_overflow(
    problem: Variational,
    theta: Theta,
    channels: Iterable[int],
    constants: bool,
    trained: Sequence[int] | None,
) -> str | None:
    """Which quantity of the regularizer is not finite at θ."""
    regularizer = problem.regularizer
    for shape in _to_try(regularizer, channels, trained) if theta else ():
        image = torch.linspace(*problem.range, math.prod(shape)).reshape(1, *shape)
        x = with_channels(image, regularizer.extra_channels(shape[0])).to(next(iter(theta.values())))
        try:
            quantities = _quantities(regularizer, regularizer.prepare(theta), x, shape if constants else None)
        except (ValueError, RuntimeError, IndexError):
            continue  # θ is for images of another number of channels, or of another size
        for name, value in quantities.items():
            if value is not None and not bool(torch.isfinite(torch.as_tensor(value)).all()):
                return f"the {name} of the regularizer is not finite there, so θ is out of range"
        return None
    return None


def _quantities(
    regularizer: Regularizer, theta: Theta, x: Tensor, shape: Sequence[int] | None
) -> dict[str, Tensor | float | None]:
    """What a run computes from θ, the constants for images of ``shape``."""
    with torch.no_grad():
        quantities: dict[str, Tensor | float | None] = {
            "energy": regularizer.energy(theta, x),
            "gradient": regularizer.gradient(theta, x),
        }
        if shape is not None:
            quantities["Lipschitz constant"] = regularizer.lipschitz(theta, shape)
            quantities["strong convexity"] = regularizer.strong_convexity(theta, shape)
    return quantities


def _shapes(theta: Theta) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in sorted(theta.items())}
