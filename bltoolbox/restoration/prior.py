"""A trained regularizer by itself, as a module for other code: its energy, its gradient and its proximal map.

    R_θ(x),        ∇R_θ(x),        prox_{sR}(x) = argmin_u ½‖u − x‖² + s R_θ(u)

The proximal map has no closed form; it is solved to a tolerance, from x, as a denoising problem whose data term has the
weight 1/s. It is differentiable in x and θ by implicit differentiation, and in s through

    ∂u/∂s = (∂u/∂x) (u − x)/s,        since u + s∇R(u) = x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bltoolbox.bilevel.implicit import Implicit, minimiser
from bltoolbox.bilevel.records import Rows, Theta
from bltoolbox.bilevel.tensors import dot, expand, full_precision, ordinary
from bltoolbox.errors import BltError
from bltoolbox.restoration.layer import Parameters
from bltoolbox.restoration.layout import image_layout
from bltoolbox.restoration.measurements import as_batch, bind
from bltoolbox.restoration.roles import DataTerm, Operator, Regularizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.restoration.variational import Variational


class Prior(Parameters):
    """R_θ of a model; the parameters of the module are those of its regularizer, under their own names.

    Images are tensors (B, C, H, W) or (C, H, W), of the precision and on the device of the parameters.
    """

    def __init__(self, problem: Variational, method: Implicit, theta: Theta) -> None:
        super().__init__(split(theta, "regularizer"))
        self.problem = replace(
            problem, operator=_Identity(), data_term=_Nearness(), constraint="none", strong_convexity=0.0
        )
        self.method = method

    @property
    def regularizer(self) -> Regularizer:
        return self.problem.regularizer

    def forward(self, x: Tensor) -> Tensor:
        """The energy."""
        return self.energy(x)

    def energy(self, x: Tensor) -> Tensor:
        """R_θ of each image, shape (B,), or one number for a single image; differentiable."""
        self._require_energy(x)
        batch = image_layout(as_batch(x))
        energy = self.regularizer.energy(self.regularizer.prepare(self.theta), batch)
        return energy[0] if x.ndim == 3 else energy

    def gradient(self, x: Tensor) -> Tensor:
        """∇R_θ(x); differentiable in x and θ where they require gradients."""
        self._require_energy(x)
        batch, theta = image_layout(as_batch(x)), self.theta
        recorded = batch.requires_grad or any(value.requires_grad for value in theta.values())
        if not (torch.is_grad_enabled() and recorded):
            with full_precision(batch):
                batch = ordinary(batch.detach())
                slope = self.regularizer.gradient(self.regularizer.prepare(theta), batch)
        else:
            at = batch if batch.requires_grad else batch.detach().requires_grad_()
            energy = self.regularizer.energy(self.regularizer.prepare(theta), at).sum()
            slope = torch.autograd.grad(energy, at, create_graph=True)[0]
        return slope[0] if x.ndim == 3 else slope

    def prox(self, x: Tensor, step: float | Tensor = 1.0, *, tol: float | None = None) -> Tensor:
        """argmin_u ½‖u − x‖² + step·R_θ(u), to a distance of ``tol``; one step for all images or one for each.

        Differentiable in x, θ and the step.
        """
        theta = join(regularizer=self.theta)
        batch = as_batch(ordinary(x)).to(next(iter(theta.values()), x))
        steps = torch.as_tensor(step, dtype=batch.dtype, device=batch.device).expand(len(batch))
        if not bool((steps > 0).all()):
            raise BltError(f"a proximal map needs steps greater than 0, not {float(steps.min()):g}")
        method = self.method if tol is None else replace(self.method, tol=tol)
        with full_precision(batch):
            values = {name: value.detach() for name, value in theta.items()}
            at = image_layout(batch.detach())
            lower = bind(self.problem, values, at, {"step": steps.detach()})
        start = None
        if torch.is_grad_enabled() and steps.requires_grad:
            with torch.no_grad():
                start = minimiser(method, lower, {}, {})
                pull = expand(1 / steps, at) * (lower.view(start) - at)
            batch = batch + expand(steps - steps.detach(), at) * pull
        u = lower.view(minimiser(method, lower, theta, {"y": batch}, start))
        return (u[0] if x.ndim == 3 else u).to(x.device, x.dtype)

    def deepinv(self) -> Any:
        """A ``deepinv.optim.Prior`` with this energy, gradient and proximal map; needs the extra ``deepinv``."""
        from bltoolbox.restoration.for_deepinv import prior_of

        return prior_of(self)

    def _require_energy(self, x: Tensor) -> None:
        name = type(self.regularizer).__name__
        if self.regularizer.extra_channels(x.shape[-3]):
            raise BltError(
                f"the energy of {name} is a minimum over auxiliary variables, which has no formula; use prox"
            )
        if self.regularizer.offers("guide"):
            raise BltError(
                f"the energy of {name} depends on the measurements, too; use prox, which reads them off x"
            )


class _Identity(Operator):
    """A u = u."""

    identity = True

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return x

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return y

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        return 1.0, 1.0


class _Nearness(DataTerm):
    """D(u; x) = ‖u − x‖²/(2s), with the step s of each image from its context."""

    quadratic: ClassVar[bool] = True

    def select(self, theta: Theta, context: Rows) -> Theta:
        return {"weight": 1 / context["step"]}

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * theta["weight"] * dot(t - y, t - y)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return expand(theta["weight"], t) * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return expand(theta["weight"], t).expand(t.shape)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
        return theta["weight"], theta["weight"]

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.curvature(theta, t, y)

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        weight = step * expand(theta["weight"], t)
        return (t + weight * y) / (1 + weight)
