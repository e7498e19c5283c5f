"""Least squares on measurements that are chosen by learning: which frequencies are worth measuring.

    D_s(t; y) = ½ Σ_k s_k |t_k − y_k|²,   s ∈ [0, 1],        D' = s(t − y),   D'' = s
    P(s) = β Σ_k s_k + s_k(1 − s_k)                          over the entries that are not fixed

The operator is the full transform and y all of its measurements; s says how much of each is used. P charges for
measurements and for values between 0 and 1. s is a weight and not squared: with s² zero would be absorbing, since the
hypergradient vanishes there while P' does not. After each step s is projected on [0, 1].

`pattern` shares s between the entries of a column (Cartesian sampling with the readout along columns), of a line, or
gives every point its own. s has the layout of the transform: zero frequency first, as numpy.fft.fft2; real and
imaginary parts, channels and coils share it. The `center` lowest frequencies are always measured, s = 1: filters of
zero mean do not see the mean of an image, so without the zero frequency the minimiser would not be unique.

A scanner measures a frequency or does not. With `binary: true` s is the nearest pattern of zeros and `count` ones, and
stays as it is, without a penalty, while the regularizer is learned. Start it from a learned s by `init`; without one
the lowest frequencies are taken. A baseline measures `count` of them, too. A cold solve starts from the
zero-filled Aᵀ(s·y), so that it knows nothing of measurements that are not used.

When to choose it: to design the sampling of an MRI sequence together with the regularizer, with operator `mri` and
`acceleration: 1`, or any other transform whose measurements can be chosen. L = max s; D is min s strongly convex, which
is 0 where something is not measured: set `strong_convexity` in the recipe to have certified accuracies.

Reference: Sherry, Benning, De los Reyes, Graves, Maierhofer, Williams, Schönlieb & Ehrhardt, *Learning the sampling
pattern for MRI*, IEEE TMI 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from bltoolbox.plugin import DataTerm, Theta, dot

#: Width of the interval of initial values: equal ones of k and −k would stay equal.
_SPREAD = 0.2


class SampledLeastSquares(DataTerm):
    """Half the squared distance to measurements with learned weights in [0, 1].

    Args:
        pattern: what shares a weight: the entries of a column, those of a line, or nothing.
        center: how many of the lowest frequencies are always measured.
        sparsity: β, what a measurement costs; the larger, the fewer are kept.
        initial: s in the beginning, where it is not fixed.
        count: how many columns, lines or points the binary pattern measures, those of `center` included.
        binary: whether s is the nearest binary pattern and stays fixed.
    """

    quadratic: ClassVar[bool] = True
    rescales: ClassVar[bool] = True
    uniform = False

    def __init__(
        self,
        pattern: Literal["columns", "lines", "points"] = "columns",
        center: Annotated[int, Ge(1)] = 1,
        sparsity: Annotated[float, Ge(0)] = 0.1,
        initial: Annotated[float, Gt(0), Le(1)] = 0.5,
        count: Annotated[int, Gt(0)] | None = None,
        binary: bool = False,
    ) -> None:
        if binary and count is None:
            raise ValueError(f"a binary pattern needs count, the number of {pattern} to measure")
        if count is not None and count < center:
            raise ValueError(f"count {count} is less than the {center} of center, which are always measured")
        self.pattern = pattern
        self.fixed = center
        self.sparsity = sparsity
        self.initial = initial
        self.count = count
        self.binary = binary
        also = "" if binary or count is None else f" and its binary pattern of {count} {pattern}"
        self.caption = f"Sampling pattern{also}, zero frequency in the middle"

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        around = torch.rand(self._sides(shape), dtype=torch.float64, generator=generator) - 0.5
        return self.project({"sampling": self.initial + _SPREAD * around * (not self.binary)})

    def standard_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """The lowest frequencies, `count` in all: the best of the usual patterns for images without learning."""
        if self.count is None:
            raise ValueError(f"set count, the number of {self.pattern} that a baseline may measure")
        equal = torch.zeros(self._sides(shape), dtype=torch.float64)
        return {"sampling": binary_pattern(equal, self.count, self.fixed)}

    def check(self, shape: Sequence[int]) -> str | None:
        height, width = self._sides(shape)
        wanted = max(self.fixed, self.count or 0)
        if wanted > height * width:
            return f"{wanted} {self.pattern} cannot be measured, images of this size have {height * width}"
        return None

    def check_measurements(self, y: Tensor) -> str | None:
        size = y.abs().amax((0, 1))
        largest = size if self.pattern == "points" else size.amax(0 if self.pattern == "columns" else 1)
        if self.binary or bool(largest.all()):  # what a binary pattern leaves out need not be there
            return None
        return (
            f"some {self.pattern} contain only zeros, so nothing can be learned about them; let the operator measure"
            " everything, e.g. by acceleration: 1"
        )

    def project(self, theta: Theta) -> dict[str, Tensor]:
        s = theta["sampling"]
        if self.binary and self.count is not None:
            return {"sampling": binary_pattern(s, self.count, self.fixed)}
        return {"sampling": s.clamp(0, 1).masked_fill(self._held(s), 1.0)}

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        z = gradient["sampling"]
        return {"sampling": torch.zeros_like(z) if self.binary else z.masked_fill(self._held(z), 0.0)}

    def penalty(self, theta: Theta) -> Tensor | None:
        if self.binary:
            return None
        s = theta["sampling"]
        cost = s + s * (1 - s)
        return self.sparsity * cost.masked_fill(self._held(s), 0.0).sum()

    def centre(self, theta: Theta, y: Tensor) -> Tensor:
        return theta["sampling"] * y

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        misfit = t - y
        return 0.5 * dot(misfit, theta["sampling"] * misfit)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["sampling"] * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["sampling"].expand(y.shape)

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Tensor, Tensor]:
        s = theta["sampling"].detach()
        return s.min(), s.max()

    def third(self, theta: Theta, y: Tensor) -> float:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return self.curvature(theta, t, y)

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        weight = step * theta["sampling"]
        return (t + weight * y) / (1 + weight)

    def pictures(self, theta: Theta) -> Tensor:
        """s, and the binary pattern of `count` that it stands for; columns and lines as squares."""
        patterns = [theta["sampling"]]
        if self.count is not None and not self.binary:
            patterns.append(binary_pattern(patterns[0], self.count, self.fixed))
        height, width = patterns[0].shape
        sides = (height, width) if self.pattern == "points" else (max(height, width),) * 2
        return torch.fft.fftshift(torch.stack(patterns), dim=(1, 2)).unsqueeze(1).expand(-1, -1, *sides)

    def _sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Of s, which broadcasts with measurements."""
        height, width = shape[-2:]
        return {"columns": (1, width), "lines": (height, 1), "points": (height, width)}[self.pattern]

    def _held(self, s: Tensor) -> Tensor:
        """True for the lowest frequencies."""
        held = torch.zeros(s.numel(), dtype=torch.bool, device=s.device)
        held[by_frequency(s)[: self.fixed]] = True
        return held.view_as(s)


def by_frequency(s: Tensor) -> Tensor:
    """The entries of s from the lowest frequency to the highest; of equal ones the first comes first."""
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64).square() for side in s.shape)
    return (rows[:, None] + columns).flatten().argsort(stable=True).to(s.device)


def binary_pattern(s: Tensor, count: int, center: int = 1) -> Tensor:
    """1 at the ``center`` lowest frequencies and at the largest other entries of s, ``count`` in all, 0 elsewhere.

    That is the nearest such pattern. Of equal entries those of lower frequency are taken.
    """
    order = by_frequency(s)
    value = s.flatten()[order]
    value[:center] = torch.inf
    pattern = torch.zeros_like(value)
    pattern[order[value.argsort(descending=True, stable=True)[:count]]] = 1
    return pattern.view_as(s)
