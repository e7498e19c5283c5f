"""A reference solver of the lower level: slow, robust, and independent of every plugin.

It uses only energies. Gradients come from autograd through ``energy`` and ``apply``, not from the methods that a
regularizer may implement itself, and no component supplies a Lipschitz constant. The method is accelerated projected
gradient descent with a backtracked step for each sample, restarted whenever the momentum points uphill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bltoolbox.bilevel.derivatives import gradients_of
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.tensors import dot, expand, norm


def energy_gradient(lower: Lower, x: Tensor) -> Tensor:
    """∇h by autograd through the energy alone."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(lower.energy(x).sum(), x)[0]


def true_residual(lower: Lower, x: Tensor, gradient: Tensor | None = None) -> Tensor:
    """Norm of the shortest element of ∇h + N_C, with the gradient of the energy."""
    return lower.residual(x, energy_gradient(lower, x) if gradient is None else gradient)


@torch.no_grad()
def reference_solve(lower: Lower, start: Tensor, tol: float, limit: int = 20_000) -> Tensor:
    """x̂ to a gradient norm of ``tol`` in float64, or as far as ``limit`` iterations and rounding allow."""
    x = point = lower.project(start.double())
    gradient = energy_gradient(lower, x)
    lipschitz, t = torch.ones_like(lower.mu), torch.ones_like(lower.mu)
    best, best_residual, idle = x, true_residual(lower, x, gradient), 0
    for iteration in range(limit):
        if bool((best_residual <= tol).all()) or idle > 500:
            break
        # The curvature is measured often in the beginning, and occasionally later.
        new = lower.project(x - gradient / expand(lipschitz, x))
        if iteration < 20 or iteration % 10 == 0:
            new, lipschitz = _descend(lower, x, gradient, lipschitz)
        move = new - point
        uphill = dot(gradient, move) > 0
        t_old = torch.where(uphill, 1.0, t)
        t = (1 + (1 + 4 * t_old.square()).sqrt()) / 2
        beta = torch.where(uphill, 0.0, (t_old - 1) / t)
        point, x = new, lower.project(new + expand(beta, move) * move)
        gradient = energy_gradient(lower, x)
        residual = true_residual(lower, x, gradient)
        better = residual < best_residual
        idle = 0 if bool((residual < 0.99 * best_residual).any()) else idle + 1
        best = torch.where(expand(better, x), x, best)
        best_residual = torch.where(better, residual, best_residual)
    return best


def _descend(lower: Lower, x: Tensor, gradient: Tensor, lipschitz: Tensor) -> tuple[Tensor, Tensor]:
    """P_C(x − ∇h/L), with L doubled until the curvature along the step is at most L."""
    for _ in range(60):
        new = lower.project(x - gradient / expand(lipschitz, x))
        step = new - x
        rise = dot(energy_gradient(lower, new) - gradient, step)
        # The curvature of a step below rounding cannot be measured.
        far = norm(step) > 1e-13 * (1 + norm(x))
        short = far & (rise > (1 + 1e-4) * lipschitz * dot(step, step))
        if not bool(short.any()):
            break
        lipschitz = torch.where(short, 2 * lipschitz, lipschitz)
    return new, lipschitz


def reference_hypergradient(lower: Lower, upper: Upper, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Σ_i w_i ∇f_i at minimisers x, by implicit differentiation of the energy with dense Hessians; for small x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        gradient = torch.autograd.grad(lower.energy(x).sum(), x, create_graph=True)[0]
    units = torch.eye(x[0].numel(), dtype=x.dtype).view(-1, 1, *x.shape[1:])
    columns = [
        torch.autograd.grad(gradient, x, unit.expand_as(x), retain_graph=True)[0].flatten(1) for unit in units
    ]
    right = upper.gradient(x.detach()).flatten(1)
    q = torch.linalg.solve(torch.stack(columns, 2), right.unsqueeze(-1)).view_as(x)
    leaves = {name: value.detach().requires_grad_() for name, value in lower.theta.items()}
    with torch.enable_grad():
        slope = torch.autograd.grad(lower.at_theta(leaves).energy(x).sum(), x, create_graph=True)[0]
        total = (weights * dot(slope, q)).sum()
    z = {name: -entry for name, entry in gradients_of(total, leaves).items()}
    for name, entry in upper.theta_gradient(x.detach(), weights).items():
        z[name] = z[name] + entry
    return z
