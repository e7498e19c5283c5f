"""Blur: convolution of each channel with a kernel.

    (A x)_p = Σ_s k_s (E x)_{p − s}

E extends the image beyond its border: mirrored, periodically, by zeros, or not at all (`valid`: y has only the pixels
whose neighbourhood lies inside the image, and is smaller than x by the size of the kernel minus one). The adjoint is
exact for each rule. The kernel is a Gaussian of `size` and `sigma`, a matrix, or an ``.npy`` file; it is used as given,
so divide it by its sum to preserve brightness. Its centre is entry ⌊K/2⌋ in each direction.

With `learned: true` the kernel is a parameter: k = softmax(θ), non-negative with sum 1, initially flat. Measurements
are still made with the true kernel, which training has to find (semi-blind deblurring).

‖A‖² is bounded by min(max|k̂|², ‖k‖₁ max(A_{|k|}ᵀ1)): the maximum of the spectrum, or Schur's test. The smallest
eigenvalue of AᵀA is 0 or too small to be useful: accuracies are estimated unless the recipe sets `strong_convexity`.

When to choose it: deblurring. `symmetric` hides the border; `valid` is the realistic rule for photographs.

References: Hansen, Nagy & O'Leary, *Deblurring Images*, SIAM 2006; for the bound on the spectrum by a grid, Ehlich &
Zeller, *Schwankung von Polynomen zwischen Gitterpunkten*, Math. Z. 1964.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor
from torch.nn import functional as F

from blt_builtins.borders import extended, folded, line_source, margins
from blt_builtins.operators.arrays import read_matrix
from blt_builtins.symbols import cosine_sums, even_lags
from bltoolbox.plugin import Constant, Operator, Rows, Theta, image_layout

Boundary = Literal["symmetric", "periodic", "zero", "valid"]


class Blur(Operator):
    """Convolution with a kernel.

    Args:
        kernel: a matrix, the path of an .npy file that contains one, or null for a Gaussian.
        size: side of the Gaussian kernel.
        sigma: standard deviation of the Gaussian kernel, in pixels.
        boundary: how the image is extended beyond its border; with `valid`, y is smaller than x.
        learned: whether the kernel is learned, starting flat; measurements are made with the given one.
    """

    caption = "Kernel"

    def __init__(
        self,
        kernel: list[list[float]] | str | None = None,
        size: Annotated[int, Gt(0)] = 7,
        sigma: Annotated[float, Gt(0)] = 2.0,
        boundary: Boundary = "symmetric",
        learned: bool = False,
    ) -> None:
        self.kernel = gaussian_kernel(size, sigma) if kernel is None else _given(kernel)
        self._constant = Constant(torch.stack([self.kernel, self.kernel.flip(0, 1)]))
        self.boundary: Boundary = boundary
        self.learned = learned
        if learned and (self.kernel.min() < 0 or abs(float(self.kernel.sum()) - 1) > 1e-6):
            raise ValueError(
                "a learned kernel is nonnegative with sum 1, which the given one is not;"
                " divide it by its sum or set learned: false"
            )

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_kernel": torch.zeros_like(self.kernel)} if self.learned else {}

    def check(self, shape: Sequence[int]) -> str | None:
        height, width = self.kernel.shape
        if self.boundary in ("symmetric", "valid") and (height > shape[1] or width > shape[2]):
            return (
                f"the {height}×{width} kernel is larger than the {shape[1]}×{shape[2]} images;"
                " use a smaller kernel or larger images"
            )
        return None

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        learned = "log_kernel" in theta
        kernel = self._kernel(theta).flip(0, 1) if learned else self._constant.like(x)[1]
        return _correlate(_extend(x, kernel.shape, self.boundary), kernel)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return _convolve_adjoint(y, self._kernel(theta, y), self.boundary)

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """y, with its border pixels repeated if y is smaller than x."""
        if self.boundary != "valid":
            return y
        rows, columns = (margins(length) for length in self.kernel.shape)
        return F.pad(y, (*columns, *rows), mode="replicate")

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, Tensor]:
        kernel = self._kernel(theta).detach().double()
        size = max(kernel.shape)
        grid = max(128, 2 ** math.ceil(math.log2(16 * size)))
        # |k̂|² is a trigonometric polynomial of degree K − 1: the grid misses its maximum by a known factor.
        peak = torch.fft.rfft2(kernel, s=(grid, grid)).abs().max()
        spectrum = (peak / math.cos(math.pi * (size - 1) / grid)).square()
        smaller = (
            n - k + 1 if self.boundary == "valid" else n for n, k in zip(shape[1:], kernel.shape, strict=True)
        )
        ones = torch.ones(1, 1, *smaller, dtype=kernel.dtype, device=kernel.device)
        schur = kernel.abs().sum() * _convolve_adjoint(ones, kernel.abs(), self.boundary).max()
        # A mirror repeats pixels: the spectrum of a kernel that is not symmetric itself bounds nothing there.
        return 0.0, schur if self.boundary == "symmetric" else torch.minimum(spectrum, schur)

    def symbol(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        lags = even_lags(self._kernel(theta).detach().double().unsqueeze(0))
        return cosine_sums(lags[0, 0], shape)

    def pictures(self, theta: Theta) -> Tensor | None:
        return self._kernel(theta)[None, None] if "log_kernel" in theta else None

    def _kernel(self, theta: Theta, like: Tensor | None = None) -> Tensor:
        """The learned kernel or, without θ, the true one."""
        if "log_kernel" in theta:
            log_kernel = theta["log_kernel"]
            return log_kernel.flatten().softmax(0).view_as(log_kernel)
        return self.kernel if like is None else self._constant.like(like)[0]


def gaussian_kernel(size: int, sigma: float) -> Tensor:
    """A Gaussian with sum 1, sampled at the centres of ``size`` × ``size`` pixels."""
    distance = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = (-0.5 * (distance / sigma).square()).exp()
    line = line / line.sum()
    return torch.outer(line, line)


def _given(kernel: list[list[float]] | str) -> Tensor:
    if isinstance(kernel, str):
        matrix = read_matrix(kernel, "kernel")
    else:
        if not kernel or not kernel[0] or len({len(row) for row in kernel}) > 1:
            raise ValueError(
                "the rows of kernel differ in length or are empty; give a matrix such as [[1, 2], [3, 4]]"
            )
        matrix = torch.tensor(kernel, dtype=torch.float64)
    if not bool(torch.isfinite(matrix).all()) or not bool(matrix.any()):
        raise ValueError("kernel holds a NaN, an infinity or only zeros; give finite numbers, not all zero")
    return matrix


def _correlate(x: Tensor, kernel: Tensor, padding: tuple[int, int] = (0, 0)) -> Tensor:
    """Σ_s k_s x_{p+s} of each channel, where the kernel fits into the image and a frame of zeros."""
    channels = x.shape[1]
    weight = kernel.expand(channels, 1, *kernel.shape)
    return F.conv2d(image_layout(x), weight, padding=padding, groups=channels)


def _convolve_adjoint(y: Tensor, kernel: Tensor, boundary: Boundary) -> Tensor:
    """Aᵀ y: the transposed convolution on the extended image, then Eᵀ."""
    height, width = kernel.shape
    if boundary in ("symmetric", "periodic") and y.device.type != "cpu":
        return folded(_correlate(y, kernel, (height, width)), (height, width), boundary)
    x = _correlate(y, kernel, (height - 1, width - 1))
    if boundary == "valid":
        return x
    for dim, size in ((2, height), (3, width)):
        length = y.shape[dim]
        if boundary == "zero":
            x = x.narrow(dim, margins(size)[0], length)
        else:
            empty = x.new_zeros(*x.shape[:dim], length, *x.shape[dim + 1 :])
            x = empty.index_add(dim, line_source(length, size, boundary).beside(x), x)
    return image_layout(x)


def _extend(x: Tensor, size: Sequence[int], boundary: Boundary) -> Tensor:
    """E x: the image extended by the size of the kernel."""
    if boundary == "valid":
        return x
    if boundary == "zero":
        return F.pad(x, (*margins(size[1]), *margins(size[0])))
    if x.device.type != "cpu":
        return extended(x, (size[0], size[1]), boundary)
    for dim in (2, 3):
        x = x.index_select(dim, line_source(x.shape[dim], size[dim - 2], boundary).beside(x))
    return x
