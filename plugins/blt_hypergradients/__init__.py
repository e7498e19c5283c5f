"""Hypergradient estimators: z ≈ ∇f from an approximate lower-level solution."""

from __future__ import annotations

from bltoolbox.hookspecs import Component, hookimpl

BLT_API = 1


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "hypergradient",
            "cg-ift",
            "blt_hypergradients.cg_ift:CGIFT",
            "Implicit differentiation; the Hessian system solved by conjugate gradients to a tolerance.",
        ),
    ]
