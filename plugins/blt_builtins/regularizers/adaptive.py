"""Another regularizer that adapts to each image: a small network reads weights and a guess off the measurements.

    R_θ(x; y) = Σ_j Σ_p w_jp ψ_j(t_jp),     t = C(x − v),   Σ_j Σ_p ψ_j((Cx)_jp) = the base, e.g. `foe`
    (w, v) = (s(N'), N''/10),               N = N_θ(u),  s(r) = 1/(1 + e^{−r}),  u = y, or A⁻¹y but for noise

Every response of every filter has a weight of its own between 0 and 1: small where nothing is known about it, large
where it should be zero. And what is regularized is the difference to v, a guess of what varies in the image, which is 0
before training. N is a convolutional network on half of the rows and columns of u, which is y in denoising,

    h_0 = σ(V_0 ⋆ u + b_0),   h_k = h_{k−1} + σ(V_k ⋆ h_{k−1} + b_k),   N = V_L ⋆ h_{L−1} + b_L,   σ(r) = r s(r)

V_0 has stride 2 and zero mean in each channel, since brightness should not matter; the last layer is pointwise and has
the values of four neighbouring pixels. With ``coarse`` layers, h_0 has more added to it that is computed on a quarter
of rows and columns with twice as many features, d_0 = σ(D ⋆ h_0 + b), d_k as h_k, U d: layers there cost as much and
see twice as far. All parameters are learned together with those of the base: y is fixed while x is solved for, so the
hypergradient of the network is one backward pass through it.

For given y nothing is lost: R is a sum of the same potentials, shifted, with weights of at most 1. It is convex if the
base is, bounds of its curvature hold, and so do the certificates of the lower level, of `foe` as well as of `wcfoe`:
the minimiser is unique, and the distance to it is known. Nothing is promised about the map from y to x̂, which need not
be nonexpansive, since w and v change with y, too.

The parameters of the network are stored in units of half their initial standard deviation, so that steps that suit the
base suit them. At another noise level (``--noise``) the network sees u/s, see ``Rescaled``.

When to choose it: the most accurate regularizer here for images that are measured at every pixel, as in denoising and
deblurring; an evaluation of the network costs as much as a few iterations.

References: Kofler, Altekrüger, Ba et al., *Learning regularization parameter-maps for variational image reconstruction
using deep neural networks and algorithm unrolling*, SIAM J. Imaging Sci. 2023; Neumayer & Altekrüger, *Stability of
data-dependent ridge-regularization for inverse problems*, 2024; Pourya, Kobler, Unser & Neumayer, *DEALing with image
reconstruction: deep attentive least squares*, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.regularizers.filters import extend, zero_mean
from blt_builtins.regularizers.wrapped import Prepared, WrappedHessian, WrappedRegularizer, of_base
from bltoolbox.plugin import Bound, Potentials, Regularizer, Rows, Theta, image_layout

#: Sides of the kernels of the first layer, even, since it looks at pairs of rows and columns, and of the next ones.
_FIRST, _NEXT = 6, 3
#: What the first layer multiplies differences of pixels by: noise of the usual level becomes about 1.
_GAIN = 10.0
#: Initial weights are s(1) = 0.73.
_INITIAL = 1.0
#: The unit of the parameters of the network, in initial standard deviations.
_UNIT = 0.5
#: What the base must provide; its Hessian products must have their curvature as an attribute, too.
_NEEDED = ("analyse", "synthesise", "majorant", "potential")


class Adaptive(WrappedRegularizer):
    """A regularizer with weights and a guess that a network reads off the measurements.

    Args:
        base: the regularizer that is weighted: foe or wcfoe.
        features: channels of the network.
        layers: residual layers of 3×3 between the first and the last.
        coarse: residual layers of 3×3 on a quarter of rows and columns, before those.
        undo: what the network sees where cosines diagonalise the operator: λ of (AᵀA + λ∇ᵀ∇)⁻¹Aᵀy, the measurements
            with the operator undone; null is the start of a cold solve. In denoising both are y.
    """

    def __init__(
        self,
        base: Regularizer,
        features: Annotated[int, Gt(0), Le(512)] = 48,
        layers: Annotated[int, Ge(0), Le(32)] = 5,
        coarse: Annotated[int, Ge(0), Le(32)] = 0,
        undo: Annotated[float, Gt(0)] | None = 0.02,
    ) -> None:
        missing = [method for method in _NEEDED if not base.offers(method)]
        if missing or base.offers("guide"):
            trouble = f"has no {missing[0]}" if missing else "adapts to images by itself"
            raise ValueError(f"{type(base).__name__} cannot be weighted, it {trouble}; use foe or wcfoe")
        super().__init__(base)
        self.convex = base.convex  # type: ignore[misc]
        self.uniform = base.uniform
        self.features = features
        self.layers = layers
        self.coarse = coarse
        self.undo = undo

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        base = {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.1}
        return {"base": base, "features": 4, "layers": 1, "coarse": 1}

    def own_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        def normal(*sides: int) -> Tensor:
            return torch.randn(sides, dtype=torch.float64, generator=generator) / _UNIT

        n = self.features
        first = zero_mean(normal(n, shape[0], _FIRST, _FIRST))
        kernels = [first, *(normal(n, n, _NEXT, _NEXT) for _ in range(self.layers))]
        weights = 4 * (shape[0] + self.responses(shape))
        return {
            **{f"network.kernels_{k}": layer for k, layer in enumerate(kernels)},
            **{f"network.biases_{k}": torch.zeros(n, dtype=torch.float64) for k in range(len(kernels))},
            "network.last": torch.zeros(weights, n, 1, 1, dtype=torch.float64),
            "network.last_biases": torch.zeros(weights, dtype=torch.float64),
            **(self._coarse_params(normal) if self.coarse else {}),
        }

    def _coarse_params(self, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
        n, wide = self.features, 2 * self.features
        kernels = [normal(wide, n, 2, 2), *(normal(wide, wide, _NEXT, _NEXT) for _ in range(self.coarse))]
        return {
            **{f"coarse.kernels_{k}": layer for k, layer in enumerate(kernels)},
            **{f"coarse.biases_{k}": torch.zeros(wide, dtype=torch.float64) for k in range(len(kernels))},
            "coarse.last": normal(4 * n, wide, 1, 1),
        }

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return _without_brightness(super().project(theta))

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        return _without_brightness(super().project_gradient(gradient))

    def guide(self, theta: Theta, start: Tensor) -> Rows:
        out, channels = self._network(theta, start), start.shape[1]
        # In the layout of what they meet in every iteration.
        weights, guess = image_layout(out[:, channels:]), image_layout(out[:, :channels])
        return {"weights": torch.sigmoid(weights + _INITIAL), "guess": guess / _GAIN}

    def select(self, theta: Theta, guide: Rows) -> Theta:
        return _Guided(theta, guide, self.analyse(theta, guide["guess"])) if guide else theta

    def offset(self, theta: Theta) -> Tensor | None:
        return theta.offset if isinstance(theta, _Guided) else None

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self.potential(theta, self._shifted(theta, self.analyse(theta, x))).sum((1, 2, 3))

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = self._shifted(theta, self.analyse(theta, x))
        return self.synthesise(theta, self.majorant(theta, t) * t, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        beyond = x - theta.guide["guess"] if isinstance(theta, _Guided) else x
        product: Any = self.base.linearize(of_base(theta), beyond)
        return WrappedHessian(self, theta, tuple(x.shape[1:]), _weighted(theta, product.curvature))

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t, t_q = self.analyse(theta, torch.cat([x, q])).chunk(2)
        t = self._shifted(theta, t)
        return (self.majorant(theta, t) * t * t_q).flatten(1).sum(1)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return _weighted(theta, self.base.majorant(of_base(theta), t))

    def potential(self, theta: Theta, t: Tensor) -> Tensor:
        return _weighted(theta, self.base.potential(of_base(theta), t))

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.base.lipschitz(of_base(theta), shape)

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self.convexity_when_flattened(theta, shape)

    def pictures(self, theta: Theta) -> Tensor | None:
        return self.base.pictures(of_base(theta))

    def potentials(self, theta: Theta) -> Potentials | None:
        return self.base.potentials(of_base(theta))

    def _shifted(self, theta: Theta, t: Tensor) -> Tensor:
        offset = self.offset(theta)
        return t if offset is None else t - offset

    def _network(self, theta: Theta, u: Tensor) -> Tensor:
        """N_θ(u): the channels of the guess, then those of the weights."""
        h = _layer(theta, "network", 0, _pairs(u), _GAIN, stride=2)
        if self.coarse:
            h = h + self._coarse(theta, h)
        h = _residual(theta, "network", self.layers, h)
        last = theta["network.last"] * (_UNIT / math.sqrt(self.features))
        return _spread(F.conv2d(h, last, _UNIT * theta["network.last_biases"]), u)

    def _coarse(self, theta: Theta, h: Tensor) -> Tensor:
        """U d for the features h, which have an even number of rows and columns or are mirrored."""
        rows, columns = (length % 2 for length in h.shape[2:])
        even = torch.cat([h, h[:, :, -1:]], dim=2) if rows else h
        even = torch.cat([even, even[..., -1:]], dim=3) if columns else even
        d = _residual(theta, "coarse", self.coarse, _layer(theta, "coarse", 0, even, stride=2))
        return _spread(F.conv2d(d, _scaled(theta["coarse.last"])), h)


def _layer(theta: Theta, part: str, k: int, seen: Tensor, gain: float = 1.0, stride: int = 1) -> Tensor:
    """σ(V_k ⋆ seen + b_k)."""
    kernels = _scaled(theta[f"{part}.kernels_{k}"], gain)
    return F.silu(F.conv2d(seen, kernels, theta[f"{part}.biases_{k}"], stride=stride))


def _residual(theta: Theta, part: str, layers: int, h: Tensor) -> Tensor:
    for k in range(1, layers + 1):
        h = h + _layer(theta, part, k, extend(h, _NEXT, "symmetric"))
    return h


def _scaled(kernels: Tensor, gain: float = 1.0) -> Tensor:
    """Kernels with the standard deviation of their fan-in at first."""
    return kernels * (_UNIT * gain / math.sqrt(kernels[0].numel()))


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Values of four neighbours each, on the grid of ``like``: twice as many rows and columns, or one less."""
    return F.pixel_shuffle(values, 2)[:, :, : like.shape[2], : like.shape[3]]


def _pairs(u: Tensor) -> Tensor:
    """u mirrored at its borders, so that the first layer has a row for every two rows, and one for the last if their
    number is odd; columns alike."""
    rows, columns = (2 * ((length + 1) // 2) + _FIRST - 2 for length in u.shape[2:])
    return extend(u, _FIRST + 1, "symmetric")[:, :, 1 : 1 + rows, 1 : 1 + columns]


def _without_brightness(theta: dict[str, Tensor]) -> dict[str, Tensor]:
    return theta | {"network.kernels_0": zero_mean(theta["network.kernels_0"])}


class _Guided(Prepared):
    """θ with the prepared parameters of the base, and for the samples at hand w, v and C v."""

    def __init__(self, theta: Theta, guide: Rows, offset: Tensor) -> None:
        super().__init__(theta, of_base(theta))
        self.guide = guide
        self.offset = offset


def _weighted(theta: Theta, values: Tensor) -> Tensor:
    return theta.guide["weights"] * values if isinstance(theta, _Guided) else values
