"""A regularizer at another noise level.

    R_s(x) = s² R(x/s),        s = σ/σ_0

carries what was learned at noise σ_0 to noise σ: the minimiser scales along, x̂_s(s·y) = s·x̂(y), for every linear
operator. (Of a Field of Experts a → s·a and ν → s·ν.) This works for any regularizer: each derivative in x costs a
factor 1/s, so ∇R_s(x) = s ∇R(x/s) and ∇²R_s(x) = ∇²R(x/s); bounds of the curvature stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bltoolbox.bilevel.records import Bound, Constants, Rows, Theta
from bltoolbox.restoration.roles import Potentials, Regularizer


class Rescaled(Regularizer):
    """s² R(x/s), with everything that R offers.

    Args:
        base: R.
        scale: s, above 0.
    """

    def __init__(self, base: Regularizer, scale: float) -> None:
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale {scale:g} is not a positive number")
        self.base = base
        self.scale = scale
        self.convex = base.convex  # type: ignore[misc]
        self.smooth = base.smooth  # type: ignore[misc]
        self.uniform = base.uniform
        self.cheap = base.cheap
        self.undo = base.undo

    def offers(self, method: str) -> bool:
        return self.base.offers(method)

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return self.base.init_params(shape, generator)

    def standard_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return self.base.standard_params(shape, generator)

    def prepare(self, theta: Theta) -> Theta:
        return self.base.prepare(theta)

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        return self.base.upgrade(theta)

    def check(self, shape: Sequence[int]) -> str | None:
        return self.base.check(shape)

    def guide(self, theta: Theta, start: Tensor) -> Rows:
        return self.base.guide(theta, start / self.scale)

    def select(self, theta: Theta, guide: Rows) -> Theta:
        return self.base.select(theta, guide)

    def at_noise(self, level: float) -> Regularizer:
        return Rescaled(self.base.at_noise(level / self.scale), self.scale)

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self.scale**2 * self.base.energy(theta, x / self.scale)

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        return self.scale**2 * self.base.density(theta, x / self.scale)

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        return self.scale * self.base.gradient(theta, x / self.scale)

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        return self.base.linearize(theta, x / self.scale)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        return self.scale * self.base.pairing(theta, x / self.scale, q)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        parts = self.base.pairing_gradients(theta, x / self.scale, q)
        return {name: self.scale * gradient for name, gradient in parts.items()}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.base.lipschitz(theta, shape)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.base.strong_convexity(theta, shape)

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        constants = self.base.constants(theta, x / self.scale, radius / self.scale)
        return Constants(
            hessian_lipschitz=constants.hessian_lipschitz / self.scale,
            mixed_lipschitz=constants.mixed_lipschitz,
            mixed_norm=constants.mixed_norm * self.scale,
        )

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self.base.project(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return self.base.project_gradient(gradient)

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return self.base.analyse(theta, x)

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return self.base.synthesise(theta, t, shape)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        # ψ_s(t) = s² ψ(t/s), so that ψ_s'(t)/t is ψ'(t/s)/(t/s).
        return self.base.majorant(theta, t / self.scale)

    def pointwise_majorant(self, theta: Theta) -> Callable[[Tensor], Tensor] | None:
        majorant = self.base.pointwise_majorant(theta)
        return None if majorant is None else lambda t: majorant(t / self.scale)

    def offset(self, theta: Theta) -> Tensor | None:
        offset = self.base.offset(theta)
        return None if offset is None else self.scale * offset

    def potential(self, theta: Theta, t: Tensor) -> Tensor:
        return self.scale**2 * self.base.potential(theta, t / self.scale)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.base.analysis_norm(theta, shape)

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        return self.scale**2 * self.base.potential_sum(theta, t / self.scale)

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        # sup_t pt − s² ψ(t/s) is s² times the same of ψ at p/s.
        return self.scale**2 * self.base.conjugate(theta, p / self.scale)

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        # u = s·v turns ½(u − t)² + step·s² ψ(u/s) into s² times the same for v and t/s.
        return self.scale * self.base.prox_potential(theta, t / self.scale, step)

    def prox_conjugate(self, theta: Theta, p: Tensor, step: Tensor | float) -> Tensor:
        return self.scale * self.base.prox_conjugate(theta, p / self.scale, step)

    def symbol(self, theta: Theta, curvature: Tensor, shape: Sequence[int]) -> Tensor | None:
        return self.base.symbol(theta, curvature, shape)

    def extra_channels(self, channels: int) -> int:
        return self.base.extra_channels(channels)

    def penalty(self, theta: Theta) -> Tensor | None:
        return self.base.penalty(theta)

    def pictures(self, theta: Theta) -> Tensor | None:
        return self.base.pictures(theta)

    def potentials(self, theta: Theta) -> Potentials | None:
        potentials = self.base.potentials(theta)
        if potentials is None:
            return None
        return Potentials(self.scale * potentials.t, self.scale**2 * potentials.values, potentials.weights)
