"""tikhonov, crr and icnn: derivatives, convexity and constants, and hypergradients through the whole stack."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.crr import ConvexRidge, Spline
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.icnn import InputConvexNetwork
from blt_builtins.regularizers.tikhonov import Tikhonov
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Batch, Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import dot, keyed_generator, norm
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.testing import Gain, make_oracle, smooth_images, variational

BOUNDARIES = ("valid", "zero", "periodic", "symmetric")
SHAPE = (2, 7, 8)


def crr(**options: object) -> ConvexRidge:
    settings = {"filters": 3, "kernel_size": 3, "knots": 7, "range": 0.6, "weight": 0.1} | options
    return ConvexRidge(**settings)  # type: ignore[arg-type]


def icnn(**options: object) -> InputConvexNetwork:
    settings = {"layers": 2, "filters": 4, "kernel_size": 3, "sharpness": 8.0, "weight": 0.1} | options
    return InputConvexNetwork(**settings)  # type: ignore[arg-type]


REGULARIZERS: dict[str, Callable[[], Regularizer]] = {
    "tikhonov-gradient": Tikhonov,
    "tikhonov-identity": lambda: Tikhonov(of="identity"),
    **{f"crr-{boundary}": lambda boundary=boundary: crr(boundary=boundary) for boundary in BOUNDARIES},
    "crr-free": lambda: crr(symmetry="free", kernel_size=2),
    "icnn": icnn,
    "icnn-shallow": lambda: icnn(layers=1, ridge=0.1),
    "icnn-deep": lambda: icnn(layers=3),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=keyed_generator("regularizers", seed))


def params(regularizer: Regularizer, channels: int = SHAPE[0]) -> dict[str, Tensor]:
    """Admissible parameters away from their symmetric start."""
    theta = regularizer.init_params((channels, *SHAPE[1:]), keyed_generator(0))
    moved = {
        name: value + 0.3 * normal(*value.shape, seed=k) for k, (name, value) in enumerate(theta.items())
    }
    return regularizer.project(moved)


@pytest.fixture(params=REGULARIZERS)
def regularizer(request: pytest.FixtureRequest) -> Regularizer:
    return REGULARIZERS[request.param]()


def slope(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, step: float = 1e-6) -> Tensor:
    """The derivative of a function along v, by central differences short enough to keep off the knots."""
    return (function(x + step * v) - function(x - step * v)) / (2 * step)


def hessian(regularizer: Regularizer, theta: Theta, x: Tensor) -> Tensor:
    """∇²R at one image as a matrix."""
    units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return regularizer.linearize(theta, x.expand_as(units))(units).flatten(1)


class TestEvery:
    def test_gradient(self, regularizer: Regularizer) -> None:
        theta, x, v = params(regularizer), normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
        gradient = regularizer.gradient(theta, x)
        torch.testing.assert_close(
            Regularizer.gradient(regularizer, theta, x), gradient, rtol=1e-11, atol=1e-13
        )
        expected = slope(lambda at: regularizer.energy(theta, at), x, v)
        torch.testing.assert_close(dot(gradient, v), expected, rtol=1e-6, atol=1e-7)

    def test_hessian_products(self, regularizer: Regularizer) -> None:
        theta, x, v = params(regularizer), normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
        product = regularizer.linearize(theta, x)(v)
        automatic = Regularizer.linearize(regularizer, theta, x)(v)
        torch.testing.assert_close(automatic, product, rtol=1e-10, atol=1e-12)
        expected = slope(lambda at: regularizer.gradient(theta, at), x, v, 1e-7)
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-6)

    def test_hessian_is_symmetric_within_its_constants(self, regularizer: Regularizer) -> None:
        theta, x = params(regularizer), 0.2 * normal(*SHAPE)
        matrix = hessian(regularizer, theta, x)
        torch.testing.assert_close(matrix, matrix.T, rtol=1e-10, atol=1e-12)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        assert float(eigenvalues[0]) >= float(regularizer.strong_convexity(theta, SHAPE)) - 1e-12
        bound = regularizer.lipschitz(theta, SHAPE)
        assert bound is None or float(eigenvalues[-1]) <= float(bound) * (1 + 1e-12)

    def test_linearisation_of_some_samples(self, regularizer: Regularizer) -> None:
        theta, x, v = params(regularizer), normal(3, *SHAPE), normal(3, *SHAPE, seed=1)
        linear = regularizer.linearize(theta, x)
        index = torch.tensor([2, 0])
        if take := getattr(linear, "take", None):
            torch.testing.assert_close(take(index)(v[index]), linear(v)[index])

    def test_convex_along_segments(self, regularizer: Regularizer) -> None:
        theta, a, b = params(regularizer), normal(8, *SHAPE), normal(8, *SHAPE, seed=1)
        ends = regularizer.energy(theta, a), regularizer.energy(theta, b)
        for s in (0.1, 0.5, 0.8):
            between = regularizer.energy(theta, (1 - s) * a + s * b)
            chord = (1 - s) * ends[0] + s * ends[1]
            assert (between <= chord + 1e-12 * chord.abs()).all()

    def test_pairing_and_its_derivative(self, regularizer: Regularizer) -> None:
        theta, x, q = params(regularizer), normal(2, *SHAPE), normal(2, *SHAPE, seed=1)
        pairing = regularizer.pairing(theta, x, q)
        torch.testing.assert_close(pairing, dot(regularizer.gradient(theta, x), q))
        rows = regularizer.pairing_gradients(theta, x, q)
        for name, value in theta.items():
            v = normal(*value.shape, seed=2)
            expected = slope(
                lambda at, name=name: regularizer.pairing(dict(theta) | {name: at}, x, q),  # type: ignore[misc]
                value,
                v,
            )
            found = (rows[name] * v).flatten(1).sum(1)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    def test_project_is_idempotent_and_takes_the_start(self, regularizer: Regularizer) -> None:
        theta = {name: normal(*value.shape) for name, value in params(regularizer).items()}
        once = regularizer.project(theta)
        torch.testing.assert_close(regularizer.project(once), once)
        start = regularizer.init_params((3, 8, 8), keyed_generator(0))
        torch.testing.assert_close(regularizer.project(start), start)

    def test_batch_independence_and_dtypes(self, regularizer: Regularizer) -> None:
        theta, x = params(regularizer), normal(3, *SHAPE)
        energy = regularizer.energy(theta, x)
        assert energy.shape == (3,)
        torch.testing.assert_close(regularizer.energy(theta, x[1:2]), energy[1:2])
        single = {name: value.float() for name, value in theta.items()}
        assert regularizer.energy(single, x.float()).dtype == torch.float32
        gradient = regularizer.gradient(single, x.float())
        assert gradient.dtype == regularizer.linearize(single, x.float())(x.float()).dtype == torch.float32
        torch.testing.assert_close(gradient.double(), regularizer.gradient(theta, x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        "name", ["tikhonov-gradient", "tikhonov-identity", "crr-valid", "crr-free", "icnn"]
    )
    def test_hypergradient_is_that_of_central_differences(self, name: str) -> None:
        regularizer = REGULARIZERS[name]()
        shape = (1, 7, 8)
        theta = join(regularizer=params(regularizer, 1))
        oracle = make_oracle(
            smooth_images(2, shape), regularizer, AGD(), CGIFT(5000), noise=0.1, iteration_limit=50_000
        ).on(Batch([0, 1], [1.5, 0.5]))
        z = oracle.hypergradient(theta, Accuracy(1e-12), Accuracy(1e-12)).gradient
        for seed in range(3):
            d = {key: normal(*value.shape, seed=seed) for key, value in theta.items()}
            d = variational(Gain(), regularizer).project_gradient(d)
            step = 1e-5
            ahead, behind = (
                oracle.value(
                    {key: value + sign * step * d[key] for key, value in theta.items()}, Accuracy(1e-12)
                ).value
                for sign in (1, -1)
            )
            expected = (ahead - behind) / (2 * step)
            found = sum(float((z[key] * d[key]).sum()) for key in theta)
            scale = math.sqrt(sum(float(z[key].square().sum()) for key in theta))
            scale *= math.sqrt(sum(float(d[key].square().sum()) for key in theta))
            assert abs(found - expected) <= 1e-5 * max(abs(expected), 0.1 * scale)


class TestTikhonov:
    def test_constant_images_are_free(self) -> None:
        x = torch.full((1, *SHAPE), 0.4, dtype=torch.float64)
        theta = params(Tikhonov())
        assert float(Tikhonov().energy(theta, x)) == 0
        assert not Tikhonov().gradient(theta, x).any()

    def test_lipschitz_constant_is_exact(self) -> None:
        regularizer = Tikhonov(weight=0.7)
        theta = regularizer.init_params((1, 8, 8), keyed_generator(0))
        for shape in ((1, 4, 6), (1, 1, 5), (1, 3, 3)):
            matrix = hessian(regularizer, theta, normal(*shape))
            largest = float(torch.linalg.eigvalsh(matrix)[-1])
            assert float(regularizer.lipschitz(theta, shape)) == pytest.approx(largest, rel=1e-10)

    def test_analysis_and_synthesis_are_adjoint(self) -> None:
        for regularizer in (Tikhonov(), Tikhonov(of="identity")):
            x = normal(2, *SHAPE)
            t = regularizer.analyse({}, x)
            s = normal(*t.shape, seed=1)
            torch.testing.assert_close(dot(t, s), dot(x, regularizer.synthesise({}, s, SHAPE)))

    @pytest.mark.parametrize("solver", [AGD(), MemoryGradient()])
    def test_denoising_has_a_closed_form(self, solver: LowerSolver) -> None:
        regularizer, y = Tikhonov(weight=0.5), normal(2, 1, 6, 7)
        theta = regularizer.init_params((1, 8, 8), keyed_generator(0))
        lower = variational(Gain(), regularizer).at(join(regularizer=theta), y.shape[1:]).on(y)
        x = solve(solver, lower, lower.start(), 1e-12).x
        system = torch.eye(42, dtype=torch.float64) + hessian(regularizer, theta, y[0])
        exact = torch.linalg.solve(system, y.flatten(1).T).T.view_as(y)
        torch.testing.assert_close(x, exact, rtol=0, atol=1e-11)


class TestSpline:
    @pytest.mark.parametrize("symmetry", ["odd", "free"])
    def test_derivative_is_monotone_continuous_and_zero_at_zero(self, symmetry: str) -> None:
        regularizer = crr(symmetry=symmetry)
        spline = regularizer._spline(params(regularizer))
        t = torch.linspace(-1, 1, 4001, dtype=torch.float64).view(1, 1, 1, -1).expand(1, 3, 1, -1)
        derivative = spline.derivative(t)
        steepest = float(spline.curvatures.max())
        rise = derivative.diff(dim=3)
        assert (rise >= -1e-14).all()
        assert float(rise.max()) <= steepest * 5e-4 * (1 + 1e-9)
        zero = torch.zeros(1, 3, 1, 1, dtype=torch.float64)
        assert torch.equal(spline.derivative(zero), zero)
        assert torch.equal(spline.potential(zero), zero)
        assert (spline.potential(t) >= 0).all()
        if symmetry == "odd":
            torch.testing.assert_close(spline.derivative(-t), -derivative, rtol=1e-9, atol=0)
            torch.testing.assert_close(spline.potential(-t), spline.potential(t), rtol=1e-9, atol=0)

    def test_derivative_is_constant_beyond_the_range(self) -> None:
        regularizer = crr()
        spline = regularizer._spline(params(regularizer))
        far = torch.tensor([0.61, 2.0, 50.0], dtype=torch.float64).view(1, 1, 1, 3).expand(1, 3, 1, 3)
        for t in (far, -far):
            derivative = spline.derivative(t)
            torch.testing.assert_close(derivative, derivative[..., :1].expand_as(derivative))
            assert torch.equal(spline.curvature(t), torch.zeros_like(t))
            growth = (spline.potential(t)[..., 2] - spline.potential(t)[..., 1]) / (t[..., 2] - t[..., 1])
            torch.testing.assert_close(growth, derivative[..., 0])

    def test_is_the_integral_of_its_slopes(self) -> None:
        slopes = torch.tensor([[4.0, 1.0, 2.0, 0.5]], dtype=torch.float64)  # on [−1, −½], …, [½, 1]
        spline = Spline.of(slopes, 0.5)
        t = torch.tensor([-2.0, -0.75, 0.25, 0.75, 3.0], dtype=torch.float64).view(1, 1, 1, -1)
        expected = torch.tensor([-2.5, -1.5, 0.5, 1.125, 1.25], dtype=torch.float64).view(1, 1, 1, -1)
        torch.testing.assert_close(spline.derivative(t), expected)

    def test_starts_near_the_field_of_experts(self) -> None:
        ridge = ConvexRidge(range=0.1, knots=21, weight=0.04, boundary="symmetric")
        experts = FieldOfExperts(nu=0.01, weight=0.04, boundary="symmetric", start="differences")
        x = smooth_images(2, (3, 16, 16)).double()
        ours = ridge.gradient(ridge.init_params((3, 8, 8), keyed_generator(0)), x)
        theirs = experts.gradient(experts.init_params((3, 8, 8), keyed_generator(0)), x)
        assert (norm(ours - theirs) <= 0.1 * norm(theirs)).all()

    def test_has_no_majorant(self) -> None:
        assert not crr().offers("majorant")

    def test_lipschitz_constant_is_tight_where_all_responses_are_steepest(self) -> None:
        regularizer = crr(boundary="periodic")
        theta = regularizer.init_params((1, 8, 8), keyed_generator(0))
        # At a constant image every response is at the steepest interval of the initial potential.
        matrix = hessian(regularizer, theta, torch.full((1, 12, 12), 0.3, dtype=torch.float64))
        largest = float(torch.linalg.eigvalsh(matrix)[-1])
        assert float(regularizer.lipschitz(theta, (1, 12, 12))) <= 1.1 * largest

    def test_an_even_number_of_knots_is_refused(self) -> None:
        with pytest.raises(ValueError, match="odd"):
            ConvexRidge(knots=20)


class TestNetwork:
    def test_ramp_is_smooth_in_double_precision(self) -> None:
        """No jump where an implementation might switch to the identity."""
        t = torch.linspace(0, 6, 20_001, dtype=torch.float64)
        ramp = icnn()._ramp(t)
        exact = t + torch.log1p(torch.exp(-8 * t)) / 8
        assert float((ramp - exact).abs().max()) < 1e-15 * 8

    @pytest.mark.parametrize("layers", [1, 2, 3])
    def test_initial_gradient_is_of_the_size_of_the_experts(self, layers: int) -> None:
        network, experts = InputConvexNetwork(layers=layers), FieldOfExperts()
        x = smooth_images(2, (3, 20, 20)).double()
        ours = norm(network.gradient(network.init_params((3, 8, 8), keyed_generator(0)), x))
        theirs = norm(experts.gradient(experts.init_params((3, 8, 8), keyed_generator(0)), x))
        assert ((ours > 0.1 * theirs) & (ours < 10 * theirs)).all()

    def test_small_images_are_refused(self) -> None:
        network = icnn(layers=3)
        assert network.check((1, 7, 7)) is None
        assert "see 7×7 pixels" in (network.check((1, 6, 9)) or "")

    @pytest.mark.parametrize("options", [{"filters": 3}, {"kernel_size": 4}])
    def test_nonsense_is_refused(self, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="use an"):
            icnn(**options)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_denoises_with_backtracking(self, dtype: torch.dtype) -> None:
        network = icnn()
        theta = {key: value.to(dtype) for key, value in params(network).items()}
        y = smooth_images(2, SHAPE).to(dtype)
        lower = variational(Gain(), network).at(join(regularizer=theta), SHAPE).on(y)
        assert not lower.bounded and bool(lower.lipschitz.isinf().all())
        solution = solve(AGD(), lower, lower.start(), 1e-4)
        assert (lower.residual(solution.x) <= 1e-4).all()
