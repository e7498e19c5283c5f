"""Computed tomography: integrals along lines, in parallel or fan beam geometry.

    (A x)_{v,d} = Σ_p a_{(v,d),p} x_p ≈ ∫ x along the ray from the source of view v to detector d

The matrix is that of Joseph's method: a ray advances along the axis closest to its direction and interpolates the image
linearly across it. Lengths are in units of the side of the image, so an integral is about the mean of the pixels on the
ray. y has the shape (C, views, detectors). The matrix is computed once and stored with its transpose, so the adjoint is
exact; its entries are non-negative, so ‖A‖² is at most its largest row sum times its largest column sum.

Views are spaced evenly over `arc` degrees. With fewer views than about the side of the image in pixels, this is
sparse-view tomography; with an arc below 180, limited-angle tomography. Both have a null space. A solve starts from the
filtered back projection.

When to choose it: X-ray and electron tomography. Set `strong_convexity` or choose a coercive regularizer if there
are few views: only the regularizer determines what no ray sees.

References: Joseph, *An improved algorithm for reprojecting rays through pixel images*, IEEE TMI 1982; Natterer, *The
mathematics of computerized tomography*, 2001.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from bltoolbox.plugin import Operator, Rows, Theta

Geometry = Literal["parallel", "fan"]


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
        self.size = size
        self.views = views
        self.arc = arc
        self.detectors = math.ceil(math.sqrt(2) * size) if detectors is None else detectors
        self.geometry: Geometry = geometry
        self.source_distance = source_distance

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"size": 12, "views": 7}

    def check(self, shape: Sequence[int]) -> str | None:
        if tuple(shape[1:]) != (self.size, self.size):
            return (
                f"size {self.size} is not that of the {shape[1]}×{shape[2]} images; images must be square, and size"
                " their side"
            )
        return None

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        if sentence := self.check(x.shape[1:]):
            raise ValueError(sentence)
        sums = _Multiply.apply(x.flatten(2).flatten(0, 1), *self._matrices(x))
        return sums.view(*x.shape[:2], self.views, self.detectors)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        matrix, transpose = self._matrices(y)
        image = _Multiply.apply(y.flatten(2).flatten(0, 1), transpose, matrix)
        return image.view(*y.shape[:2], self.size, self.size)

    def start(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        """Filtered back projection, scaled so that the mean of a disc is right."""
        return self._scale() * self.adjoint(_ramp(y), theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[float, float]:
        rows, columns, lengths = self._entries()
        by_row = torch.zeros(self.views * self.detectors, dtype=torch.float64).index_add_(0, rows, lengths)
        by_column = torch.zeros(self.size**2, dtype=torch.float64).index_add_(0, columns, lengths)
        return 0.0, float(by_row.max() * by_column.max())

    def _scale(self) -> float:
        """The factor of the back projection of filtered views."""
        place = (torch.arange(self.size, dtype=torch.float64) + 0.5) / self.size - 0.5
        disc = (torch.hypot(place.unsqueeze(1), place) < 0.35).double()
        back = self.adjoint(_ramp(self.apply(disc.view(1, 1, *disc.shape), {}, {})), {}, {})[0, 0]
        mean = float((back * disc).sum() / disc.sum())
        return 1 / mean if mean > 0 else 1.0

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return ray_entries(
            self.size, self.views, self.arc, self.detectors, self.geometry, self.source_distance
        )

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        options = (self.size, self.views, self.arc, self.detectors, self.geometry, self.source_distance)
        return _matrices(options, like.dtype, like.device)


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
def _matrices(options: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A and Aᵀ in compressed rows; cached, since every product uses them."""
    rows, columns, lengths = ray_entries(*options)
    size, views, _, detectors, *_ = options
    shape = (views * detectors, size**2)
    return (
        _compressed(rows, columns, lengths, shape).to(device=device, dtype=dtype),
        _compressed(columns, rows, lengths, shape[::-1]).to(device=device, dtype=dtype),
    )


def _compressed(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    order = torch.argsort(rows * shape[1] + columns)
    counts = torch.bincount(rows, minlength=shape[0])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # compressed rows are called a beta feature
        return torch.sparse_csr_tensor(starts, columns[order], values[order], shape)


@lru_cache(maxsize=2)
def ray_entries(
    size: int, views: int, arc: float, detectors: int, geometry: Geometry, source_distance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of every non-zero entry of A, in float64."""
    rows, columns, lengths = [], [], []
    for view in range(views):
        angle = math.radians(arc * view / views)
        points, directions = _rays(angle, size, detectors, geometry, source_distance)
        ray, pixel, length = _joseph(points, directions, size)
        rows.append(ray + view * detectors)
        columns.append(pixel)
        lengths.append(length / size)
    return torch.cat(rows), torch.cat(columns), torch.cat(lengths)


def _rays(
    angle: float, size: int, detectors: int, geometry: Geometry, source_distance: float
) -> tuple[Tensor, Tensor]:
    """A point and a unit vector (row, column) for each detector, in pixels from the centre."""
    offset = torch.arange(detectors, dtype=torch.float64) - (detectors - 1) / 2
    along = torch.tensor([math.cos(angle), -math.sin(angle)], dtype=torch.float64)
    across = torch.tensor([math.sin(angle), math.cos(angle)], dtype=torch.float64)
    if geometry == "parallel":
        step = math.sqrt(2) * size / detectors
        return (step * offset).unsqueeze(1) * across, along.expand(detectors, 2)
    source = -source_distance * size * along
    # The fan just covers the circle around the image.
    half = math.asin(math.sqrt(0.5) / source_distance)
    fan = (2 * half / detectors * offset).unsqueeze(1)
    return source.expand(detectors, 2), torch.cos(fan) * along + torch.sin(fan) * across


def _joseph(points: Tensor, directions: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ray, pixel and weight of every sample: one per line of pixels, between two neighbours."""
    found = []
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
            found.append((ray[which], pixel, weight[inside] / direction[which, axis].abs()))
    rays, pixels, lengths = zip(*found, strict=True)
    return torch.cat(rays), torch.cat(pixels), torch.cat(lengths)


def _ramp(y: Tensor) -> Tensor:
    """Each view filtered by the absolute frequency, padded so that its ends do not wrap around."""
    length = 2 * y.shape[-1]
    frequency = torch.fft.rfftfreq(length, device=y.device).to(y)
    # The mean keeps a little: an exact zero there would shift the whole image.
    frequency[0] = 0.25 / length
    return torch.fft.irfft(torch.fft.rfft(y, n=length) * frequency, n=length)[..., : y.shape[-1]]
