"""Magnetic resonance imaging: some lines of the two-dimensional Fourier transform.

    A x = M F x,        Aᵀ y = F^H M y  (its real part, for real images)

F is the unitary FFT (zero frequency first, as in numpy.fft.fft2), and M selects the measured frequencies. Complex
numbers are pairs of channels: C channels of real parts, then C of imaginary parts. So y has 2C channels for a real
image of C channels, and as many as x with `image: complex`. Noise of level σ is added to the real and to the imaginary
part of each measured frequency; the others are zero, without noise.

Entire columns are measured (Cartesian sampling): the `center_fraction` of lowest frequencies, and random others up to
one in `acceleration`. The columns are the same for all samples and depend on `seed` and the width. Alternatively, the
mask comes from an ``.npy`` file.
A real image has |x̂(k)| = |x̂(−k)|, so AᵀA has the eigenvalues (M(k) + M(−k))/2: the norm and the strong
convexity (½ for half of the plane, 1 for all of it) are exact. A solve starts from the zero-filled reconstruction Aᵀy.

When to choose it: accelerated MRI with one coil, or any Fourier sampling. If for some k
neither k nor −k is measured, AᵀA is singular: set `strong_convexity` in the recipe for certified accuracies.

Reference: Lustig, Donoho & Pauly, *Sparse MRI: the application of compressed sensing for rapid MR imaging*, MRM 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from blt_builtins.operators.arrays import misfit, read_mask
from bltoolbox.plugin import Constant, Operator, Rows, Theta, keyed_generator


class MRI(Operator):
    """A masked, unitary Fourier transform.

    Args:
        acceleration: one column in this many is measured.
        center_fraction: fraction of the columns, those of lowest frequency, that are always measured.
        seed: seed of the choice of the other columns.
        mask: path of an .npy file, 1 for measured frequencies, in the order of numpy.fft.fft2, instead of columns.
        image: whether images are real, or complex with their imaginary parts in the second half of the channels.
    """

    def __init__(
        self,
        acceleration: Annotated[float, Ge(1)] = 4.0,
        center_fraction: Annotated[float, Ge(0), Le(1)] = 0.08,
        seed: int = 0,
        mask: str | None = None,
        image: Literal["real", "complex"] = "real",
    ) -> None:
        if mask is None and center_fraction * acceleration > 1:
            raise ValueError(
                f"center_fraction {center_fraction:g} alone is more than one column in {acceleration:g};"
                f" use at most {1 / acceleration:g}, or a smaller acceleration"
            )
        self.acceleration = acceleration
        self.center_fraction = center_fraction
        self.seed = seed
        self.mask = None if mask is None else Constant(read_mask(mask))
        self.image = image

    def check(self, shape: Sequence[int]) -> str | None:
        if self.image == "complex" and shape[0] % 2:
            return (
                f"a complex image has an even number of channels, these have {shape[0]};"
                " use image: real, or data with real and imaginary parts"
            )
        return misfit(self.mask, (shape[1], shape[2]))

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        image = x if self.image == "real" else _complex(x)
        return _channels(torch.fft.fft2(image, norm="ortho")) * self.sampled(x)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        image = torch.fft.ifft2(_complex(y * self.sampled(y)), norm="ortho")
        return image.real if self.image == "real" else _channels(image)

    def measured(self, y: Tensor, context: Rows) -> Tensor:
        return self.sampled(y)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        eigenvalues = self._eigenvalues(shape)
        return float(eigenvalues.min()), float(eigenvalues.max())

    def sampled(self, x: Tensor) -> Tensor:
        """The mask for images or measurements like ``x``: (H, W), or (1, W) for entire columns."""
        if self.mask is not None:
            if sentence := misfit(self.mask, (x.shape[2], x.shape[3])):
                raise ValueError(sentence)
            return self.mask.like(x)
        return column_mask(self.acceleration, self.center_fraction, self.seed, x.shape[3], x.dtype, x.device)

    def _eigenvalues(self, shape: Sequence[int]) -> Tensor:
        """Those of AᵀA."""
        mask = self.sampled(torch.empty(1, *shape, dtype=torch.float64))
        if self.image == "complex":
            return mask
        opposite = mask.flip(0, 1).roll((1, 1), (0, 1))
        return (mask + opposite) / 2


@lru_cache(maxsize=16)
def column_mask(
    acceleration: float,
    center_fraction: float,
    seed: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The mask of measured columns, (1, W); cached, since every product with A uses it."""
    center = round(center_fraction * width)
    count = max(round(width / acceleration), center, 1)
    by_frequency = torch.fft.fftfreq(width).abs().argsort(stable=True)
    others = by_frequency[center:]
    drawn = torch.randperm(len(others), generator=keyed_generator("mri", seed, width))[: count - center]
    mask = torch.zeros(width, dtype=dtype)
    mask[by_frequency[:center]] = 1
    mask[others[drawn]] = 1
    return mask.view(1, width).to(device)


def _complex(channels: Tensor) -> Tensor:
    """(B, 2C, H, W) real to (B, C, H, W) complex."""
    if channels.shape[1] % 2:
        raise ValueError(
            f"complex numbers are pairs of channels, but there are {channels.shape[1]};"
            " put the real parts in the first half of the channels and the imaginary parts in the second"
        )
    real, imaginary = channels.chunk(2, dim=1)
    return torch.complex(real, imaginary)


def _channels(values: Tensor) -> Tensor:
    """(B, C, H, W) complex to (B, 2C, H, W) real."""
    return torch.cat([values.real, values.imag], dim=1)
