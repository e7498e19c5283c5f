"""θ of the variational problem: one mapping, in which a name is a role and a parameter, ``regularizer.kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from bltoolbox.bilevel.records import Theta

if TYPE_CHECKING:
    from bltoolbox.restoration.variational import Variational


def split(theta: Theta, role: str) -> dict[str, Tensor]:
    """The parameters of one role, under the names its component gave them."""
    prefix = role + "."
    return {name[len(prefix) :]: value for name, value in theta.items() if name.startswith(prefix)}


def join(**roles: Theta) -> dict[str, Tensor]:
    """Named parameters of several roles in one mapping."""
    return {f"{role}.{name}": value for role, params in roles.items() for name, value in params.items()}


def upgraded(theta: Theta, problem: Variational) -> dict[str, Tensor]:
    """θ as read from a file, in the parameters that the components have today."""
    return join(
        **{role: component.upgrade(split(theta, role)) for role, component in problem.components.items()}
    )


def prepare(problem: Variational, theta: Theta) -> dict[str, Theta]:
    """θ by role, prepared by its component."""
    return {role: component.prepare(split(theta, role)) for role, component in problem.components.items()}
