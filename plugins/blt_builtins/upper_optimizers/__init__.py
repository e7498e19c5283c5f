"""Upper-level optimizers: θ ← θ⁺ from inexact values and hypergradients."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "upper_optimizer",
            "isgd",
            "blt_builtins.upper_optimizers.isgd:ISGD",
            "Inexact stochastic gradient descent with fixed or decreasing step and accuracy; mini-batches.",
        ),
        Component(
            "upper_optimizer",
            "isgd-ls",
            "blt_builtins.upper_optimizers.isgd_ls:ISGDLineSearch",
            "ISGD that occasionally measures its step length on the batch; no step to tune.",
        ),
        Component(
            "upper_optimizer",
            "maid",
            "blt_builtins.upper_optimizers.maid:MAID",
            "Adaptive inexact descent with a line search; chooses its step and accuracy, needs all data.",
        ),
        Component(
            "upper_optimizer",
            "iadam",
            "blt_builtins.upper_optimizers.iadam:IAdam",
            "Inexact Adam; as cheap as isgd, balances parameters of different scales. Easy to tune.",
        ),
        Component(
            "upper_optimizer",
            "hoag",
            "blt_builtins.upper_optimizers.hoag:HOAG",
            "Descent with a fixed sequence of accuracies and an adaptive step; needs all data, no bounds.",
        ),
        Component(
            "upper_optimizer",
            "single-loop",
            "blt_builtins.upper_optimizers.single_loop:SingleLoop",
            "A few warm iterations on x and on the adjoint per step, whatever accuracy that gives.",
        ),
        Component(
            "upper_optimizer",
            "random-search",
            "blt_builtins.upper_optimizers.random_search:RandomSearch",
            "The best of random draws around the initial θ; a reference to beat, needs all data.",
        ),
    ]
