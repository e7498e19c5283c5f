"""Magnetic resonance imaging: some lines of the two-dimensional Fourier transform, seen by one coil or several.

    A x = (M F s_k x)_k,        Aᵀ y = Σ_k s̄_k F^H M y_k  (its real part, for real images)

F is the unitary FFT (zero frequency first, as in numpy.fft.fft2), M selects the measured frequencies, and s_k is the
sensitivity map of coil k; there is one coil with s = 1 unless `coils` is set. Complex numbers are pairs of channels:
all real parts, then all imaginary parts. So y has 2CK channels for a real image of C channels and K coils, and CK with
`image: complex`, where the channels of x are such pairs; the coils of the first channel come first. Noise of level σ is
added to the real and to the imaginary part of each measured frequency; the others are zero, without noise.

Entire columns are measured (Cartesian sampling): the `center_fraction` of lowest frequencies, and random others up to
one in `acceleration`. The columns are the same for all samples and depend on `seed` and the width. Alternatively, the
mask comes from an ``.npy`` file. `coils` is the number of coils to simulate, with Σ_k |s_k|² = 1, or an ``.npy`` file
of complex numbers K×H×W.

Data may provide maps and masks in their context, one per sample, which replace those of the options: `coils`, complex
numbers of shape (B, K, H, W), and `mask` of shape (B, H, W), or (B, 1, W) for entire columns. A run converts them to
its precision; complex numbers stay complex.

With several coils, AᵀA ≤ max_p Σ_k |s_k(p)|²; if all frequencies are measured, AᵀA is the product with Σ_k |s_k|². With
one coil, a real image has |x̂(k)| = |x̂(−k)|, so AᵀA has the eigenvalues (M(k) + M(−k))/2: the norm and the strong
convexity (½ for half of the plane, 1 for all of it) are exact. A solve starts from the zero-filled reconstruction Aᵀy,
divided by max_p Σ_k |s_k(p)|².

When to choose it: accelerated MRI, or any Fourier sampling. If for some k neither k nor −k is measured, AᵀA of one coil
is singular: set `strong_convexity` in the recipe for certified accuracies. Several coils help where their maps
differ; an `acceleration` above their number relies on the regularizer.

References: Pruessmann, Weiger, Scheidegger & Boesiger, *SENSE: sensitivity encoding for fast MRI*, MRM 1999; Lustig,
Donoho & Pauly, *Sparse MRI: the application of compressed sensing for rapid MR imaging*, MRM 2007.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from blt_builtins.operators.arrays import misfit, read_mask
from blt_builtins.operators.coils import read_coils, simulated_coils
from bltoolbox.plugin import Bound, Constant, Operator, Rows, Theta, keyed_generator, lasting


class MRI(Operator):
    """A masked, unitary Fourier transform, for one coil or several.

    Args:
        acceleration: one column in this many is measured.
        center_fraction: fraction of the columns, those of lowest frequency, that are always measured.
        seed: seed of the choice of the other columns.
        mask: path of an .npy file, 1 for measured frequencies, in the order of numpy.fft.fft2, instead of columns.
        image: whether images are real, or complex with their imaginary parts in the second half of the channels.
        coils: number of coils to simulate, the path of an .npy file of maps, or null for one coil with s = 1.
    """

    def __init__(
        self,
        acceleration: Annotated[float, Ge(1)] = 4.0,
        center_fraction: Annotated[float, Ge(0), Le(1)] = 0.08,
        seed: int = 0,
        mask: str | None = None,
        image: Literal["real", "complex"] = "real",
        coils: Annotated[int, Gt(0), Le(256)] | str | None = None,
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
        self.simulated = coils if isinstance(coils, int) else None
        self.maps = Constant(_pairs(read_coils(coils))) if isinstance(coils, str) else None

    def example_contexts(self, shape: Sequence[int], count: int) -> list[Rows]:
        generator = keyed_generator("mri", "example", count)
        maps = torch.randn(count, 3, *shape[1:], dtype=torch.complex128, generator=generator)
        mask = torch.randint(0, 2, (count, *shape[1:]), generator=generator)
        mask[:, 0, 0] = 1
        return [{}, {"coils": maps}, {"mask": mask}, {"coils": maps, "mask": mask[:, :1]}]

    def check(self, shape: Sequence[int]) -> str | None:
        if self.image == "complex" and shape[0] % 2:
            return (
                f"a complex image has an even number of channels, these have {shape[0]};"
                " use image: real, or data with real and imaginary parts"
            )
        if self.maps is not None and self.maps.value.shape[1:3] != tuple(shape[1:]):
            height, width = self.maps.value.shape[1:3]
            return (
                f"the coil maps are {height}×{width} but the images are {shape[1]}×{shape[2]};"
                " give maps of that size, or a number of coils to simulate"
            )
        return misfit(self.mask, (shape[1], shape[2]))

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        image = x if self.image == "real" else _complex(x)
        maps = self.coil_maps(x, context)
        if maps is not None:
            image = (image.unsqueeze(2) * maps).flatten(1, 2)
        return _channels(torch.fft.fft2(image, norm="ortho")) * self.sampled(x, context)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        image = torch.fft.ifft2(_complex(y * self.sampled(y, context)), norm="ortho")
        maps = self.coil_maps(y, context)
        if maps is not None:
            image = (maps.conj() * _by_coil(image, maps.shape[2])).sum(2)
        return image.real if self.image == "real" else _channels(image)

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        image, maps = self.adjoint(y, theta, context), self.coil_maps(y, context)
        return image if maps is None else image / _power(maps).amax((1, 2, 3), keepdim=True)

    def measured(self, y: Tensor, context: Rows) -> Tensor:
        return self.sampled(y, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        like = next(iter(context.values()), torch.empty(0)).new_empty(1, *shape, dtype=torch.float64)
        mask, maps = self.sampled(like, context), self.coil_maps(like, context)
        if maps is None:
            opposite = mask.flip(-2, -1).roll((1, 1), (-2, -1))
            eigenvalues = mask if self.image == "complex" else (mask + opposite) / 2
            least, most = eigenvalues.amin((-2, -1)), eigenvalues.amax((-2, -1))
        else:
            power = _power(maps)
            least, most = mask.amin((-2, -1)) * power.amin((-2, -1)), power.amax((-2, -1))
        if {"mask", "coils"} & set(context):  # one of each sample
            return least.flatten(), most.flatten()
        return float(least), float(most)

    def sampled(self, x: Tensor, context: Rows) -> Tensor:
        """The mask for images or measurements like ``x``: (H, W) or (B, 1, H, W), H = 1 for entire columns."""
        if "mask" in context:
            return _fitting(context["mask"], "mask", x).to(x).unsqueeze(1)
        if self.mask is not None:
            if sentence := misfit(self.mask, (x.shape[2], x.shape[3])):
                raise ValueError(sentence)
            return self.mask.like(x)
        return column_mask(self.acceleration, self.center_fraction, self.seed, x.shape[3], x.dtype, x.device)

    def coil_maps(self, x: Tensor, context: Rows) -> Tensor | None:
        """The maps for images or measurements like ``x``, complex (B, 1, K, H, W), B = 1 for those of all samples."""
        if "coils" in context:
            maps = _fitting(context["coils"], "coils", x)
            return maps.to(x.device, x.dtype.to_complex()).unsqueeze(1)
        if self.maps is not None:
            if sentence := self.check((2, *x.shape[2:])):
                raise ValueError(sentence)
            return torch.view_as_complex(self.maps.like(x)).view(1, 1, *self.maps.value.shape[:-1])
        if self.simulated is None:
            return None
        return _simulated(self.simulated, x.shape[2], x.shape[3], x.dtype, x.device)


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
    with lasting():
        mask = torch.zeros(width, dtype=dtype)
        mask[by_frequency[:center]] = 1
        mask[others[drawn]] = 1
        return mask.view(1, width).to(device)


@lru_cache(maxsize=16)
def _simulated(count: int, height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Simulated maps (1, 1, K, H, W), kept for the same reason."""
    with lasting():
        maps = simulated_coils(count, height, width).to(device=device, dtype=dtype.to_complex())
        return maps.view(1, 1, count, height, width)


def _fitting(rows: Tensor, name: str, x: Tensor) -> Tensor:
    """What the context has under ``name``, if it fits images like ``x``."""
    height, width = x.shape[2:]
    masked = name == "mask"
    heights = (1, height) if masked else (height,)
    if rows.ndim != (3 if masked else 4) or rows.shape[-2] not in heights or rows.shape[-1] != width:
        expected = f"(B, {'' if masked else 'K, '}{height}, {width})"
        raise ValueError(
            f"{name} in the context of the data has the shape {tuple(rows.shape)}, but mri needs {expected}"
        )
    return rows


def _power(maps: Tensor) -> Tensor:
    """Σ_k |s_k|², (B, 1, H, W)."""
    return maps.abs().square().sum(2)


def _by_coil(values: Tensor, count: int) -> Tensor:
    """(B, C·K, H, W) to (B, C, K, H, W)."""
    if values.shape[1] % count:
        raise ValueError(
            f"measurements of {count} coils have a multiple of {2 * count} channels, these have {2 * values.shape[1]};"
            " set coils to those of the measurements"
        )
    return values.unflatten(1, (-1, count))


def _pairs(maps: Tensor) -> Tensor:
    """Complex numbers as real pairs in a last dimension, so that they can be converted like any other."""
    return torch.view_as_real(maps).contiguous()


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
