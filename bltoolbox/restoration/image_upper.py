"""The loss of the variational problem, bound to A_θ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bltoolbox.bilevel.derivatives import gradients_of
from bltoolbox.bilevel.records import Bound
from bltoolbox.bilevel.wrapped_loss import WrappedLoss
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.roles import Sample
from bltoolbox.restoration.theta import join, split


@dataclass(frozen=True)
class BoundOperator:
    """A_θ of the samples of a lower level: the ``Forward`` of a loss."""

    lower: ImageLower

    def __call__(self, x: Tensor) -> Tensor:
        return self.lower.forward(x)

    def adjoint(self, t: Tensor) -> Tensor:
        return self.lower.view(self.lower.backward(t))

    @property
    def squared_norm(self) -> Bound:
        return self.lower.at.spectrum(self.lower.context)[1]

    def take(self, index: Tensor) -> BoundOperator:
        return BoundOperator(self.lower.take(index))


@dataclass(frozen=True)
class LearnedForward(WrappedLoss):
    """The loss where the operator has parameters: one that compares A_θ x with measurements depends on θ, too."""

    sample: Sample
    lower: ImageLower

    def value(self, x: Tensor) -> Tensor:
        return self.upper.value(x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.upper.gradient(x)

    def theta_gradient(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Through A_θ, by autograd, and what the loss adds itself."""
        own = self.upper.theta_gradient(x, weights)
        names = join(operator=split(self.lower.theta, "operator"))
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in names.items()}
            forward = BoundOperator(self.lower.at_theta({**self.lower.theta, **leaves}))
            bound = self.lower.problem.upper_loss.bind(self.sample, forward)
            total = (weights * bound.value(x.detach())).sum()
        through = gradients_of(total, leaves)
        return own | {
            name: gradient + own[name] if name in own else gradient for name, gradient in through.items()
        }

    def take(self, index: Tensor) -> LearnedForward:
        return LearnedForward(
            self.upper.take(index), _rows_of_sample(self.sample, index), self.lower.take(index)
        )


def _rows_of_sample(sample: Sample, index: Tensor) -> Sample:
    truth, target = (None if batch is None else batch[index] for batch in (sample.truth, sample.target))
    return replace(
        sample,
        ids=[sample.ids[i] for i in index.tolist()],
        y=sample.y[index],
        truth=truth,
        target=target,
        context={name: rows[index] for name, rows in sample.context.items()},
    )
