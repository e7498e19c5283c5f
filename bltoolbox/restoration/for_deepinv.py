"""Trained regularizers and models in the roles that deepinv has for them; needs the extra ``deepinv``.

    deepinv.optim.Prior             g = R_θ, with its gradient and its proximal map
    deepinv.models.Reconstructor    (y, physics) ↦ argmin_x D(A x; y) + R_θ(x), A the given physics

Reference: Tachella et al., *DeepInverse: a Python package for solving imaging inverse problems with deep learning*,
2025.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.tensors import dot, expand
from bltoolbox.errors import BltError, MissingError
from bltoolbox.restoration.layer import ImplicitLayer
from bltoolbox.restoration.roles import Operator

if TYPE_CHECKING:
    from bltoolbox.restoration.prior import Prior


def prior_of(prior: Prior) -> Any:
    """A ``deepinv.optim.Prior``; its parameters are those of ``prior``."""
    return _classes()[0](prior)


def reconstructor_of(layer: ImplicitLayer) -> Any:
    """A ``deepinv.models.Reconstructor``; its parameters are those of ``layer``."""
    return _classes()[1](layer)


@cache
def _classes() -> tuple[type[Any], type[Any]]:
    """The two classes; their bases exist only where deepinv is installed."""
    try:
        from deepinv.models import Reconstructor
        from deepinv.optim import Prior as DeepinvPrior
    except ImportError as error:
        raise MissingError(
            "the package deepinv is not installed; install it with: pip install 'bltoolbox[deepinv]'"
        ) from error

    class LearnedPrior(DeepinvPrior):
        """R_θ; further arguments of deepinv, such as a noise level, are ignored."""

        def __init__(self, prior: Prior) -> None:
            super().__init__()
            self.explicit_prior = True
            self.prior = prior

        def fn(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
            return self.prior.energy(x)

        def grad(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
            return self.prior.gradient(x)

        def prox(self, x: Tensor, *args: Any, gamma: float | Tensor = 1.0, **options: Any) -> Tensor:
            step = gamma.flatten() if isinstance(gamma, Tensor) else gamma
            return self.prior.prox(x, step)

    class LearnedReconstructor(Reconstructor):
        """x̂ for the operator of the given physics, or for that of the model if there is none."""

        def __init__(self, layer: ImplicitLayer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, y: Tensor, physics: Any = None, **options: Any) -> Tensor:
            if physics is None:
                return self.layer(y)
            operator = PhysicsOperator(physics, y.shape[1:])
            return self.layer.with_operator(operator)(y.reshape(len(y), *operator.shape))

    return LearnedPrior, LearnedReconstructor


class PhysicsOperator(Operator):
    """A linear physics of deepinv as it is; ‖A‖ is unknown, so that solvers search for a step.

    Measurements of ``own`` shape that are not images are arranged as images of one row.
    """

    def __init__(self, physics: Any, own: Sequence[int]) -> None:
        name = type(physics).__name__
        if not hasattr(physics, "A_adjoint"):
            raise BltError(f"{name} has no adjoint; a linear physics is needed")
        for attribute in ("mask", "filter"):
            # Samples leave the batch when they are solved, and a part of a physics cannot be taken.
            if (
                isinstance(entry := getattr(physics, attribute, None), Tensor)
                and entry.ndim > 3
                and len(entry) > 1
            ):
                raise BltError(f"{name} has a {attribute} for each sample; reconstruct them one by one")
        self.physics = physics
        self.own = tuple(own)
        self.shape = self.own if len(own) == 3 else (1, 1, math.prod(own))

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        t: Tensor = self.physics.A(x)
        return t.reshape(len(x), *self.shape)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        x: Tensor = self.physics.A_adjoint(y.reshape(len(y), *self.own))
        return x

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """The multiple of Aᵀy that is nearest to the measurements."""
        x = self.adjoint(y, theta, context)
        t = self.apply(x, theta, context)
        size = dot(t, t)
        return expand(torch.where(size > 0, dot(t, y) / size, 0.0), x) * x
