"""Another regularizer whose potentials are learned functions of the noise level.

    R_θ(x; σ) = Σ_j Σ_p f_j g_j ψ_j(t_jp/g_j),        t = C x,   Σ_j Σ_p ψ_j((Cx)_jp) = the base, e.g. `foe`
    f_j = s e^{α_j(log s)},   g_j = s e^{β_j(log s)},   s = σ/σ_0

f_j multiplies the slopes of a potential, g_j its widths: of a smoothed absolute value a → f a and ν → g ν. Without α
and β this is R_s(x) = s²R(x/s), which carries what is right for σ_0 to noise σ (see ``Rescaled``): the same minimiser,
scaled. But photographs are not scaled by their noise; at low noise more of their detail is above it. So α_j and β_j are
learned, piecewise linear between `knots` levels from `least` to `most` and constant beyond, and zero before training:
two tables of J rows.

Where the level of an image is known, it is used: with ``noise: {name: gaussian-range}`` in training, and in
`blt apply`, which takes the level it is given or estimates one for the whole picture. Otherwise it is read off the
start of a cold solve, which is y in denoising (Immerkær's mask N, with a median, which is blind to few strong edges),

    σ̂ = median |N ⋆ y| / (0.6745 · 6),        N = (1, −2, 1)ᵀ(1, −2, 1)

the root mean square over channels. In small crops fine texture counts as noise: the estimate errs upwards.

As the curvature of f g ψ(t/g) is f/g times that of ψ, bounds of the base are multiplied by the largest f_j/g_j; since
it is e^{α_j − β_j}, piecewise linear in the exponent, it is attained at a knot, and bounds hold at every level. R is
convex where the base is.

When to choose it: one model for noise from `least` to `most`. At a single level of noise it gains nothing.

References: Immerkær, *Fast noise variance estimation*, Computer Vision and Image Understanding 1996; Goujon, Neumayer &
Unser, *Learning weakly convex regularizers for convergent image-reconstruction algorithms*, SIAM J. Imaging Sci. 2024,
whose potentials depend on the noise level.
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

from blt_builtins.regularizers.wrapped import Prepared, WrappedHessian, WrappedRegularizer, of_base
from bltoolbox.plugin import Bound, Potentials, Regularizer, Rows, Theta

#: What the base must provide.
_NEEDED = ("analyse", "synthesise", "majorant", "potential")
#: The median of |n| for a standard normal n, and the norm of the mask.
_MEDIAN, _MASK_NORM = 0.6744897501960817, 6.0
#: Estimates are not below this: rounding to 8 bits alone is noise of 0.29/255.
_FLOOR = 0.25 / 255


class NoiseAware(WrappedRegularizer):
    """A regularizer with slopes and widths of its potentials that are learned functions of the noise level.

    Args:
        base: the regularizer at the level σ_0: foe, general or wcfoe.
        least: the lowest level σ with a knot.
        most: the highest.
        knots: number of levels with table entries, evenly spaced in log σ.
        reference: the level σ_0.
        level: the level of all images, where it is known; null reads it off each one that comes without.
    """

    def __init__(
        self,
        base: Regularizer,
        least: Annotated[float, Gt(0)] = 5 / 255,
        most: Annotated[float, Gt(0)] = 50 / 255,
        knots: Annotated[int, Ge(2), Le(64)] = 4,
        reference: Annotated[float, Gt(0)] = 25 / 255,
        level: Annotated[float, Gt(0)] | None = None,
    ) -> None:
        missing = [method for method in _NEEDED if not base.offers(method)]
        if missing or base.offers("guide"):
            trouble = f"has no {missing[0]}" if missing else "adapts to images by itself"
            raise ValueError(
                f"{type(base).__name__} cannot depend on the noise level, it {trouble}; use foe, general or wcfoe"
            )
        if most <= least:
            raise ValueError(f"most {most:g} is not above least {least:g}; use a range of levels")
        super().__init__(base)
        self.convex = base.convex  # type: ignore[misc]
        self.uniform = base.uniform
        self.least = least
        self.most = most
        self.knots = knots
        self.reference = reference
        self.level = level

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"base": {"name": "foe", "filters": 3, "kernel_size": 3, "nu": 0.1}, "knots": 3}

    def own_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        table = torch.zeros(self.responses(shape), self.knots, dtype=torch.float64)
        return {"levels.slopes": table, "levels.widths": table.clone()}

    def check(self, shape: Sequence[int]) -> str | None:
        if min(shape[1:]) < 3:
            return f"noise cannot be read off {shape[1]}×{shape[2]} images; use images of at least 3×3"
        return self.base.check(shape)

    def guide(self, theta: Theta, start: Tensor) -> Rows:
        if self.level is not None:
            return {"noise": start.new_full((len(start),), self.level)}
        return {"noise": estimated_noise(start)}

    def at_noise(self, level: float) -> NoiseAware:
        return NoiseAware(self.base, self.least, self.most, self.knots, self.reference, level)

    def select(self, theta: Theta, guide: Rows) -> Theta:
        if not guide:
            return theta
        noise = guide["noise"].clamp_min(_FLOOR)
        log_scale = (noise / self.reference).log().unsqueeze(1)
        at_knots = self._hats(noise)
        slopes, widths = (
            (log_scale + (at_knots.unsqueeze(1) * theta[name]).sum(2)).exp().view(len(noise), -1, 1, 1)
            for name in ("levels.slopes", "levels.widths")
        )
        return _AtLevel(theta, slopes, widths)

    def _hats(self, noise: Tensor) -> Tensor:
        """How much each knot contributes at these levels, (B, knots): linear in log σ between two neighbours."""
        span = math.log(self.most / self.least) / (self.knots - 1)
        place = ((noise / self.least).log() / span).clamp(0, self.knots - 1)
        knots = torch.arange(self.knots, dtype=noise.dtype, device=noise.device)
        return (1 - (place.unsqueeze(1) - knots).abs()).clamp_min(0)

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return self.potential(theta, self.analyse(theta, x)).sum((1, 2, 3))

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        t = self.analyse(theta, x)
        return self.synthesise(theta, self.majorant(theta, t) * t, x.shape[1:])

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        t = self.analyse(theta, x)
        # The base says what ψ'(t)/t is at any t, and ψ'' only at responses of images.
        with torch.enable_grad():
            leaf = t.detach().requires_grad_()
            slope = self.majorant(theta, leaf) * leaf
            curvature = torch.autograd.grad(slope.sum(), leaf)[0]
        return WrappedHessian(self, theta, tuple(x.shape[1:]), curvature)

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        t, t_q = self.analyse(theta, torch.cat([x, q])).chunk(2)
        return (self.majorant(theta, t) * t * t_q).flatten(1).sum(1)

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        if not isinstance(theta, _AtLevel):
            return self.base.majorant(of_base(theta), t)
        return theta.slopes / theta.widths * self.base.majorant(of_base(theta), t / theta.widths)

    def potential(self, theta: Theta, t: Tensor) -> Tensor:
        if not isinstance(theta, _AtLevel):
            return self.base.potential(of_base(theta), t)
        return theta.slopes * theta.widths * self.base.potential(of_base(theta), t / theta.widths)

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self._steepened(theta, self.base.lipschitz(of_base(theta), shape))

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Bound:
        return self._steepened(theta, self.convexity_when_flattened(theta, shape))

    def _steepened(self, theta: Theta, bound: Bound) -> Bound:
        """A bound of the base times the largest f_j/g_j, which is 1 without a level."""
        if bound is None:
            return None
        return bound * (theta["levels.slopes"] - theta["levels.widths"]).max().clamp_min(0).exp()

    def pictures(self, theta: Theta) -> Tensor | None:
        return self.base.pictures(of_base(theta))

    def potentials(self, theta: Theta) -> Potentials | None:
        return self.base.potentials(of_base(theta))


def estimated_noise(images: Tensor) -> Tensor:
    """σ̂ of each image, (B,)."""
    second = torch.tensor([1.0, -2.0, 1.0], dtype=images.dtype, device=images.device)
    mask = torch.outer(second, second).view(1, 1, 3, 3)
    count, channels = images.shape[:2]
    details = F.conv2d(images.reshape(count * channels, 1, *images.shape[2:]), mask)
    levels = details.abs().flatten(1).median(dim=1).values / (_MEDIAN * _MASK_NORM)
    return levels.view(count, channels).square().mean(1).sqrt()


class _AtLevel(Prepared):
    """θ with the prepared parameters of the base, and f and g of the samples at hand, (B, J, 1, 1)."""

    def __init__(self, theta: Theta, slopes: Tensor, widths: Tensor) -> None:
        super().__init__(theta, of_base(theta))
        self.slopes = slopes
        self.widths = widths
