"""Derivatives of lower levels: Hessian products at one x, and derivatives in θ by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Theta

if TYPE_CHECKING:
    from bltoolbox.bilevel.preconditioner import Preconditioner
    from bltoolbox.bilevel.problem import Lower


@dataclass(frozen=True)
class Linearization:
    """v ↦ ∇²h(x) v.

    On a constraint set it is P∇²h P + (1 − P), P the free entries, which is as definite and has the same solution.
    """

    lower: Lower
    x: Tensor
    product: Callable[[Tensor], Tensor]
    free: Tensor | None = None

    def hvp(self, v: Tensor) -> Tensor:
        self.lower.counter.hessian_products += len(v)
        if self.free is None:
            return self.product(v)
        inside = v * self.free
        return self.product(inside) * self.free + (v - inside)

    def take(self, index: Tensor) -> Linearization:
        """The same for some of the tasks; reuses earlier computations if the product can be split."""
        lower, x = self.lower.take(index), self.x[index]
        divide = getattr(self.product, "take", None)
        product = None if divide is None else divide(index)
        if product is None:
            return lower.linearize(x)
        return Linearization(lower, x, product, None if self.free is None else self.free[index])

    def preconditioner(self, always: bool = False) -> Preconditioner | None:
        """P ≈ ∇²h(x), easily inverted; None if the product offers none, on a constraint set and, unless ``always``,
        where it would hardly pay. May wait for the device."""
        make = getattr(self.product, "preconditioner", None)
        return None if make is None or self.free is not None else make(always)


@dataclass(frozen=True)
class Retained:
    """Hessian products by a second backward pass through a retained graph."""

    gradient: Tensor
    x: Tensor

    @classmethod
    def of(cls, value: Callable[[Tensor], Tensor], x: Tensor) -> Retained:
        """For a scalar function at x."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            total = value(x)
            gradient = (
                torch.autograd.grad(total, x, create_graph=True)[0] if total.requires_grad else x.detach()
            )
        return cls(gradient, x)

    def __call__(self, v: Tensor) -> Tensor:
        if not self.gradient.requires_grad:
            return torch.zeros_like(v)
        return torch.autograd.grad(self.gradient, self.x, v, retain_graph=True)[0]


def leaves_of(theta: Theta) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in theta.items()}


def gradients_of(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The derivative of a scalar in each leaf; zero for leaves it does not depend on."""
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), parts, strict=True)
    }


def rows_of(pairing: Callable[[dict[str, Tensor]], Iterable[Tensor]], theta: Theta) -> dict[str, Tensor]:
    """The derivative in θ of every entry of ``pairing(θ)``, one backward pass each; differentiable in the rest."""
    with torch.enable_grad():
        leaves = leaves_of(theta)
        rows: list[Sequence[Any]] = [
            torch.autograd.grad(
                value, list(leaves.values()), create_graph=True, retain_graph=True, allow_unused=True
            )
            for value in pairing(leaves)
        ]
    return {
        name: torch.stack([torch.zeros_like(leaf) if row[k] is None else row[k] for row in rows])
        for k, (name, leaf) in enumerate(leaves.items())
    }
