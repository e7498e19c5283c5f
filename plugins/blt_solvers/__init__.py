"""Lower-level solvers: iterations for x̃ ≈ argmin_x h(x, θ)."""

from __future__ import annotations

from bltoolbox.hookspecs import Component, hookimpl

BLT_API = 1


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "lower_solver",
            "agd",
            "blt_solvers.agd:AGD",
            "Nesterov's accelerated gradient; needs only a Lipschitz constant. The safe choice.",
        ),
        Component(
            "lower_solver",
            "mm",
            "blt_solvers.mm:MemoryGradient",
            "Majorise-minimise memory gradient; few iterations on half-quadratic regularizers, no step size.",
        ),
    ]
