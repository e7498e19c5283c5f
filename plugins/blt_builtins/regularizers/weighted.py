"""Another regularizer with a learned weight at every pixel of the image.

    R_θ(x) = Σ_p e^{w_p} r_p(x),        Σ_p r_p = the base regularizer, e.g. r_p = e^{θ_0}(√(|Dx|_p² + ν²) − ν) of `tv`
    P(w) = γ Σ |∇w|²                    differences of neighbouring entries of the map

w is a map of the rows and columns of the image, shared by all samples. With `grid` it has that many entries each way
and is interpolated bilinearly, so that it fits images of any size; without, it has an entry for each pixel of the
training images, and fits images of their size only. The parameters of the base are learned, too; its own weight and
the mean of w have the same effect.

For r_p = ψ(t_p), t = Cx, with convex ψ, gradient and Hessian products cost as much as those of the base, and from
e^{min w} r ⪯ R ⪯ e^{max w} r follow the bounds: L is that of the base times max e^w, strong convexity that of the base
times min e^w. Error bounds of hypergradients are estimated.

When to choose it: where the right amount of regularization depends on the position in the same way in all images:
organs in registered scans, the border of a field of view, sensitivities that decay. For noise of varying strength
choose `weight-map`, a data term with a map. For a weight per class of images use `least-squares` with `classes`: e^θ D
+ R has the minimiser of D + e^{−θ} R.

References: Hintermüller & Rautenberg, *Optimal selection of the regularization function in a weighted total variation
model*, JMIV 2017; Kofler, Altekrüger, Ba et al., *Learning regularization parameter-maps for variational image
reconstruction*, SIAM J. Imaging Sci. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from blt_builtins.regularizers.wrapped import WrappedRegularizer, of_base
from blt_builtins.weight_maps import extremes, flat_map, roughness, weights_at
from bltoolbox.plugin import Bound, Regularizer, Theta

#: What the base must provide.
_NEEDED = ("density", "analyse", "synthesise", "majorant")


class Weighted(WrappedRegularizer):
    """A regularizer with a learned map of weights.

    Args:
        base: the regularizer to be weighted, convex and with an energy at each place, such as tv or foe.
        grid: rows and columns of the map, or null for one weight per pixel of the training images.
        smoothness: γ, the penalty on differences of neighbouring entries of the map.
    """

    uniform = False
    caption = "Weights of the regularizer, by place"

    def __init__(
        self,
        base: Regularizer,
        grid: Annotated[int, Ge(1)] | None = 8,
        smoothness: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        missing = [method for method in _NEEDED if not base.offers(method)]
        if missing or not base.convex:
            trouble = f"has no {missing[0]}" if missing else "is not convex"
            raise ValueError(
                f"{type(base).__name__} cannot be weighted, it {trouble}; use tv, foe or tikhonov"
            )
        super().__init__(base)
        self.grid = grid
        self.smoothness = smoothness

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {
            "base": {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.1},
            "grid": 3,
            "smoothness": 0.5,
        }

    def own_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_map": flat_map(shape, self.grid)}

    def penalty(self, theta: Theta) -> Tensor | None:
        own = self.smoothness * roughness(theta["log_map"]) if self.smoothness else None
        others = super().penalty(theta)
        return own if others is None else others if own is None else own + others

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self.density(theta, x).sum((1, 2))

    def density(self, theta: Theta, x: Tensor) -> Tensor:
        density = self.base.density(of_base(theta), x)
        return weights_at(theta["log_map"], density.shape[1:]) * density

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return self.synthesise(theta, self.majorant(theta, t) * t, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        with torch.enable_grad():
            t = self.analyse(theta, x).detach().requires_grad_()
            slope = self.majorant(theta, t) * t

        def hvp(v: Tensor) -> Tensor:
            # The second derivative of the potentials is symmetric, so a product with it is a backward pass.
            t_v = self.analyse(theta, v)
            return self.synthesise(
                theta, torch.autograd.grad(slope, t, t_v, retain_graph=True)[0], v.shape[1:]
            )

        return hvp

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return (self.majorant(theta, t) * t * self.analyse(theta, q)).flatten(1).sum(1)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        bound = self.base.lipschitz(of_base(theta), shape)
        return None if bound is None else extremes(theta["log_map"])[1] * bound

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Bound:
        bound = self.base.strong_convexity(of_base(theta), shape)
        return None if bound is None else extremes(theta["log_map"])[0] * bound

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return weights_at(theta["log_map"], t.shape[-2:]) * self.base.majorant(of_base(theta), t)

    def pictures(self, theta: Theta) -> Tensor:
        return theta["log_map"].exp()[None, None]
