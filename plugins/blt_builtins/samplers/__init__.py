"""Samplers: which samples enter an upper-level step, and with which weights (E[v] = 1)."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "sampler",
            "epoch",
            "blt_builtins.samplers.epoch:Epoch",
            "Shuffled passes: every sample once an epoch. The usual choice for training.",
        ),
        Component(
            "sampler",
            "nice",
            "blt_builtins.samplers.nice:Nice",
            "A uniformly random subset of fixed size at each step; unbiased, as in the theory.",
        ),
        Component(
            "sampler",
            "independent",
            "blt_builtins.samplers.independent:Independent",
            "Each sample on its own with a given probability; batch sizes vary.",
        ),
        Component(
            "sampler",
            "importance",
            "blt_builtins.samplers.importance:Importance",
            "Draws more often the samples with a large loss or gradient; unbiased, with replacement.",
        ),
        Component(
            "sampler",
            "full",
            "blt_builtins.samplers.full:Full",
            "All samples at every step; for MAID and for small data sets.",
        ),
    ]
