"""Lower-level solvers: iterations for x̃ ≈ argmin_x h(x, θ)."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "lower_solver",
            "agd",
            "blt_builtins.lower_solvers.agd:AGD",
            "Nesterov's accelerated gradient; needs only a Lipschitz constant. The safe choice.",
        ),
        Component(
            "lower_solver",
            "mm",
            "blt_builtins.lower_solvers.mm:MemoryGradient",
            "Majorise-minimise memory gradient; few iterations on half-quadratic regularizers, no step size.",
        ),
        Component(
            "lower_solver",
            "mm-lbfgs",
            "blt_builtins.lower_solvers.mm_lbfgs:MajorisedLBFGS",
            "Quasi-Newton steps under a majorant; for large images to a few digits, no step size.",
        ),
        Component(
            "lower_solver",
            "gd",
            "blt_builtins.lower_solvers.gd:GradientDescent",
            "Plain gradient descent; slow but monotone, the reference and the simplest example of a solver.",
        ),
        Component(
            "lower_solver",
            "lbfgs",
            "blt_builtins.lower_solvers.lbfgs:LBFGS",
            "Limited-memory BFGS; fast on any smooth regularizer, needs no constants, for tight tolerances.",
        ),
        Component(
            "lower_solver",
            "newton-cg",
            "blt_builtins.lower_solvers.newton_cg:NewtonCG",
            "Inexact Newton; a few expensive iterations, for very tight tolerances and reference solutions.",
        ),
        Component(
            "lower_solver",
            "pdhg",
            "blt_builtins.lower_solvers.pdhg:PDHG",
            "Primal-dual hybrid gradient for nonsmooth regularizers; accuracy certified by the duality gap.",
        ),
    ]
