"""Whether a θ can be used: the parameters that the components expect, finite, with finite energies and constants.

θ is often a logarithm, and one that is finite may have an infinite exponential. So the regularizer is asked about a
small picture: its energy, its gradient and its constants there show what θ makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from bltoolbox.interfaces import Theta
from bltoolbox.problem import Problem, join, split
from bltoolbox.tensors import keyed_generator

#: Sides of the pictures that are tried, the first that the regularizer can treat.
_SIDES = (16, 64, 256)
_DTYPES = (torch.float32, torch.float64)


def find_flaw(problem: Problem, theta: Theta, expected: Iterable[Theta]) -> str | None:
    """Why ``theta`` cannot be used, as the end of a sentence; None if it can.

    Names and shapes must be those of one of the ``expected`` θ, which are for images of different channels.
    """
    found, first = _shapes(theta), None
    for wanted in map(_shapes, expected):
        if found == wanted:
            break
        first = first or wanted
    else:
        return f"it has {found}, but the components of the recipe have {first}"
    kinds = {value.dtype for value in theta.values()}
    if len(kinds) > 1 or not kinds <= set(_DTYPES):
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        return f"its entries are {names}, but θ is either float32 or float64"
    for name, value in theta.items():
        if bad := int((~torch.isfinite(value)).sum()):
            return f"{bad} of the {value.numel()} entries of {name} are NaN or infinite"
    return _find_overflow(problem, theta)


def initial_thetas(problem: Problem, channels: Iterable[int]) -> Iterator[dict[str, Tensor]]:
    """What the components begin with, for images of each number of channels that they accept."""
    for count in channels:
        generator = keyed_generator("theta", 0)
        try:
            regularizer = problem.regularizer.init_params(count, generator)
            operator = problem.operator.init_params(count, generator)
        except ValueError:
            continue
        yield join(regularizer=regularizer, operator=operator)


def _find_overflow(problem: Problem, theta: Theta) -> str | None:
    """Which quantity of the regularizer is not finite at θ."""
    regularizer, own = problem.regularizer, split(theta, "regularizer")
    for channels in (1, 3, 2, 4):
        for side in _SIDES:
            shape = (channels, side, side)
            if not own or regularizer.check(shape):
                continue
            picture = torch.rand(1, *shape, dtype=torch.float64, generator=keyed_generator("probe"))
            x = picture.to(next(iter(own.values())))
            try:
                with torch.no_grad():
                    quantities = {
                        "energy": regularizer.energy(own, x),
                        "gradient": regularizer.gradient(own, x),
                        "Lipschitz constant": regularizer.lipschitz(own, shape),
                        "strong convexity": regularizer.strong_convexity(own, shape),
                    }
            except (ValueError, RuntimeError, IndexError):
                break  # θ is for images of another number of channels
            for name, value in quantities.items():
                if value is not None and not bool(torch.isfinite(torch.as_tensor(value)).all()):
                    return f"the {name} of the regularizer is not finite there, so θ is out of range"
            return None
    return None


def _shapes(theta: Theta) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in sorted(theta.items())}
