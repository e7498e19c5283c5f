"""Computed tomography: the matrix of a plain loop, integrals in closed form, and constants that are true and tight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_operators import check_hypergradient

from blt_builtins.operators.ct import CT
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.tensors import dot, keyed_generator, norm
from bltoolbox.restoration.metrics import METRICS, measure
from bltoolbox.testing import smooth_images, variational

SCANS = {
    "parallel": CT(size=11, views=9),
    "parallel-even": CT(size=8, views=6, detectors=13),
    "sparse": CT(size=12, views=3),
    "limited": CT(size=10, views=7, arc=70.0),
    "fan": CT(size=11, views=9, arc=360.0, geometry="fan", source_distance=1.3),
    "fan-near": CT(size=9, views=5, arc=360.0, geometry="fan", source_distance=0.8, detectors=7),
}


@pytest.fixture(params=SCANS)
def ct(request: pytest.FixtureRequest) -> CT:
    return SCANS[request.param]


def rays(ct: CT) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """A point and a direction of every ray, as (x to the right, y upwards) for an image of side 1."""
    scan = ct.scan
    for view, detector in itertools.product(range(scan.views), range(scan.detectors)):
        angle = math.radians(scan.arc) * view / scan.views
        # Rays of the first view run down the columns, and turn to the left from there.
        offset = (detector + 0.5) / scan.detectors - 0.5
        if scan.geometry == "parallel":
            direction = (-math.sin(angle), -math.cos(angle))
            side = math.sqrt(2) * offset
            yield (math.cos(angle) * side, -math.sin(angle) * side), direction
        else:
            fan = 2 * math.asin(math.sqrt(0.5) / scan.source_distance) * offset
            source = (scan.source_distance * math.sin(angle), scan.source_distance * math.cos(angle))
            yield source, (-math.sin(angle - fan), -math.cos(angle - fan))


def dense(ct: CT) -> NDArray[np.float64]:
    """A by its definition, one reading at a time: Joseph's method."""
    n = ct.scan.size
    matrix = np.zeros((ct.scan.views * ct.scan.detectors, n, n))
    for row, ((px, py), (dx, dy)) in zip(matrix, rays(ct), strict=True):
        down = abs(dy) >= abs(dx)
        for line in range(n):
            if down:
                place = 0.5 - (line + 0.5) / n
                across = (px + (place - py) / dy * dx + 0.5) * n - 0.5
            else:
                place = (line + 0.5) / n - 0.5
                across = (0.5 - (py + (place - px) / dx * dy)) * n - 0.5
            for pixel in (math.floor(across), math.floor(across) + 1):
                if 0 <= pixel < n:
                    length = (1 - abs(across - pixel)) / n / max(abs(dx), abs(dy))
                    row[(line, pixel) if down else (pixel, line)] += length
    return matrix.reshape(-1, n * n)


def matrix(ct: CT) -> torch.Tensor:
    n = ct.scan.size
    units = torch.eye(n * n, dtype=torch.float64).view(-1, 1, n, n)
    return ct.apply(units, {}, {}).flatten(1).T


def test_the_matrix_is_that_of_a_plain_loop(ct: CT) -> None:
    np.testing.assert_allclose(matrix(ct).numpy(), dense(ct), atol=1e-12)


def test_the_adjoint_is_its_transpose(ct: CT) -> None:
    n = ct.scan.size
    rows = ct.scan.views * ct.scan.detectors
    units = torch.eye(rows, dtype=torch.float64).view(-1, 1, ct.scan.views, ct.scan.detectors)
    assert torch.equal(ct.adjoint(units, {}, {}).flatten(1), matrix(ct))
    x = torch.randn(3, 2, n, n, dtype=torch.float64, generator=keyed_generator("ct"))
    image = ct.apply(x, {}, {})
    y = torch.randn(image.shape, dtype=torch.float64, generator=keyed_generator("ct", 1))
    gap = (dot(image, y) - dot(x, ct.adjoint(y, {}, {}))).abs()
    assert (gap <= 1e-12 * norm(image) * norm(y)).all()


def test_the_bound_of_the_norm_is_true_and_tight(ct: CT) -> None:
    true = float(torch.linalg.matrix_norm(matrix(ct), 2)) ** 2
    least, most = ct.spectrum({}, (1, ct.scan.size, ct.scan.size), {})
    assert least == 0
    assert true <= most <= 1.25 * true
    single = matrix(ct).float().double()  # the entries that a run in float32 works with
    assert float(torch.linalg.matrix_norm(single, 2)) ** 2 <= most


@pytest.mark.parametrize("geometry", ["parallel", "fan"])
def test_integrals_of_a_gaussian(geometry: str) -> None:
    n, width, (cx, cy) = 96, 0.08, (0.11, -0.07)
    ct = CT(size=n, views=12, arc=360.0, geometry=geometry, detectors=60)  # type: ignore[arg-type]
    place = (np.arange(n) + 0.5) / n - 0.5
    image = np.exp(-0.5 * ((place - cx) ** 2 + (-place[:, None] - cy) ** 2) / width**2)
    y = ct.apply(torch.from_numpy(image).view(1, 1, n, n), {}, {}).flatten().numpy()
    distances = np.array([abs((cx - px) * dy - (cy - py) * dx) for (px, py), (dx, dy) in rays(ct)])
    exact = math.sqrt(2 * math.pi) * width * np.exp(-0.5 * (distances / width) ** 2)
    assert np.abs(y - exact).max() < 0.01 * exact.max()


@pytest.mark.parametrize("geometry", ["parallel", "fan"])
def test_filtered_back_projection_of_many_views_is_near_the_image(geometry: str) -> None:
    ct = CT(size=32, views=90, arc=360.0, geometry=geometry)  # type: ignore[arg-type]
    x = smooth_images(2, (1, 32, 32)).double()
    edge = torch.hypot(*torch.meshgrid(*2 * [torch.linspace(-1, 1, 32)], indexing="ij")) < 0.8
    found = ct.start(ct.apply(x * edge, {}, {}), {}, {})
    assert all(value > 18 for value in measure([METRICS["psnr"]], found, x * edge)["psnr"])


def test_second_derivatives_pass_through() -> None:
    ct = CT(size=4, views=3)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64, generator=keyed_generator("ct", 2), requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ct.apply(x, {}, {}).pow(3), (x,))


def test_a_hypergradient_is_that_of_central_differences() -> None:
    problem = variational(CT(size=10, views=4), TotalVariation(weight=0.05, nu=0.1), strong_convexity=0.05)
    check_hypergradient(problem, (1, 10, 10))


def test_what_does_not_fit_is_refused() -> None:
    ct = CT(size=8, views=4)
    assert "images must be square" in (ct.check((1, 8, 10)) or "")
    with pytest.raises(ValueError, match="4 views × 12 detectors, got 5×12"):
        ct.adjoint(torch.zeros(1, 1, 5, 12), {}, {})
    with pytest.raises(ValueError, match="use fewer views or smaller images"):
        CT(size=8192, views=10_000)
