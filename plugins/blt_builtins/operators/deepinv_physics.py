"""Linear physics of deepinv, by name.

    A x = physics.A(x),        Aᵀ y = physics.A_adjoint(y)

The names are those of deepinv, as far as they are linear and can be made from plain numbers: images of `size` and
`channels`, and the `options` of each.

    Inpainting         mask (the fraction of known pixels), pixelwise (the same for all channels)
    Demosaicing        none; three channels, one colour per pixel in the pattern of Bayer
    Decolorize         srf (the weights of the channels, by name)
    Blur               sigma, width (of a Gaussian kernel), padding
    BlurFFT            sigma, width; periodic
    Downsampling       factor, filter, padding
    Upsampling         factor, filter, padding
    MRI                acceleration, center_fraction (of the columns measured); two channels, real and imaginary part
    Tomography         angles, circle, fan_beam; square images
    CompressedSensing  measurements, channelwise
    SinglePixelCamera  measurements, ordering; square images whose side is a power of two

Whatever is random depends on `seed` alone, and is the same in float32 and float64. When the operator is built, ⟨Ax, u⟩
= ⟨x, Aᵀu⟩ is checked for a random pair in float64, and physics whose adjoint is not exact are refused. Measurements
that are not images are arranged as images of one row.

AᵀA is diagonal in an orthonormal basis for Inpainting, Demosaicing, MRI and SinglePixelCamera, and its bounds are exact
there; ‖A‖ of the others is unknown, so that solvers search for a step. A solve starts from the multiple of Aᵀy that is
nearest to the measurements.

When to choose it: to train for a physics that deepinv has and this toolbox does not, or to compare with deepinv. The
operators of the toolbox are faster to build and know their norms. It needs the package deepinv, which `pip install
'bltoolbox[deepinv]'` brings.

Reference: Tachella et al., *DeepInverse: a Python package for solving imaging inverse problems with deep learning*,
2025.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from blt_builtins.operators.blur import gaussian_kernel
from blt_builtins.operators.mri import column_mask
from bltoolbox.plugin import (
    Bound,
    MissingError,
    Operator,
    Rows,
    Theta,
    dot,
    expand,
    keyed_generator,
    lasting,
    norm,
)

Name = Literal[
    "Inpainting",
    "Demosaicing",
    "Decolorize",
    "Blur",
    "BlurFFT",
    "Downsampling",
    "Upsampling",
    "MRI",
    "Tomography",
    "CompressedSensing",
    "SinglePixelCamera",
]

#: Physics whose `mask` contains the singular values of A, with as many measurements as pixels.
_DIAGONAL = ("Inpainting", "Demosaicing", "MRI", "SinglePixelCamera")
#: How far ⟨Ax, u⟩ and ⟨x, Aᵀu⟩ may be apart in float64, relative to ‖Ax‖‖u‖.
_EXACT = 1e-10
#: Entries of the random matrix of CompressedSensing: 128 MB, and a minute for its pseudoinverse.
_MOST = 2**24


@dataclass(frozen=True)
class Options:
    """Options of the physics; each has some of them, and those left out have their defaults.

    Args:
        mask: fraction of the pixels that are known; ½.
        pixelwise: whether a pixel is known in all channels or in none; true.
        srf: how the channels are weighted; rec601.
        sigma: standard deviation of the kernel in pixels; 1.
        width: side of the kernel; 7.
        padding: how the image continues beyond its border; circular.
        factor: how many times smaller or larger measurements are; 2.
        filter: against aliasing; gaussian.
        acceleration: one column in this many is measured; 4.
        center_fraction: fraction of the columns, those of lowest frequency, that is always measured; 0.08.
        angles: number of views over 180 degrees; 60.
        circle: whether the image is black outside of a circle; false.
        fan_beam: whether rays come from a point; false.
        measurements: how many numbers are measured, of each channel or of all; half as many as pixels.
        channelwise: whether each channel is measured by itself; false.
        ordering: which patterns are shown first; sequency.
    """

    mask: Annotated[float, Gt(0), Le(1)] | None = None
    pixelwise: bool | None = None
    srf: Literal["rec601", "average"] | None = None
    sigma: Annotated[float, Gt(0)] | None = None
    width: Annotated[int, Gt(0), Le(255)] | None = None
    padding: Literal["valid", "circular", "replicate", "reflect", "constant"] | None = None
    factor: Annotated[int, Gt(0), Le(64)] | None = None
    filter: Literal["gaussian", "bilinear", "bicubic"] | None = None
    acceleration: Annotated[float, Ge(1)] | None = None
    center_fraction: Annotated[float, Ge(0), Le(1)] | None = None
    angles: Annotated[int, Gt(0), Le(10_000)] | None = None
    circle: bool | None = None
    fan_beam: bool | None = None
    measurements: Annotated[int, Gt(0), Le(65_536)] | None = None
    channelwise: bool | None = None
    ordering: Literal["sequency", "cake_cutting", "zig_zag", "xy"] | None = None


class DeepInv(Operator):
    """A linear physics of deepinv.

    Args:
        physics: its name.
        size: height and width of the images.
        channels: of the images.
        options: of the physics; which ones it has is listed above.
        seed: for whatever is random.
    """

    def __init__(
        self,
        physics: Name = "Inpainting",
        size: tuple[Annotated[int, Gt(0), Le(8192)], Annotated[int, Gt(0), Le(8192)]] = (128, 128),
        channels: Annotated[int, Gt(0), Le(64)] = 3,
        options: Options | None = None,
        seed: int = 0,
    ) -> None:
        self.name = physics
        self.shape = (channels, *size)
        self._copies: dict[tuple[torch.dtype, torch.device], Any] = {}
        given = _given(physics, options or Options())
        package = _package()
        x = torch.randn(2, *self.shape, dtype=torch.float64, generator=keyed_generator("deepinv", "x"))
        with torch.no_grad(), _refusing(physics):
            made = _MAKERS[physics][1](package, self.shape, given, seed)
            self._exact = _converted(made, torch.float64, torch.device("cpu"))
            self._measured_shape = tuple(self._exact.A(x).shape[1:])
            gap = self._adjoint_gap(x)
        if not gap <= _EXACT:
            raise ValueError(
                f"A_adjoint of {physics} in deepinv is not the adjoint of its A: ⟨Ax, u⟩ and ⟨x, Aᵀu⟩ differ by"
                f" {gap:.1e}·‖Ax‖‖u‖; use other options, or another operator"
            )

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"physics": "Downsampling", "size": [12, 14], "options": {"filter": "bilinear"}}

    def check(self, shape: Sequence[int]) -> str | None:
        if tuple(shape) == self.shape:
            return None
        (channels, height, width), ours = shape, self.shape
        return (
            f"the physics is for {ours[0]} channels of {ours[1]}×{ours[2]}, but the images have {channels} of"
            f" {height}×{width}; set size and channels to those of the images"
        )

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        if sentence := self.check(x.shape[1:]):
            raise ValueError(sentence)
        return _as_image(self._physics(x).A(x))

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        if y[0].numel() != torch.Size(self._measured_shape).numel():
            shapes = ("×".join(map(str, shape)) for shape in (self._measured_shape, y.shape[1:]))
            raise ValueError("the physics makes measurements of {}, not of {}".format(*shapes))
        return self._physics(y).A_adjoint(y.reshape(len(y), *self._measured_shape))

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        back = self.adjoint(y, theta, context)
        again = self.apply(back, theta, context)
        # The c that minimises ‖c·AAᵀy − y‖; nothing is measured where Aᵀy is zero.
        scale = dot(back, back) / dot(again, again).clamp_min(torch.finfo(y.dtype).tiny)
        return expand(scale, back) * back

    def measured(self, y: Tensor, context: Rows) -> Tensor | None:
        if self.name not in _DIAGONAL:
            return None
        return (self._physics(y).mask != 0).to(y).expand(1, *self._measured_shape)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        if self.name not in _DIAGONAL:
            return 0.0, None
        eigenvalues = self._exact.mask.square()
        return float(eigenvalues.min()), float(eigenvalues.max())

    def _physics(self, like: Tensor) -> Any:
        """The physics in the dtype and on the device of ``like``; all of them are copies of one."""
        key = like.dtype, like.device
        if key not in self._copies:
            with lasting():
                self._copies[key] = _converted(copy.deepcopy(self._exact), *key)
        return self._copies[key]

    def _adjoint_gap(self, x: Tensor) -> float:
        """|⟨Ax, u⟩ − ⟨x, Aᵀu⟩| relative to ‖Ax‖‖u‖, for a random u."""
        image = self.apply(x, {}, {})
        u = torch.randn(image.shape, dtype=x.dtype, generator=keyed_generator("deepinv", "u"))
        gap = (dot(image, u) - dot(x, self.adjoint(u, {}, {}))).abs()
        return float((gap / (norm(image) * norm(u))).max())


def _given(name: Name, options: Options) -> dict[str, Any]:
    """The options that were set; a ValueError if the physics does not have them."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    given = {name: value for name, value in given.items() if value is not None}
    allowed = _MAKERS[name][0]
    if foreign := sorted(set(given) - set(allowed)):
        choices = f"it has {', '.join(allowed)}" if allowed else "it has none"
        raise ValueError(f"{name} has no option {foreign[0]!r}; {choices}")
    return given


def _package() -> Any:
    try:
        from deepinv import physics
    except ImportError as error:
        raise MissingError(
            "operator 'deepinv' needs the package deepinv, which is not installed or cannot be imported;"
            " pip install 'bltoolbox[deepinv]', or use another operator"
        ) from error
    return physics


@contextmanager
def _refusing(name: Name) -> Iterator[None]:
    """One sentence of whatever deepinv says about images or options that do not fit."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"deepinv refuses {name} for these images and options: {reason}") from error


def _converted(physics: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """With all its tensors in ``dtype``, complex ones in the complex numbers of the same precision."""
    for module in physics.modules():
        for name, value in module.named_buffers(recurse=False):
            if value.is_complex():
                setattr(module, name, value.to(device, dtype.to_complex()))
            elif value.is_floating_point():
                setattr(module, name, value.to(device, dtype))
            else:
                setattr(module, name, value.to(device))
        if isinstance(getattr(module, "dtype", None), torch.dtype):
            module.dtype = dtype
    return physics


def _as_image(y: Tensor) -> Tensor:
    """Measurements as images (B, C, H, W)."""
    if y.ndim == 2:
        return y[:, None, None]
    return y.unsqueeze(2) if y.ndim == 3 else y


def _generator(seed: int) -> torch.Generator:
    return keyed_generator("deepinv", "physics", seed)


def _kernel(options: dict[str, Any]) -> Tensor:
    return gaussian_kernel(options.pop("width", 7), options.pop("sigma", 1.0))[None, None]


def _inpainting(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    return physics.Inpainting(shape, **{"mask": 0.5} | options, rng=_generator(seed))


def _demosaicing(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    if shape[0] != 3:
        raise ValueError("it needs three channels")
    return physics.Demosaicing(shape[1:], **options)


def _decolorize(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    return physics.Decolorize(channels=shape[0], **options)


def _blur(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    return physics.Blur(filter=_kernel(options), **{"padding": "circular"} | options)


def _blur_fft(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    return physics.BlurFFT(shape, filter=_kernel(options))


def _downsampling(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    return physics.Downsampling(shape, **{"filter": "gaussian"} | options)


def _upsampling(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    larger = (shape[0], *(options.get("factor", 2) * length for length in shape[1:]))
    return physics.Upsampling(larger, **{"filter": "gaussian"} | options)


def _mri(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    if shape[0] != 2:
        raise ValueError("it needs two channels, of real and imaginary parts")
    acceleration, center = options.get("acceleration", 4.0), options.get("center_fraction", 0.08)
    columns = column_mask(acceleration, center, seed, shape[2], torch.float64, torch.device("cpu"))
    # The zero frequency is in the middle there.
    return physics.MRI(mask=torch.fft.fftshift(columns, 1).expand(shape[1:]), img_size=shape)


def _tomography(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    if shape[1] != shape[2]:
        raise ValueError("it needs square images")
    given = {"angles": 60} | options
    return physics.Tomography(img_width=shape[2], normalize=False, dtype=torch.float64, **given)


def _compressed_sensing(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    channelwise = options.get("channelwise", False)
    pixels = torch.Size(shape[1 if channelwise else 0 :]).numel()
    count = options.get("measurements", max(1, pixels // 2))
    if count * pixels > _MOST:
        raise ValueError(
            f"a matrix of {count}×{pixels} is too large; use smaller images or fewer measurements"
        )
    return physics.CompressedSensing(
        m=count, img_size=shape, channelwise=channelwise, dtype=torch.float64, rng=_generator(seed)
    )


def _single_pixel(physics: Any, shape: tuple[int, int, int], options: dict[str, Any], seed: int) -> Any:
    if shape[1] != shape[2] or shape[1] & (shape[1] - 1):
        raise ValueError("it needs square images whose side is a power of two")
    count = options.pop("measurements", shape[1] * shape[2] // 2)
    return physics.SinglePixelCamera(m=count, img_size=shape, fast=True, dtype=torch.float64, **options)


Maker = Callable[[Any, tuple[int, int, int], dict[str, Any], int], Any]
#: The options of each physics, and how it is made.
_MAKERS: dict[Name, tuple[tuple[str, ...], Maker]] = {
    "Inpainting": (("mask", "pixelwise"), _inpainting),
    "Demosaicing": ((), _demosaicing),
    "Decolorize": (("srf",), _decolorize),
    "Blur": (("sigma", "width", "padding"), _blur),
    "BlurFFT": (("sigma", "width"), _blur_fft),
    "Downsampling": (("factor", "filter", "padding"), _downsampling),
    "Upsampling": (("factor", "filter", "padding"), _upsampling),
    "MRI": (("acceleration", "center_fraction"), _mri),
    "Tomography": (("angles", "circle", "fan_beam"), _tomography),
    "CompressedSensing": (("measurements", "channelwise"), _compressed_sensing),
    "SinglePixelCamera": (("measurements", "ordering"), _single_pixel),
}
