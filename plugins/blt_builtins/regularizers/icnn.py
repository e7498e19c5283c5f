"""Input-convex neural network: a regularizer as general as convexity allows.

    z_1 = s(V_0 ⋆ x + b_0),   z_{k+1} = s(W_k ⋆ z_k + V_k ⋆ x + b_k),   R_θ(x) = e^{θ_0} Σ_p Σ_c (z_K)_{c,p} +
    (ρ/2)‖x‖²

Here s(t) = log(1 + e^{βt})/β is a smooth ramp of sharpness β. The network is convex in x since s is convex and
increasing and W_k = e^{θ} is positive; V_k has zero mean in each channel, since a regularizer should not depend on
brightness (and a plain gradient step would see little else), and b_k is free. The image is mirrored at its border once,
by the receptive field of all layers, so z_K is as large as the image. Sums over pixels, not means, make a weight
independent of the size of images.

Initially, V_0 contains finite differences in pairs of opposite signs, and s(t) + s(−t) is a smoothed absolute value:
training starts near a `foe`, with gradients of similar size.

Only the energy is implemented; gradient, Hessian products and mixed derivatives come from autograd. No Lipschitz
constant is known (products of layer norms are far too large), so `agd` uses backtracking. With ρ > 0, accuracies
are certified for every operator.

When to choose it: if filters and potentials (`foe`, `crr`) are not expressive enough and the cost of a network is
acceptable.

References: Amos, Xu & Kolter, *Input convex neural networks*, ICML 2017; Mukherjee, Dittmer, Shumaylov, Lunz, Öktem &
Schönlieb, *Learned convex regularizers for inverse problems*, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.filters import extend, unit_norm, zero_mean
from blt_builtins.regularizers.foe import difference_kernels
from bltoolbox.plugin import Regularizer, Theta


class InputConvexNetwork(Regularizer):
    """A convolutional network that is convex in its input.

    Args:
        layers: number of layers.
        filters: channels of each layer; even, since they start in pairs.
        kernel_size: side of the square kernels of all layers; odd.
        sharpness: β of the activation.
        weight: initial weight e^{θ_0}.
        ridge: ρ, a fixed strong convexity.
    """

    def __init__(
        self,
        layers: Annotated[int, Gt(0)] = 2,
        filters: Annotated[int, Gt(0), Le(4096)] = 20,
        kernel_size: Annotated[int, Ge(3), Le(63)] = 5,
        sharpness: Annotated[float, Gt(0)] = 50.0,
        weight: Annotated[float, Gt(0)] = 0.04,
        ridge: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        if filters % 2:
            raise ValueError(f"filters {filters} is odd; use an even number, since filters start in pairs")
        if kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size {kernel_size} is even; use an odd number, so that kernels have a centre"
            )
        self.layers = layers
        self.filters = filters
        self.kernel_size = kernel_size
        self.sharpness = sharpness
        self.weight = weight
        self.ridge = ridge

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        def normal(*sides: int) -> Tensor:
            return torch.randn(sides, dtype=torch.float64, generator=generator)

        size, area = self.kernel_size, self.kernel_size**2
        pairs = unit_norm(difference_kernels(self.filters // 2, shape[0], size))
        theta = {
            "skip_0": torch.cat([pairs, -pairs]),
            "bias_0": torch.zeros(self.filters, dtype=torch.float64),
            "log_scale": torch.full((1,), math.log(self.weight), dtype=torch.float64),
        }
        # Rows of W_k sum to about 1, so depth does not change the scale; noise distinguishes the channels.
        mean = -math.log(self.filters * area)
        for k in range(1, self.layers):
            theta[f"log_weights_{k}"] = mean + 0.5 * normal(self.filters, self.filters, size, size)
            skip = normal(self.filters, shape[0], size, size) / (10 * size)
            theta[f"skip_{k}"] = zero_mean(skip)
            theta[f"bias_{k}"] = torch.zeros(self.filters, dtype=torch.float64)
        return theta

    def check(self, shape: Sequence[int]) -> str | None:
        field = self._field()
        if min(shape[1:]) < field:
            return (
                f"{self.layers} layers of {self.kernel_size}×{self.kernel_size} kernels see {field}×{field} pixels,"
                f" more than the {shape[1]}×{shape[2]} images have; use fewer layers, smaller kernels or larger images"
            )
        return None

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        seen = extend(x, self._field(), "symmetric")
        z = self._ramp(F.conv2d(seen, theta["skip_0"], theta["bias_0"]))
        for k in range(1, self.layers):
            border = k * (self.kernel_size // 2)
            inner = seen[:, :, border:-border, border:-border]
            skip = F.conv2d(inner, theta[f"skip_{k}"], theta[f"bias_{k}"])
            z = self._ramp(F.conv2d(z, theta[f"log_weights_{k}"].exp()) + skip)
        energy = theta["log_scale"].exp() * z.sum((1, 2, 3))
        return energy + 0.5 * self.ridge * x.square().sum((1, 2, 3))

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return self.project_gradient(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        """Keep the mean of V_k at zero in each channel: a regularizer should not depend on brightness."""
        return {
            name: zero_mean(entry) if name.startswith("skip_") else entry for name, entry in gradient.items()
        }

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> float:
        return self.ridge

    def _field(self) -> int:
        """Side of the receptive field of an entry of z_K."""
        return self.layers * (self.kernel_size - 1) + 1

    def _ramp(self, t: Tensor) -> Tensor:
        # Beyond the threshold torch returns t itself: 40 is below the precision of float64, the default 20 is not.
        return F.softplus(t, beta=self.sharpness, threshold=40)
