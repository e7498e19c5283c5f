"""What solvers share that work on h as a sum of terms with majorising parabolas, h = ψ(Cx) + D(Ax; y) + (μ_0/2)‖x‖²."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from bltoolbox.plugin import (
    Composite,
    Lower,
    LowerSolver,
    NumericalError,
    Preconditioner,
    Preconditioning,
    unavailable,
)

#: P is renewed after this many iterations.
RENEWAL = 5


class HalfQuadratic(LowerSolver):
    """A solver that touches h with parabolas, and preconditions with their curvatures."""

    name: ClassVar[str] = "mm"
    requires: ClassVar = {
        "regularizer": ("analyse", "synthesise", "majorant"),
        "data_term": ("majorant",),
    }

    def __init__(self, preconditioner: Preconditioning = "auto") -> None:
        self.preconditioner: Preconditioning = preconditioner

    def _preconditioner(
        self, composite: Composite, weights: Tensor, curvature: Tensor | None, always: bool = False
    ) -> Preconditioner | None:
        if self.preconditioner == "none":
            return None
        always = always or self.preconditioner == "spectral"
        chosen = composite.preconditioner((weights, 1.0 if curvature is None else curvature), always)
        if chosen is None and self.preconditioner == "spectral":
            raise NumericalError(unavailable(self.name))
        return chosen

    def _gradient(
        self,
        lower: Lower,
        composite: Composite,
        x: Tensor,
        t: tuple[Tensor, Tensor],
        first: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """∇h, and the curvatures of the two parabolas; None means 1. ``first`` is that of ``Composite.touch``."""
        lower.counter.gradients += len(x)
        slopes, (weights, curvature) = composite.touch(t, first)
        gradient = composite.adjoint(slopes)
        if composite.ridge:
            gradient = gradient.add_(x, alpha=composite.ridge)
        if composite.tilt_curvature is not None:
            gradient = gradient + composite.tilt(x)
        return gradient, torch.as_tensor(weights), curvature if isinstance(curvature, Tensor) else None


def half_quadratic(lower: Lower, name: str = "mm") -> Composite:
    """h as the sum of a regularizer and a data term, both with majorising parabolas."""
    if (composite := lower.composite()) is None:
        raise NumericalError(
            f"{name} needs a regularizer and a data term with majorants, and a loss with a known Lipschitz constant"
            " where a method adds it to them; use agd, which does not"
        )
    return composite
