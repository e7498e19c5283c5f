"""Computed tomography: integrals along lines, in parallel or fan beam geometry.

    (A x)_{v,d} = Σ_p a_{(v,d),p} x_p ≈ ∫ x along the ray from the source of view v to detector d

The matrix is that of Joseph's method: a ray advances along the axis closest to its direction and interpolates the image
linearly across it. Lengths are in units of the side of the image, so an integral is about the mean of the pixels on the
ray. y has the shape (C, views, detectors). The matrix is computed once and stored with its transpose, so the adjoint is
exact.

Its entries are non-negative, so ‖A‖² ≤ max_p (AᵀA v)_p / v_p for every positive v (Collatz–Wielandt). v = 1 is at least
as good as the largest row sum times the largest column sum, and a few power iterations make the bound tight.

Views are spaced evenly over `arc` degrees. With fewer views than about the side of the image in pixels, this is
sparse-view tomography; with an arc below 180, limited-angle tomography. Both have a null space. A solve starts from the
filtered back projection.

When to choose it: X-ray and electron tomography. Set `strong_convexity` or choose a coercive regularizer if there
are few views: only the regularizer determines what no ray sees.

References: Joseph, *An improved algorithm for reprojecting rays through pixel images*, IEEE TMI 1982; Natterer, *The
mathematics of computerized tomography*, 2001; for the bound Horn & Johnson, *Matrix analysis*, 2013, section 8.1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from bltoolbox.plugin import Operator, Rows, Theta, lasting

Geometry = Literal["parallel", "fan"]
#: Entries that a matrix may have: 8 GB with its transpose, in float32.
_MOST = 500_000_000


@dataclass(frozen=True)
class Scan:
    """Where the rays are; the options of the operator, as a key."""

    size: int
    views: int
    arc: float
    detectors: int
    geometry: Geometry
    source_distance: float

    @property
    def entries(self) -> int:
        """An upper bound: each ray reads two pixels of each line."""
        return 2 * self.views * self.detectors * self.size


class CT(Operator):
    """Parallel or fan beam projections.

    Args:
        size: side of the square images in pixels.
        views: number of angles.
        arc: angles are spaced evenly over this many degrees; 180 covers all parallel rays, 360 a full turn.
        detectors: detectors in each view; by default one per pixel of the diagonal.
        geometry: parallel rays, or a fan of rays from a point source.
        source_distance: distance from the source of a fan to the centre, in units of the side of the image.
    """

    def __init__(
        self,
        size: Annotated[int, Ge(2), Le(8192)] = 128,
        views: Annotated[int, Gt(0), Le(10_000)] = 60,
        arc: Annotated[float, Gt(0), Le(360)] = 180.0,
        detectors: Annotated[int, Gt(0), Le(20_000)] | None = None,
        geometry: Geometry = "parallel",
        source_distance: Annotated[float, Gt(0.75)] = 2.0,
    ) -> None:
        count = math.ceil(math.sqrt(2) * size) if detectors is None else detectors
        self.scan = Scan(size, views, arc, count, geometry, source_distance)
        if self.scan.entries > _MOST:
            raise ValueError(
                f"{views} views of {count} detectors for images of side {size} need a matrix of up to"
                f" {self.scan.entries:.1g} entries, and {_MOST:.0g} are allowed; use fewer views or smaller images"
            )

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"size": 12, "views": 7}

    def check(self, shape: Sequence[int]) -> str | None:
        size = self.scan.size
        if tuple(shape[1:]) != (size, size):
            return (
                f"size {size} is not that of the {shape[1]}×{shape[2]} images; images must be square, and size"
                " their side"
            )
        return None

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        if sentence := self.check(x.shape[1:]):
            raise ValueError(sentence)
        sums = _Multiply.apply(x.flatten(2).flatten(0, 1), *matrices(self.scan, x.dtype, x.device))
        return sums.view(*x.shape[:2], self.scan.views, self.scan.detectors)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        scan = self.scan
        if tuple(y.shape[2:]) != (scan.views, scan.detectors):
            raise ValueError(
                f"expected measurements of {scan.views} views × {scan.detectors} detectors, got"
                f" {y.shape[2]}×{y.shape[3]}; set views and detectors to those of the measurements"
            )
        matrix, transpose = matrices(scan, y.dtype, y.device)
        image = _Multiply.apply(y.flatten(2).flatten(0, 1), transpose, matrix)
        return image.view(*y.shape[:2], scan.size, scan.size)

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """Filtered back projection, scaled so that the mean of a disc is right."""
        return _constants(self.scan)[0] * self.adjoint(_ramp(y), theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        return 0.0, _constants(self.scan)[1]


class _Multiply(torch.autograd.Function):
    """A matrix times each row of a batch, with the transpose for the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.pair = matrix, transpose
        return (matrix @ rows.T.contiguous()).T.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        matrix, transpose = ctx.pair
        return _Multiply.apply(gradients[0], transpose, matrix), None, None


@lru_cache(maxsize=4)
def matrices(scan: Scan, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A and Aᵀ in compressed rows; cached, since every product uses them."""
    shape = (scan.views * scan.detectors, scan.size**2)
    with lasting():
        rows, columns, lengths = ray_entries(scan)
        lengths = lengths.to(dtype)
        return (
            _compressed(rows, columns, lengths, shape).to(device),
            _compressed(columns, rows, lengths, shape[::-1]).to(device),
        )


def _compressed(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    order = torch.argsort(rows, stable=True)
    starts = torch.zeros(shape[0] + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(rows, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compressed rows are called a beta feature
        # Indices of 32 bits are what the library that multiplies wants: others are converted in every product.
        return torch.sparse_csr_tensor(starts, columns[order].int(), values[order], shape)


@lru_cache(maxsize=16)
def _constants(scan: Scan) -> tuple[float, float]:
    """The factor of the back projection of filtered views, and an upper bound of ‖A‖²."""
    rows, columns, lengths = ray_entries(scan)

    def project(x: Tensor) -> Tensor:
        y = torch.zeros(scan.views * scan.detectors, dtype=torch.float64)
        return y.index_add_(0, rows, lengths * x[columns])

    def back(y: Tensor) -> Tensor:
        x = torch.zeros(scan.size**2, dtype=torch.float64)
        return x.index_add_(0, columns, lengths * y[rows])

    place = (torch.arange(scan.size, dtype=torch.float64) + 0.5) / scan.size - 0.5
    disc = (torch.hypot(place.unsqueeze(1), place) < 0.35).double().flatten()
    filtered = _ramp(project(disc).view(scan.views, scan.detectors))
    mean = float((back(filtered.flatten()) * disc).sum() / disc.sum())
    bound = _squared_norm(lambda v: back(project(v)), scan.size**2)
    return 1 / mean if mean > 0 else 1.0, bound


def _squared_norm(product: Callable[[Tensor], Tensor], pixels: int, iterations: int = 6) -> float:
    """An upper bound of the largest eigenvalue of a symmetric matrix without negative entries."""
    v, bound = torch.ones(pixels, dtype=torch.float64), math.inf
    for _ in range(iterations):
        image = product(v)
        seen = image > 0  # v is positive at every pixel that a ray meets; the others have no entries
        if not bool(seen.any()):
            return 0.0
        bound = min(bound, float((image[seen] / v[seen]).max()))
        v = image / image.max()
    return bound * (1 + 1e-6)  # also for entries rounded to float32


def ray_entries(scan: Scan) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and length of every entry of A that is not zero, in float64."""
    rows, columns, lengths = [], [], []
    for view in range(scan.views):
        points, directions = _rays(scan, math.radians(scan.arc * view / scan.views))
        ray, pixel, length = _joseph(points, directions, scan.size)
        rows.append(ray + view * scan.detectors)
        columns.append(pixel)
        lengths.append(length / scan.size)
    return torch.cat(rows), torch.cat(columns), torch.cat(lengths)


def _rays(scan: Scan, angle: float) -> tuple[Tensor, Tensor]:
    """A point and a unit vector (row, column) for each detector, in pixels from the centre."""
    size, detectors = scan.size, scan.detectors
    offset = torch.arange(detectors, dtype=torch.float64) - (detectors - 1) / 2
    along = torch.tensor([math.cos(angle), -math.sin(angle)], dtype=torch.float64)
    across = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
    if scan.geometry == "parallel":
        step = math.sqrt(2) * size / detectors
        return (step * offset).unsqueeze(1) * across, along.expand(detectors, 2)
    source = -scan.source_distance * size * along
    # The fan just covers the circle around the image.
    half = math.asin(math.sqrt(0.5) / scan.source_distance)
    fan = (2 * half / detectors * offset).unsqueeze(1)
    return source.expand(detectors, 2), torch.cos(fan) * along + torch.sin(fan) * across


def _joseph(points: Tensor, directions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ray, pixel and weight of every sample: one per line of pixels, between two neighbours."""
    crossings = []
    line = torch.arange(size, dtype=torch.float64)
    steep = directions[:, 0].abs() >= directions[:, 1].abs()
    for axis, chosen in ((0, steep), (1, ~steep)):
        ray = torch.nonzero(chosen).flatten()
        point, direction = points[ray], directions[ray]
        # Where each ray crosses the middle of each line of pixels, counted from the first pixel.
        travel = (line - (size - 1) / 2 - point[:, axis : axis + 1]) / direction[:, axis : axis + 1]
        crossing = point[:, 1 - axis, None] + travel * direction[:, 1 - axis, None] + (size - 1) / 2
        near = crossing.floor()
        for neighbour, weight in ((near, 1 - (crossing - near)), (near + 1, crossing - near)):
            inside = (neighbour >= 0) & (neighbour < size) & (weight > 0)
            which, step = torch.nonzero(inside, as_tuple=True)
            other = neighbour[inside].long()
            pixel = step * size + other if axis == 0 else other * size + step
            crossings.append((ray[which], pixel, weight[inside] / direction[which, axis].abs()))
    rays, pixels, lengths = zip(*crossings, strict=True)
    return torch.cat(rays), torch.cat(pixels), torch.cat(lengths)


def _ramp(y: Tensor) -> Tensor:
    """Each view filtered by the absolute frequency, padded so that its ends do not wrap around."""
    length = 2 * y.shape[-1]
    frequency = torch.fft.rfftfreq(length, device=y.device).to(y)
    # The mean keeps a little: an exact zero there would shift the whole image.
    frequency[0] = 0.25 / length
    return torch.fft.irfft(torch.fft.rfft(y, n=length) * frequency, n=length)[..., : y.shape[-1]]
