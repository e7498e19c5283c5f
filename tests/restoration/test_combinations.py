"""Hypergradients of data terms with noise that suits them, losses and operators, against differences in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from blt_builtins.data_terms.huber import Huber
from blt_builtins.data_terms.least_squares import LeastSquares
from blt_builtins.data_terms.poisson import Poisson
from blt_builtins.data_terms.student_t import StudentT
from blt_builtins.data_terms.transmission import Transmission
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.lbfgs import LBFGS
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.lower_solvers.newton_cg import NewtonCG
from blt_builtins.noises.gaussian import Gaussian
from blt_builtins.noises.poisson import PoissonNoise
from blt_builtins.noises.poisson_gaussian import PoissonGaussian
from blt_builtins.noises.salt_and_pepper import SaltAndPepper
from blt_builtins.noises.speckle import Speckle
from blt_builtins.noises.transmission import TransmissionNoise
from blt_builtins.noises.uniform import Uniform
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.ct import CT
from blt_builtins.operators.identity import Identity
from blt_builtins.operators.inpainting import Inpainting
from blt_builtins.regularizers.tv import TotalVariation
from blt_builtins.upper_losses.huber import HuberLoss
from blt_builtins.upper_losses.recorrupted import Recorrupted
from blt_builtins.upper_losses.squared_error import SquaredError
from blt_builtins.upper_losses.ssim import SSIMLoss
from blt_builtins.upper_losses.whiteness import Whiteness
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Accuracy, Ask, Counter
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.errors import BltError
from bltoolbox.plugin import DataTerm, Lower, LowerSolver, Noise, Operator, Theta, Upper, UpperLoss
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational, VariationalTasks
from bltoolbox.testing import Images, smooth_images

SIDE = 12
SHAPE = (1, SIDE, SIDE)


class Weighted(DataTerm):
    """½e^w (t − y)² with a learned w."""

    quadratic = True

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.full((1,), 0.2, dtype=torch.float64)}

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * theta["log_weight"].exp() * (t - y).square().flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["log_weight"].exp() * (t - y)

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return theta["log_weight"].exp().expand_as(t)


TERMS: dict[str, DataTerm] = {
    "least-squares": LeastSquares(),
    "huber": Huber(delta=0.1),
    "poisson": Poisson(peak=50.0, background=0.2),
    "student-t": StudentT(kappa=1.0),
    "transmission": Transmission(attenuation=2.0),
    "learned weight": Weighted(),
}
NOISES: dict[str, Noise] = {
    "gaussian": Gaussian(0.05),
    "uniform": Uniform(0.2),
    "salt-and-pepper": SaltAndPepper(0.1),
    "speckle": Speckle(50.0),
    "poisson": PoissonNoise(peak=50.0, background=0.2),
    "poisson-gaussian": PoissonGaussian(peak=50.0, background=0.2),
    "transmission": TransmissionNoise(photons=500.0, attenuation=2.0),
}
#: The noise that each data term is meant for.
FITTING = {
    "least-squares": "gaussian",
    "huber": "salt-and-pepper",
    "student-t": "salt-and-pepper",
    "poisson": "poisson",
    "transmission": "transmission",
    "learned weight": "gaussian",
}
OTHERS = [("least-squares", name) for name in ("uniform", "poisson-gaussian", "speckle")]
LOSSES: dict[str, UpperLoss] = {
    "squared-error": SquaredError(),
    "huber": HuberLoss(),
    "ssim": SSIMLoss(),
    "recorrupted": Recorrupted(0.5, sigma=0.05),
    "whiteness": Whiteness(),
}
OPERATORS: dict[str, Operator] = {
    "identity": Identity(),
    "blur": Blur(size=3, sigma=1.0),
    "learned blur": Blur(size=3, sigma=1.0, learned=True),
    "ct": CT(SIDE, views=9),
    "inpainting": Inpainting(missing=0.3),
}
THETA = {"log_weight": -2.0, "log_smoothing": -2.0}


def samples_of(term: DataTerm, loss: UpperLoss, operator: Operator, noise: str) -> Samples:
    return Samples(
        Images(smooth_images(2, SHAPE)),
        operator,
        NOISES[noise],
        loss=loss,
        training=True,
        check=term.check_measurements,
        dtype=torch.float64,
    )


def bench(
    term: DataTerm,
    loss: UpperLoss,
    operator: Operator,
    noise: str = "gaussian",
    theta: dict[str, Tensor] | None = None,
    samples: Samples | None = None,
) -> tuple[Samples, dict[str, Tensor], ImageLower, Upper]:
    """As training sees them: measurements simulated, and split where the loss does so."""
    samples = samples or samples_of(term, loss, operator, noise)
    problem = Variational(operator, TotalVariation(), term, loss, strong_convexity=0.3)
    if theta is None:
        own = {name: torch.full((1,), value, dtype=torch.float64) for name, value in THETA.items()}
        others = {"operator": operator, "data_term": term}
        generator = keyed_generator("combinations")
        theta = join(regularizer=own, **{k: one.init_params(SHAPE, generator) for k, one in others.items()})
    lower, upper = VariationalTasks(problem, samples).at(theta, Counter()).on([0, 1])
    return samples, theta, lower, upper


def minimiser(lower: Lower, start: Tensor | None = None) -> Tensor:
    found = solve(NewtonCG(), lower, lower.start() if start is None else start, 1e-11, limit=200)
    assert float(found.residual.max()) < 1e-9
    return found.x


COMBINATIONS = [(*pair, operator) for pair in FITTING.items() for operator in OPERATORS]
COMBINATIONS += [(*pair, "blur") for pair in OTHERS]


def triples() -> Iterator[ParameterSet]:
    """Every two of a data term, an operator and a loss meet in the quick ones, as in a Latin square."""
    for k, (term, noise, operator) in enumerate(COMBINATIONS):
        row, column = divmod(k, len(OPERATORS))
        for number, loss in enumerate(LOSSES):
            quick = number == (row + column) % len(LOSSES)
            yield pytest.param(term, noise, operator, loss, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("term", "noise", "operator", "loss"), list(triples()))
def test_hypergradients_agree_with_central_differences(
    term: str, noise: str, operator: str, loss: str
) -> None:
    parts = TERMS[term], LOSSES[loss], OPERATORS[operator], noise
    samples, theta, lower, upper = bench(*parts)
    x = minimiser(lower)
    weights = torch.tensor([0.7, 1.3], dtype=torch.float64)
    z = CGIFT().estimate(Ask(lower, upper, x, x, weights, Accuracy(1e-12))).gradient
    size = float(sum(part.square().sum() for part in z.values()) ** 0.5)
    for k, (name, value) in enumerate(theta.items()):
        d = torch.randn(value.shape, dtype=torch.float64, generator=keyed_generator("direction", k))
        ends = []
        for t in (1e-4, -1e-4):
            _, _, moved, judge = bench(*parts, theta=theta | {name: value + t * d}, samples=samples)
            ends.append(float(weights @ judge.value(minimiser(moved, x))))
        quotient, claimed = (ends[0] - ends[1]) / 2e-4, float((z[name] * d).sum())
        assert abs(quotient - claimed) <= 1e-5 * max(abs(quotient), 0.1 * size), (name, quotient, claimed)


@pytest.mark.parametrize("solver", [AGD(), LBFGS(), MemoryGradient()], ids=["agd", "lbfgs", "mm"])
@pytest.mark.parametrize("term", TERMS)
def test_solvers_find_the_minimiser_of_every_data_term(term: str, solver: LowerSolver) -> None:
    """The global curvature that majorises Poisson's term makes `mm` correct, if slow."""
    if isinstance(solver, MemoryGradient) and not TERMS[term].offers("majorant"):
        pytest.skip("mm needs a majorant")
    _, _, lower, _ = bench(TERMS[term], SquaredError(), Blur(size=3, sigma=1.0), FITTING[term])
    expected = minimiser(lower)
    found = solve(solver, lower, lower.start(), 1e-7, limit=20_000)
    torch.testing.assert_close(found.x, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("term", TERMS)
def test_constants_of_the_lower_level_hold(term: str) -> None:
    """μ ≤ ∇²h ≤ L at the minimiser and far from it, for each sample."""
    _, _, lower, _ = bench(TERMS[term], SquaredError(), Blur(size=3, sigma=1.0), FITTING[term])
    for x in (minimiser(lower), 5 * torch.randn(2, 1, SIDE, SIDE, dtype=torch.float64)):
        hessian = lower.linearize(x)
        for sample in range(2):
            part = hessian.take(torch.tensor([sample]))
            identity = torch.eye(SIDE**2, dtype=torch.float64).view(-1, 1, 1, SIDE, SIDE)
            columns = torch.stack([part.hvp(row).flatten() for row in identity])
            values = torch.linalg.eigvalsh((columns + columns.T) / 2)
            assert float(lower.mu[sample]) <= float(values[0]) + 1e-9
            assert float(values[-1]) <= float(lower.lipschitz[sample]) * (1 + 1e-9)


def test_a_single_outlier_pulls_less_and_less() -> None:
    """The force of an entry: least squares grows without end, huber is bounded, student-t vanishes."""
    y = torch.zeros(1, 1, 1, 3, dtype=torch.float64)
    t = torch.tensor([[[[0.01, 1.0, 100.0]]]], dtype=torch.float64)
    force = {
        name: term.gradient({}, t, y)[0, 0, 0]
        for name, term in TERMS.items()
        if name not in ("poisson", "transmission", "learned weight")
    }
    torch.testing.assert_close(force["least-squares"], t[0, 0, 0])
    assert float(force["huber"].max()) <= 1
    assert float(force["student-t"][2]) < float(force["student-t"][1])


def test_counts_that_a_loss_makes_negative_are_refused() -> None:
    with pytest.raises(BltError, match="counts cannot be negative, but the smallest measurement is"):
        bench(TERMS["poisson"], Recorrupted(2.0, sigma=0.5), Identity(), "poisson")


def test_poisson_refuses_negative_counts() -> None:
    y = torch.tensor([[[[1.0, -0.5]]]])
    assert "negative" in (Poisson().check_measurements(y) or "")
    assert Poisson().check_measurements(y.abs()) is None
