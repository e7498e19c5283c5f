"""Partners for components that cannot be tested alone: problems with the methods that a component requires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Theta
from bltoolbox.errors import MissingError
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.restoration.variational import Constraint, Variational
from bltoolbox.testing.checks.base import ConformanceFailure, NotApplicable, Subject
from bltoolbox.testing.checks.numerics import cast, fitting_shape, noisy_images, parameters
from bltoolbox.testing.problems import Gain, Tikhonov, smooth_images, variational


class SmoothedDifferences(Regularizer):
    """R_θ(x) = e^{θ_0} Σ_p (√(t_p² + ν²) − ν), t the horizontal differences: convex, smooth and not quadratic."""

    def __init__(self, weight: float = 0.1, nu: float = 0.2) -> None:
        self.weight = weight
        self.nu = nu

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.full((1,), math.log(self.weight), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        length = (self.analyse(theta, x).square() + self.nu**2).sqrt()
        return theta["log_weight"].exp() * (length - self.nu).flatten(1).sum(1)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return (4 / self.nu * theta["log_weight"].exp()).squeeze()

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return x[..., 1:] - x[..., :-1]

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        zero = t.new_zeros(*t.shape[:-1], 1)
        return torch.cat([zero, t], dim=-1) - torch.cat([t, zero], dim=-1)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return theta["log_weight"].exp() * (t.square() + self.nu**2).rsqrt()


@dataclass(frozen=True)
class Bench:
    """A problem, θ and measurements."""

    problem: Variational
    theta: dict[str, Tensor]
    x_true: Tensor
    y: Tensor
    #: The closed form, if there is one.
    formula: Tikhonov | None = None

    def lower(self, dtype: torch.dtype = torch.float64, theta: Theta | None = None) -> Lower:
        at = self.problem.at(
            cast(self.theta if theta is None else theta, dtype), tuple(self.x_true.shape[1:])
        )
        return at.on(self.y.to(dtype))

    @property
    def own_theta(self) -> dict[str, Tensor]:
        """The regularizer's parameters under its own names."""
        return split(self.theta, "regularizer")


def quadratic(subject: Subject, count: int = 3, constraint: Constraint = "none") -> Bench:
    """A quadratic lower level of condition number 6 with a closed form."""
    formula = Tikhonov(weight=2.0, condition=10.0)
    _satisfied(subject, formula)
    return _bench(formula, count, (3, 6, 7), constraint, formula)


def conditioned(subject: Subject, condition: float, count: int = 3) -> Bench:
    """A quadratic lower level whose Hessian has exactly this condition number."""
    weight = 2 * condition
    formula = Tikhonov(weight, condition=weight / ((1 + weight) / condition - 1))
    _satisfied(subject, formula)
    bench = _bench(formula, count, (3, 6, 7), formula=formula)
    theta = {name: torch.full_like(value, math.log(weight)) for name, value in bench.theta.items()}
    return replace(bench, theta=theta)


def smooth(subject: Subject, count: int = 3, seed: int = 0) -> Bench:
    """A lower level that is not quadratic; with an installed regularizer if the component requires its methods."""
    regularizer: Regularizer = SmoothedDifferences()
    shape: tuple[int, ...] = (3, 6, 7)
    if _missing(subject, "regularizer", regularizer):
        regularizer = _from_registry(subject)
        shape = fitting_shape(regularizer)
    return _bench(regularizer, count, shape, seed=seed)


def _bench(
    regularizer: Regularizer,
    count: int,
    shape: tuple[int, ...],
    constraint: Constraint = "none",
    formula: Tikhonov | None = None,
    seed: int = 0,
) -> Bench:
    theta = join(regularizer=parameters(regularizer, shape, seed))
    problem = variational(Gain(), regularizer, constraint)
    x_true, y = smooth_images(count, shape, seed).double(), noisy_images(count, shape, seed)
    return Bench(problem, theta, x_true, y, formula)


def _missing(subject: Subject, kind: str, partner: Any) -> list[str]:
    wanted = subject.cls.requires.get(kind, ())
    return [method for method in wanted if not partner.offers(method)]


def _satisfied(subject: Subject, regularizer: Regularizer) -> None:
    for kind, partner in (("regularizer", regularizer), ("operator", Gain())):
        if missing := _missing(subject, kind, partner):
            raise NotApplicable(f"the closed-form problem has no {kind} with {', '.join(missing)}")


def _from_registry(subject: Subject) -> Regularizer:
    """An installed regularizer that has what the component requires."""
    for registered in subject.registry.components("regularizer"):
        try:
            regularizer: Regularizer = Subject(
                registered, subject.registry, Path(subject.folder) / registered.name
            )()
        except (MissingError, ValueError, ConformanceFailure):
            continue
        if regularizer.smooth and not _missing(subject, "regularizer", regularizer):
            return regularizer
    wanted = ", ".join(subject.cls.requires["regularizer"])
    raise NotApplicable(f"no installed smooth regularizer has {wanted}, which it requires")
