"""The one hook through which components enter the toolbox.

This module imports no torch: an entry point names a light module whose hook returns records, and the class behind a
record is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

PROJECT = "bltoolbox"

#: Version of the plugin contract. A plugin module may set ``BLT_API = 2``; another number is refused with a message.
API_VERSION = 2

#: The class of ``bltoolbox.plugin`` that a component of each kind derives from, in the order of a recipe.
ROLES = {
    "problem": "Problem",
    "data": "Data",
    "operator": "Operator",
    "noise": "Noise",
    "data_term": "DataTerm",
    "regularizer": "Regularizer",
    "upper_loss": "UpperLoss",
    "lower_solver": "LowerSolver",
    "hypergradient": "HypergradientEstimator",
    "sampler": "Sampler",
    "upper_optimizer": "UpperOptimizer",
    "logger": "Logger",
}
KINDS = tuple(ROLES)

#: Kinds of which a recipe may name any number, by the section that lists them; the others are sections themselves.
LISTS = {"logger": "loggers"}

#: The component and the option that a plain number stands for, instead of a component of a kind.
SHORT = {"noise": ("gaussian", "level")}

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Component:
    """One implementation of a role.

    ``target`` is ``"package.module:Class"``, imported on first use. ``summary`` is one line for ``blt list``.
    """

    kind: str
    name: str
    target: str
    summary: str


#: The problem of recipes that name none, which is made of other sections; it is part of the toolbox itself.
CORE = (
    Component(
        "problem",
        "variational",
        "bltoolbox.restoration.variational:Variational",
        "Images restored from measurements; made of the sections data, operator, regularizer and others.",
    ),
)

_GIVEN = "bltoolbox.restoration.python_data"
#: Stand-ins for data that were given from Python, which only the recipes of such runs name. They are not listed.
STAND_INS = {
    (component.kind, component.name): component
    for component in (
        Component("data", "python", f"{_GIVEN}:FromPython", "True images, given from Python."),
        Component(
            "data", "python-pairs", f"{_GIVEN}:PairsFromPython", "Images and measurements, given from Python."
        ),
        Component(
            "data", "python-measured", f"{_GIVEN}:MeasuredFromPython", "Measurements, given from Python."
        ),
    )
}


@hookspec
def blt_components() -> Iterable[Component]:  # type: ignore[empty-body]
    """Return the components this plugin offers. Must not import torch or anything slow."""
