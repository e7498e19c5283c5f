"""Forward operators A of the data term ½‖Ax − y‖²."""

from __future__ import annotations

from bltoolbox.hookspecs import Component, hookimpl

BLT_API = 1


@hookimpl
def blt_components() -> list[Component]:
    """The components of this folder; their modules are imported only when they are used."""
    return [
        Component(
            "operator",
            "identity",
            "blt_operators.identity:Identity",
            "A = I: denoising.",
        ),
    ]
