"""Data terms: how far a reconstruction is from its measurements."""

from __future__ import annotations

from bltoolbox.plugin import Component, hookimpl

BLT_API = 2


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "data_term",
            "least-squares",
            "blt_builtins.data_terms.least_squares:LeastSquares",
            "Half the squared distance; for Gaussian noise. The default.",
        ),
    ]
