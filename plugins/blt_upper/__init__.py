"""Upper-level optimizers: θ ← θ⁺ from inexact values and hypergradients."""

from __future__ import annotations

from bltoolbox.hookspecs import Component, hookimpl

BLT_API = 1


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "upper_optimizer",
            "isgd",
            "blt_upper.isgd:ISGD",
            "Inexact stochastic gradient descent; fixed or decreasing step and accuracy. Cheap steps, mini-batches.",
        ),
        Component(
            "upper_optimizer",
            "maid",
            "blt_upper.maid:MAID",
            "Adaptive inexact descent with a line search; chooses step and accuracy itself, needs all data.",
        ),
    ]
