"""What `foe` and `tv` have in common, R(x) = Σ ψ(Cx): derivatives, adjoint and majorant, for every form of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import (
    BOUNDARIES,
    directions,
    flat,
    hessian,
    initial,
    lower_level,
    normal,
    slope,
    slope_theta,
    small_foe,
    small_tv,
)
from torch import Tensor

from bltoolbox.bilevel.tensors import dot
from bltoolbox.plugin import Regularizer
from bltoolbox.testing import smooth_images

Case = tuple[Regularizer, dict[str, Tensor], Tensor]


def foe(boundary: str, **options: object) -> Callable[[int], Case]:
    def case(channels: int) -> Case:
        regularizer = small_foe(boundary, **{"smoothing": "per-filter"} | options)
        theta = initial(regularizer, (channels, 8, 9))
        theta["log_smoothing"] = theta["log_smoothing"] + 0.3 * normal(len(theta["log_smoothing"]), seed=1)
        return regularizer, theta, smooth_images(2, (channels, 8, 9)).double()

    return case


def tv(coupling: str) -> Callable[[int], Case]:
    def case(channels: int) -> Case:
        regularizer = small_tv(coupling)
        return regularizer, initial(regularizer), smooth_images(2, (channels, 7, 9)).double()

    return case


CASES = {
    **{f"foe {boundary}": foe(boundary) for boundary in BOUNDARIES},
    "foe pixels": foe("symmetric", basis="pixel"),
    "foe shared": foe("valid", smoothing="shared"),
    "foe even kernels": foe("symmetric", kernel_size=4),
    "tv joint": tv("joint"),
    "tv separate": tv("separate"),
}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[1, 3], ids=["gray", "colour"])
def case(name: str, request: pytest.FixtureRequest) -> Case:
    return CASES[name](request.param)


@pytest.fixture
def colour(name: str) -> Case:
    return CASES[name](3)


def test_gradient(case: Case) -> None:
    prior, theta, x = case
    gradient, d = prior.gradient(theta, x), normal(*x.shape)
    expected = Regularizer.gradient(prior, theta, x)  # autograd of the energy
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    differences = slope(lambda x: prior.energy(theta, x), x, d, 1e-4)
    torch.testing.assert_close(dot(gradient, d), differences, rtol=1e-7, atol=1e-9)


def test_hessian_product(case: Case) -> None:
    prior, theta, x = case
    v = normal(*x.shape)
    product = prior.linearize(theta, x)(v)
    expected = Regularizer.linearize(prior, theta, x)(v)  # double backward of the energy
    torch.testing.assert_close(product, expected, rtol=1e-10, atol=1e-11)
    differences = slope(lambda x: prior.gradient(theta, x), x, v, 1e-4)
    torch.testing.assert_close(product, differences, rtol=1e-6, atol=1e-7)


def test_hessian_is_symmetric_and_positive_semidefinite(case: Case) -> None:
    prior, theta, x = case
    matrix = hessian(prior, theta, x[0])
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-12 * float(matrix.norm()))
    assert torch.linalg.eigvalsh(matrix).min() >= -1e-12 * matrix.norm()


def test_pairing_is_the_gradient_against_q(case: Case) -> None:
    prior, theta, x = case
    q = normal(*x.shape)
    expected = dot(Regularizer.gradient(prior, theta, x), q)
    torch.testing.assert_close(prior.pairing(theta, x, q), expected, rtol=1e-10, atol=1e-12)


def test_derivative_of_the_pairing_in_theta(case: Case) -> None:
    prior, theta, x = case
    q = normal(*x.shape)
    each = prior.pairing_gradients(theta, x, q)
    generic = Regularizer.pairing_gradients(prior, theta, x, q)  # one backward pass per sample
    for key in theta:
        torch.testing.assert_close(each[key], generic[key], rtol=1e-9, atol=1e-11)
    for d in directions(theta, 2):
        differences = slope_theta(lambda theta: prior.pairing(theta, x, q), theta, d)
        rows = [flat({key: part[i].detach() for key, part in each.items()}) @ flat(d) for i in (0, 1)]
        torch.testing.assert_close(torch.stack(rows), differences, rtol=1e-7, atol=1e-8)


def test_synthesis_is_the_exact_adjoint_of_analysis(case: Case) -> None:
    prior, theta, x = case
    t = prior.analyse(theta, x)
    u = normal(*t.shape)
    left, right = dot(t, u), dot(x, prior.synthesise(theta, u, x.shape[1:]))
    scale = t.flatten(1).norm(dim=1) * u.flatten(1).norm(dim=1)
    assert ((left - right).abs() <= 1e-12 * scale).all()


def test_parabola_lies_above_the_energy_and_touches_it(case: Case) -> None:
    prior, theta, x = case
    t = prior.analyse(theta, x)
    w = prior.majorant(theta, t)
    touching = prior.synthesise(theta, w * t, x.shape[1:])
    torch.testing.assert_close(touching, prior.gradient(theta, x), rtol=1e-11, atol=1e-13)
    for k, scale in enumerate((1e-3, 1e-2, 0.1, 1.0)):
        other = x + scale * normal(*x.shape, seed=k)
        t_other = prior.analyse(theta, other)
        parabola = prior.energy(theta, x) + 0.5 * dot(w, t_other**2 - t**2)
        assert (parabola >= prior.energy(theta, other) - 1e-13).all()


def test_energy_is_convex_along_segments(colour: Case) -> None:
    prior, theta, x = colour
    end = x + 0.5 * normal(*x.shape)
    e0, e1 = prior.energy(theta, x), prior.energy(theta, end)
    for t in torch.linspace(0.05, 0.95, 19).tolist():
        assert (prior.energy(theta, (1 - t) * x + t * end) < (1 - t) * e0 + t * e1).all()


def test_part_of_a_linearisation_is_the_linearisation_of_the_part(colour: Case) -> None:
    prior, _, x = colour
    x, index = smooth_images(4, x.shape[1:]).double(), torch.tensor([3, 1])
    v = normal(*x.shape)
    whole = lower_level(prior, x).linearize(x)
    torch.testing.assert_close(whole.take(index).hvp(v[index]), whole.hvp(v)[index], rtol=1e-13, atol=1e-14)


def test_memory_layout_does_not_change_the_result_and_inputs_stay_untouched(colour: Case) -> None:
    prior, theta, x = colour
    q = normal(*x.shape)
    kept = [value.clone() for value in (x, q, *theta.values())]

    def everything(x: Tensor, q: Tensor) -> list[Tensor]:
        t = prior.analyse(theta, x)
        return [
            prior.energy(theta, x),
            prior.gradient(theta, x),
            prior.linearize(theta, x)(q),
            prior.pairing(theta, x, q),
            prior.majorant(theta, t),
            prior.synthesise(theta, t, x.shape[1:]),
            *(part.detach() for part in prior.pairing_gradients(theta, x, q).values()),
        ]

    last = everything(*(v.to(memory_format=torch.channels_last) for v in (x, q)))
    for plain, other in zip(everything(x, q), last, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(now, then) for now, then in zip((x, q, *theta.values()), kept, strict=True))


def test_float32_stays_float32_and_near_float64(colour: Case) -> None:
    prior, theta, x = colour
    small, q = {key: value.float() for key, value in theta.items()}, normal(*x.shape)
    pairs = [
        (prior.energy(small, x.float()), prior.energy(theta, x)),
        (prior.gradient(small, x.float()), prior.gradient(theta, x)),
        (prior.linearize(small, x.float())(q.float()), prior.linearize(theta, x)(q)),
        (prior.pairing(small, x.float(), q.float()), prior.pairing(theta, x, q)),
        (torch.as_tensor(prior.lipschitz(small, x.shape[1:])), prior.lipschitz(theta, x.shape[1:])),
    ]
    for single, double in pairs:
        assert single.dtype == torch.float32
        assert (single - double).norm() <= 1e-5 * torch.as_tensor(double).norm()
