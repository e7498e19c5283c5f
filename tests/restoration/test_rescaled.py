"""R_s(x) = s² R(x/s): consistent with itself, and x̂ scales along."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import SOLVERS, flat, initial, lower_level, noisy, normal, slope, small_foe, small_tv

from blt_builtins.operators.blur import Blur
from blt_builtins.regularizers.crr import ConvexRidge
from blt_builtins.regularizers.icnn import InputConvexNetwork
from blt_builtins.regularizers.tikhonov import Tikhonov
from blt_builtins.regularizers.tv_nonsmooth import NonsmoothTotalVariation
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.restoration.rescaled import Rescaled
from bltoolbox.restoration.roles import Regularizer

SCALES = (0.3, 2.5)
REGULARIZERS: dict[str, Callable[[], Regularizer]] = {
    "foe": lambda: small_foe("symmetric"),
    "tv": small_tv,
    "crr": lambda: ConvexRidge(filters=3, kernel_size=3, knots=5, range=0.5),
    "icnn": lambda: InputConvexNetwork(filters=4, kernel_size=3, sharpness=10.0),
    "tikhonov": Tikhonov,
}


@pytest.fixture(params=REGULARIZERS)
def base(request: pytest.FixtureRequest) -> Regularizer:
    return REGULARIZERS[request.param]()


@pytest.mark.parametrize("scale", SCALES)
def test_derivatives_belong_to_the_energy(base: Regularizer, scale: float) -> None:
    regularizer, theta = Rescaled(base, scale), initial(base)
    x, d, v = (normal(2, 3, 8, 9, seed=seed) for seed in (1, 2, 3))
    expected = scale**2 * base.energy(theta, x / scale)
    torch.testing.assert_close(regularizer.energy(theta, x), expected)
    by_differences = slope(lambda x: regularizer.energy(theta, x).sum(), x, d, h=1e-5)
    torch.testing.assert_close(
        (regularizer.gradient(theta, x) * d).sum(), by_differences, rtol=1e-6, atol=1e-9
    )
    if type(base) is not ConvexRidge:  # its second derivative jumps
        by_differences = slope(lambda x: (regularizer.gradient(theta, x) * v).sum(), x, d, h=1e-5)
        found = (regularizer.linearize(theta, x)(d) * v).sum()
        torch.testing.assert_close(found, by_differences, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("scale", SCALES)
def test_mixed_derivatives_belong_to_the_gradient(base: Regularizer, scale: float) -> None:
    regularizer, theta = Rescaled(base, scale), initial(base)
    x, q = normal(2, 3, 8, 9, seed=1), normal(2, 3, 8, 9, seed=2)
    pairing = regularizer.pairing(theta, x, q)
    torch.testing.assert_close(pairing, (regularizer.gradient(theta, x) * q).sum((1, 2, 3)))
    leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
    total = torch.autograd.grad(regularizer.pairing(leaves, x, q).sum(), list(leaves.values()))
    each = regularizer.pairing_gradients(theta, x, q)
    expected = dict(zip(leaves, total, strict=True))
    torch.testing.assert_close(flat({name: part.sum(0) for name, part in each.items()}), flat(expected))


@pytest.mark.parametrize("scale", SCALES)
def test_bounds_and_the_majorant(base: Regularizer, scale: float) -> None:
    regularizer, theta = Rescaled(base, scale), initial(base)
    x, v = normal(1, 3, 8, 9, seed=1), normal(1, 3, 8, 9, seed=2)
    product = float((regularizer.linearize(theta, x)(v) * v).sum() / (v * v).sum())
    bound = regularizer.lipschitz(theta, (3, 8, 9))
    assert bound is None or product <= float(bound)
    assert product >= float(regularizer.strong_convexity(theta, (3, 8, 9))) - 1e-12
    if not base.offers("majorant"):
        assert not regularizer.offers("majorant")
        return
    assert regularizer.offers("majorant")
    t = regularizer.analyse(theta, x)
    gradient = regularizer.synthesise(theta, regularizer.majorant(theta, t) * t, (3, 8, 9))
    torch.testing.assert_close(gradient, regularizer.gradient(theta, x))


@pytest.mark.parametrize("base", [small_foe("symmetric"), small_tv()], ids=["foe", "tv"])
@pytest.mark.parametrize("scale", SCALES)
def test_constants_bound_what_they_should(base: Regularizer, scale: float) -> None:
    regularizer, theta = Rescaled(base, scale), initial(base)
    x, d, q = (normal(1, 3, 8, 9, seed=seed) for seed in (1, 2, 3))
    radius = torch.tensor([0.1], dtype=torch.float64)
    d, q = 0.1 * d / d.norm(), q / q.norm()
    found = regularizer.constants(theta, x, radius)
    change = regularizer.linearize(theta, x + d)(q) - regularizer.linearize(theta, x)(q)
    assert change.norm() <= found.hessian_lipschitz * 0.1
    near, far = (regularizer.pairing_gradients(theta, point, q) for point in (x, x + d))
    assert flat(near).norm() <= found.mixed_norm
    assert (flat(far) - flat(near)).norm() <= found.mixed_lipschitz * 0.1


@pytest.mark.parametrize("solver", ["agd", "mm"])
@pytest.mark.parametrize("blurred", [False, True], ids=["identity", "blur"])
@pytest.mark.parametrize("scale", SCALES)
def test_minimisers_scale_along(base: Regularizer, solver: str, blurred: bool, scale: float) -> None:
    if solver == "mm" and not base.offers("majorant"):
        pytest.skip("mm needs a majorant")
    options = {"operator": Blur(size=3, sigma=1.0), "strong_convexity": 0.1} if blurred else {}
    y = noisy(2)
    found = []
    for regularizer, measured in ((base, y), (Rescaled(base, scale), scale * y)):
        lower = lower_level(regularizer, measured, **options)  # type: ignore[arg-type]
        found.append(solve(SOLVERS[solver](), lower, lower.start(), 1e-9, limit=20_000).x)
    torch.testing.assert_close(found[1], scale * found[0], rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", SCALES)
def test_the_conjugate_belongs_to_the_rescaled_potential(scale: float) -> None:
    """By Moreau, u = prox of step·ψ* at p and t = (p − u)/step attain ψ(t) + ψ*(u) = ⟨t, u⟩."""
    base = NonsmoothTotalVariation()
    regularizer, theta = Rescaled(base, scale), initial(base)
    x, step = normal(2, 3, 8, 9, seed=1), 0.7
    t = regularizer.analyse(theta, x)
    torch.testing.assert_close(regularizer.potential_sum(theta, t), regularizer.energy(theta, x))
    p = normal(*t.shape, seed=2)
    u = regularizer.prox_conjugate(theta, p, step)
    t = (p - u) / step
    torch.testing.assert_close(t, regularizer.prox_potential(theta, p / step, 1 / step))
    fenchel = regularizer.potential_sum(theta, t) + regularizer.conjugate(theta, u)
    torch.testing.assert_close(fenchel, (t * u).flatten(1).sum(1))


def test_a_scale_is_positive() -> None:
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            Rescaled(small_tv(), scale)


def test_every_method_of_a_regularizer_is_that_of_the_base_rescaled() -> None:
    """A method left to the role would answer for a regularizer without it."""
    public = {
        name for name in dir(Regularizer) if not name.startswith("_") and callable(getattr(Regularizer, name))
    }
    assert public - set(vars(Rescaled)) <= {"example"}


@pytest.mark.parametrize("scale", SCALES)
def test_potentials_are_those_of_the_energy(scale: float) -> None:
    base = small_foe("symmetric")
    theta = base.prepare(initial(base))
    plain, scaled = base.potentials(theta), Rescaled(base, scale).potentials(theta)
    assert plain is not None and scaled is not None
    torch.testing.assert_close(scaled.t / scale, plain.t)
    torch.testing.assert_close(scaled.values, scale**2 * plain.values)
