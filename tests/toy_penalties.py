"""Components with a penalty, as a plugin file: a regularizer, an operator, a data term with a box, and a loss in y.

Each has few parameters and smooth derivatives, so that finite differences in float64 are accurate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bltoolbox.plugin import (
    Bound,
    Component,
    DataTerm,
    Operator,
    Regularizer,
    Rows,
    Sample,
    Theta,
    Upper,
    UpperLoss,
    dot,
    hookimpl,
)


@hookimpl
def blt_components() -> list[Component]:
    return [
        Component("regularizer", "priced-ridge", f"{__name__}:PricedRidge", "A ridge with a penalty."),
        Component("operator", "priced-gain", f"{__name__}:PricedGain", "A gain with a penalty."),
        Component("data_term", "boxed-weight", f"{__name__}:BoxedWeight", "A weight in a box."),
        Component("upper_loss", "measured-misfit", f"{__name__}:MeasuredMisfit", "‖A_θ x − y‖²."),
    ]


class PricedRidge(Regularizer):
    """R = Σ_c e^{θ_c} Σ (√(x_cp² + 0.04) − 0.2), P = a Σ (sin θ + θ²).

    Args:
        price: a; 0 is no penalty.
        tied: whether the θ_c have the sum that they begin with.
    """

    def __init__(self, price: float = 0.3, tied: bool = False) -> None:
        self.price = price
        self.tied = tied

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.linspace(-2, -1, shape[0], dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        potentials = ((x.square() + 0.04).sqrt() - 0.2).sum((2, 3))
        return (theta["log_weight"].exp() * potentials).sum(1)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return 5 * theta["log_weight"].exp().max()

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        z = gradient["log_weight"]
        return {"log_weight": z - z.mean() if self.tied else z}

    def penalty(self, theta: Theta) -> Tensor | None:
        weight = theta["log_weight"]
        return self.price * (weight.sin() + weight.square()).sum() if self.price else None


class PricedGain(Operator):
    """A = e^θ, P = a cosh θ; the true operator is the identity.

    Args:
        price: a; 0 is no penalty.
    """

    def __init__(self, price: float = 0.5) -> None:
        self.price = price

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_gain": torch.full((1,), 0.2, dtype=torch.float64)}

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return theta["log_gain"].exp() * x if theta else x

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return self.apply(y, theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        squared = (2 * theta["log_gain"]).exp().squeeze() if theta else 1.0
        return squared, squared

    def penalty(self, theta: Theta) -> Tensor | None:
        return self.price * theta["log_gain"].cosh().sum() if self.price else None


class BoxedWeight(DataTerm):
    """d = w (t − y)²/2 with low ≤ w ≤ 1.5, P = a w³; where w is large the measurements are trusted.

    Args:
        low: the smallest admissible w.
        price: a; 0 is no penalty.
    """

    quadratic = True

    def __init__(self, low: float = 0.5, price: float = 0.2) -> None:
        self.low = low
        self.price = price

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"weight": torch.ones(1, dtype=torch.float64)}

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * theta["weight"] * dot(t - y, t - y)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["weight"] * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["weight"].expand_as(t)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Bound, Bound]:
        weight = theta["weight"].detach().squeeze()
        return weight, weight

    def third(self, theta: Theta, y: Tensor) -> Bound:
        return 0.0

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return {"weight": theta["weight"].clamp(self.low, 1.5)}

    def penalty(self, theta: Theta) -> Tensor | None:
        return self.price * theta["weight"].pow(3).sum() if self.price else None


@dataclass(frozen=True)
class Misfit(Upper):
    """g = ‖A_θ x − y‖² + ‖x‖²/10."""

    forward: Callable[[Tensor], Tensor]
    y: Tensor
    infimum: float = 0.0

    def value(self, x: Tensor) -> Tensor:
        misfit = (self.forward(x) - self.y).double()
        return dot(misfit, misfit) + dot(x.double(), x.double()) / 10

    def take(self, index: Tensor) -> Misfit:
        return replace(self, y=self.y[index])


class MeasuredMisfit(UpperLoss):
    """How far A_θ x is from the measurements: depends on θ where the operator does."""

    needs_truth = False

    def bind(self, sample: Sample, forward: Callable[[Tensor], Tensor]) -> Misfit:
        return Misfit(forward, sample.y)


@dataclass(frozen=True)
class PricedDistance(Upper):
    """g(x, θ) = ‖x − x*‖² + Σ_c tanh(θ_c) ‖x_c‖²/2, θ that of the regularizer."""

    truth: Tensor
    theta: Theta

    def value(self, x: Tensor) -> Tensor:
        return self._value(x, self.theta)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        name = "regularizer.log_weight"
        with torch.enable_grad():
            leaf = self.theta[name].detach().requires_grad_()
            total = (weights * self._value(x.detach(), {name: leaf})).sum()
        return {name: torch.autograd.grad(total, leaf)[0]}

    def take(self, index: Tensor) -> PricedDistance:
        return replace(self, truth=self.truth[index])

    def _value(self, x: Tensor, theta: Theta) -> Tensor:
        price = theta["regularizer.log_weight"].tanh().view(-1, 1, 1)
        return dot(x - self.truth, x - self.truth).double() + (price * x.square()).sum((1, 2, 3)).double() / 2
