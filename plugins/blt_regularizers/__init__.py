"""Regularizers R_θ(x), convex in x."""

from __future__ import annotations

from bltoolbox.hookspecs import Component, hookimpl

BLT_API = 1


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "regularizer",
            "foe",
            "blt_regularizers.foe:FieldOfExperts",
            "Field of Experts: learned filters and weights, smoothed absolute values. Expressive, yet convex.",
        ),
        Component(
            "regularizer",
            "tv",
            "blt_regularizers.tv:TotalVariation",
            "Smoothed total variation with a learned weight; the baseline to beat.",
        ),
    ]
