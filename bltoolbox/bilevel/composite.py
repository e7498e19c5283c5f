"""The lower level as a sum over linear images of x: what majorise–minimise solvers work on.

h(x) = Σ_k ψ_k(K_k x) + (μ_0/2)‖x‖²,        blocks k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bltoolbox.bilevel.preconditioner import Preconditioner

#: Slope and curvature of one block.
Touch = tuple[Tensor, Tensor]


class Composite(Protocol):
    """h = Σ_k ψ_k(K_k x) + (μ_0/2)‖x‖², blocks k: the structure that majorise–minimise solvers need."""

    @property
    def ridge(self) -> float:
        """μ_0."""
        ...

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """K_k x for every block; the first one is that of the regularizer."""
        ...

    def adjoint(self, t: tuple[Tensor, ...]) -> Tensor:
        """Σ_k K_kᵀ t_k; may write to ``t``."""
        ...

    def touch(
        self, t: tuple[Tensor, ...], first: Touch | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | float, ...]]:
        """Slopes ψ_k'(t_k), and curvatures of the parabolas that touch ψ_k there and lie above it; both may be known of
        the first block."""
        ...

    def majorant(self) -> Callable[[Tensor], Tensor] | None:
        """The curvatures of the first block as a function of t that can be compiled, if there is one."""
        ...

    def preconditioner(
        self, curvatures: tuple[Tensor | float, ...], always: bool = False, shift: Tensor | float = 0.0
    ) -> Preconditioner | None:
        """P ≈ Σ_k K_kᵀ diag(curvatures_k) K_k + μ_0 + shift, easily inverted; None if there is none or, unless
        ``always``, where it would hardly pay. May wait for the device, unless ``always``."""
        ...

    @property
    def tilt_curvature(self) -> Tensor | None:
        """Per task, the curvature of a parabola that touches a further smooth term of h and lies above it; None if h
        has no such term."""
        ...

    def tilt(self, x: Tensor) -> Tensor:
        """The slope of the further term at x."""
        ...


@dataclass(frozen=True)
class TiltedComposite:
    """That of h + w g: a parabola w g(x) + ⟨w ∇g(x), ·⟩ + (c/2)‖·‖² lies above w g.

    ``slope`` is w ∇g and ``curvature`` c, per task.
    """

    composite: Composite
    slope: Callable[[Tensor], Tensor]
    curvature: Tensor

    @property
    def ridge(self) -> float:
        return self.composite.ridge

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.composite.forward(x)

    def adjoint(self, t: tuple[Tensor, ...]) -> Tensor:
        return self.composite.adjoint(t)

    def touch(
        self, t: tuple[Tensor, ...], first: Touch | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | float, ...]]:
        return self.composite.touch(t, first)

    def majorant(self) -> Callable[[Tensor], Tensor] | None:
        return self.composite.majorant()

    def preconditioner(
        self, curvatures: tuple[Tensor | float, ...], always: bool = False, shift: Tensor | float = 0.0
    ) -> Preconditioner | None:
        return self.composite.preconditioner(curvatures, always, self.curvature + shift)

    @property
    def tilt_curvature(self) -> Tensor:
        inner = self.composite.tilt_curvature
        return self.curvature if inner is None else self.curvature + inner

    def tilt(self, x: Tensor) -> Tensor:
        slope = self.slope(x)
        return slope if self.composite.tilt_curvature is None else slope + self.composite.tilt(x)
