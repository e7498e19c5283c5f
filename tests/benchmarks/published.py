"""The baseline of the speed measurements: bilevel learning written the way published code does it.

Plain autograd for every gradient, ``torch.autograd.functional.vhp`` for Hessian products, FISTA with t_k momentum and a
step of 1/L, conjugate gradients, one double backward a parameter; contiguous tensors. A batch goes on until its last
sample meets the tolerance. The model is the toolbox's own: a Field of Experts with mirrored borders and kernels in
pixels, so that results can be compared to the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Theta = Mapping[str, Tensor]


def mirrored(x: Tensor, before: int, after: int) -> Tensor:
    """The image with its border mirrored."""
    x = torch.cat([x[:, :, :before].flip(2), x, x[:, :, -after:].flip(2)], 2)
    return torch.cat([x[..., :before].flip(3), x, x[..., -after:].flip(3)], 3)


def norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1)


def dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def per_sample(scalars: Tensor) -> Tensor:
    return scalars.view(-1, 1, 1, 1)


@dataclass(frozen=True)
class Published:
    """h(x) = ½‖x − y‖² + R_θ(x), summed over the batch."""

    y: Tensor
    theta: Theta

    def energy(self, x: Tensor, theta: Theta | None = None) -> Tensor:
        theta = self.theta if theta is None else theta
        size = theta["kernels"].shape[-1]
        t = F.conv2d(mirrored(x, (size - 1) // 2, size // 2), theta["kernels"])
        nu = theta["log_smoothing"].exp()
        weights = (theta["log_scale"] + theta["log_weights"]).exp()
        potential = ((t**2 + nu**2).sqrt() - nu).sum((0, 2, 3))
        return 0.5 * ((x - self.y) ** 2).sum() + (weights * potential).sum()

    def gradient(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x), x)[0]

    def hvp(self, x: Tensor, v: Tensor) -> Tensor:
        return torch.autograd.functional.vhp(self.energy, x, v)[1]

    def fista(self, x: Tensor, lipschitz: float, tol: float, limit: int = 5000) -> Tensor:
        """To ‖∇h‖ ≤ tol of every sample."""
        point, t = x, 1.0
        for _ in range(limit):
            gradient = self.gradient(x)
            if bool((norms(gradient) <= tol).all()):
                break
            moved = x - gradient / lipschitz
            t_next = (1 + (1 + 4 * t**2) ** 0.5) / 2
            x, point, t = moved + (t - 1) / t_next * (moved - point), moved, t_next
        return x

    def conjugate_gradients(self, x: Tensor, rhs: Tensor, q: Tensor, tol: float, limit: int = 500) -> Tensor:
        """∇²h(x) q = rhs to a residual of tol for every sample."""
        r = rhs - self.hvp(x, q)
        p, rr = r, dots(r, r)
        for _ in range(limit):
            if bool((rr.sqrt() <= tol).all()):
                break
            product = self.hvp(x, p)
            alpha = rr / dots(p, product).clamp_min(1e-30)
            q, r = q + per_sample(alpha) * p, r - per_sample(alpha) * product
            rr, old = dots(r, r), rr
            p = r + per_sample(rr / old.clamp_min(1e-30)) * p
        return q

    def mixed(self, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """−∂_θ⟨∇h(x, θ), q⟩, parameter by parameter."""
        found = {}
        for name in self.theta:
            leaf = self.theta[name].detach().requires_grad_()
            at = x.detach().requires_grad_()
            theta = {**self.theta, name: leaf}
            gradient = torch.autograd.grad(self.energy(at, theta), at, create_graph=True)[0]
            found[name] = -torch.autograd.grad((gradient * q).sum(), leaf)[0]
        return found

    def hypergradient(
        self, x_true: Tensor, x: Tensor, q: Tensor, lipschitz: float, tol: float
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """z of the mean loss, with x̃ and the adjoint for the next time."""
        x = self.fista(x, lipschitz, tol)
        q = self.conjugate_gradients(x, 2 * (x - x_true), q, tol)
        mixed = self.mixed(x, q)
        return {name: part / len(x) for name, part in mixed.items()}, x, q
