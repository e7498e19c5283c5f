"""A regularizer around another: what both of the kind share, so that each says only what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bltoolbox.plugin import Bound, Regularizer, Theta, join, keyed_generator, split


class WrappedRegularizer(Regularizer):
    """Around ``base``, whose parameters are those with the prefix ``base.`` among its own."""

    def __init__(self, base: Regularizer) -> None:
        self.base = base
        self.cheap = base.cheap

    def responses(self, shape: Sequence[int]) -> int:
        """The number of filters of the base."""
        theta = self.base.prepare(self.base.init_params(shape, keyed_generator("responses")))
        return self.base.analyse(theta, torch.zeros(1, *shape, dtype=torch.float64)).shape[1]

    def convexity_when_flattened(self, theta: Theta, shape: Sequence[int]) -> Bound:
        """The strong convexity of the base as far as it is left where potentials lose curvature: at most 0."""
        bound = self.base.strong_convexity(of_base(theta), shape)
        return None if bound is None else torch.as_tensor(bound).clamp_max(0)

    def own_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """The initial parameters besides those of the base."""
        return {}

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        own = self.own_params(shape, generator)
        return own | join(base=self.base.init_params(shape, generator))

    def prepare(self, theta: Theta) -> Theta:
        return Prepared(theta, self.base.prepare(split(theta, "base")))

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        return with_base(theta, self.base.upgrade)

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return with_base(theta, self.base.project)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return with_base(gradient, self.base.project_gradient)

    def penalty(self, theta: Theta) -> Tensor | None:
        return self.base.penalty(split(theta, "base"))

    def check(self, shape: Sequence[int]) -> str | None:
        return self.base.check(shape)

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return self.base.analyse(of_base(theta), x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return self.base.synthesise(of_base(theta), t, shape)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.base.analysis_norm(of_base(theta), shape)

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor | None:
        return self.base.symbol(of_base(theta), curvature, shape)


class Prepared(dict[str, Tensor]):
    """θ with the prepared parameters of the base."""

    def __init__(self, theta: Theta, base: Theta) -> None:
        super().__init__(theta)
        self.base = base


@dataclass(frozen=True)
class WrappedHessian:
    """v ↦ Cᵀ[d ⊙ C v], with the curvature d stored, where C is the same for all samples."""

    regularizer: WrappedRegularizer
    theta: Theta
    shape: tuple[int, ...]
    curvature: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        t = self.regularizer.analyse(self.theta, v)
        return self.regularizer.synthesise(self.theta, t.mul_(self.curvature), self.shape)

    def take(self, index: Tensor) -> WrappedHessian:
        return WrappedHessian(self.regularizer, self.theta, self.shape, self.curvature[index])


def of_base(theta: Theta) -> Theta:
    return theta.base if isinstance(theta, Prepared) else split(theta, "base")


def with_base(theta: Theta, change: Callable[[Theta], Theta]) -> dict[str, Tensor]:
    """θ with the parameters of the base changed."""
    own = {name: value for name, value in theta.items() if not name.startswith("base.")}
    return own | join(base=change(split(theta, "base")))
