"""What several tests of the engine share: small problems and independent references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Accuracy, Ask, Estimate, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.bilevel.warm_starts import Store
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.testing import Gain, make_oracle, smooth_images, variational

# The images are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)

SOLVERS: dict[str, type[LowerSolver]] = {"agd": AGD, "mm": MemoryGradient}
BOUNDARIES = ("valid", "zero", "periodic", "symmetric")
SHAPE = (3, 10, 12)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend on the seed alone."""
    return torch.randn(shape, dtype=torch.float64, generator=keyed_generator("test", seed)).to(dtype)


def small_foe(boundary: str = "valid", filters: int = 3, **options: object) -> FieldOfExperts:
    """A bank that is quick to differentiate numerically; ν is large enough for finite differences."""
    settings = {"kernel_size": 3, "nu": 0.05, "weight": 0.05, "start": "random"} | options
    return FieldOfExperts(filters=filters, boundary=boundary, **settings)  # type: ignore[arg-type]


def small_tv(channels: str = "joint") -> TotalVariation:
    return TotalVariation(weight=0.1, nu=0.05, channels=channels)  # type: ignore[arg-type]


REGULARIZERS: dict[str, Callable[[], Regularizer]] = {"foe": small_foe, "tv": small_tv}


def initial(regularizer: Regularizer, shape: Sequence[int] = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    """The regularizer's own parameters, with log-weights that tell the filters apart."""
    theta = regularizer.init_params(shape, keyed_generator("theta", seed))
    if "log_weights" in theta:
        theta["log_weights"] = 0.5 * normal(*theta["log_weights"].shape, seed=seed)
    return theta


def lower_level(
    regularizer: Regularizer,
    y: Tensor,
    operator: Operator | None = None,
    theta: Theta | None = None,
    **options: object,
) -> ImageLower:
    """h_i(·, θ) of measurements y, in their dtype."""
    theta = initial(regularizer, y.shape[1:]) if theta is None else theta
    theta = {name: value.to(y.dtype) for name, value in join(regularizer=theta).items()}
    problem = variational(operator or Gain(), regularizer, **options)  # type: ignore[arg-type]
    return problem.at(theta, y.shape[1:]).on(y)


def estimate_at(
    estimator: HypergradientEstimator,
    lower: ImageLower,
    upper: Upper,
    x: Tensor,
    tol: float,
    weights: Tensor | None = None,
    warm: Tensor | None = None,
) -> Estimate:
    """z at x, the linear system solved to ``tol`` from ``warm``; the weights are 1 unless given."""
    weights = torch.ones_like(lower.mu) if weights is None else weights
    memory = {} if warm is None else {"adjoint": warm}
    return estimator.estimate(Ask(lower, upper, x, lower.start(), weights, Accuracy(tol), memory))


def noisy(count: int, shape: Sequence[int] = SHAPE, noise: float = 0.1, seed: int = 0) -> Tensor:
    return smooth_images(count, shape, seed).double() + noise * normal(count, *shape, seed=seed)


def oracle_for(
    regularizer: Regularizer,
    solver: str = "mm",
    count: int = 3,
    shape: Sequence[int] = SHAPE,
    **options: object,
) -> BilevelOracle:
    """A toy problem with everything set for tight tolerances."""
    settings: dict[str, object] = {"iteration_limit": 50_000} | options
    return make_oracle(smooth_images(count, shape), regularizer, SOLVERS[solver](), CGIFT(5000), **settings)  # type: ignore[arg-type]


def measured(oracle: BilevelOracle) -> tuple[Tensor, Tensor]:
    """True images and measurements of all tasks of an oracle."""
    assert isinstance(oracle.tasks, VariationalTasks)
    sample = oracle.tasks.samples.batch(range(len(oracle.tasks)))
    assert sample.truth is not None
    return sample.truth, sample.y


def slope(function: Callable[[Tensor], Tensor | float], x: Tensor, d: Tensor, h: float = 1e-3) -> Tensor:
    """The derivative of a function at x along d, by central differences of fourth order."""
    values = [torch.as_tensor(function(x + k * h * d), dtype=torch.float64) for k in (-2, -1, 1, 2)]
    return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)


def slope_theta(
    function: Callable[[dict[str, Tensor]], Tensor | float], theta: Theta, d: Theta, h: float = 1e-3
) -> Tensor:
    """The same for a function of named tensors."""

    def along(t: Tensor) -> Tensor | float:
        return function({name: value + t * d[name] for name, value in theta.items()})

    return slope(along, torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64), h)


def directions(theta: Theta, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random directions of unit length, each block of parameters with the same share."""
    found = []
    for k in range(count):
        d = {name: normal(*v.shape, seed=100 * seed + k) / v.numel() ** 0.5 for name, v in theta.items()}
        length = flat(d).norm()
        found.append({name: value / length for name, value in d.items()})
    return found


def flat(parts: Theta) -> Tensor:
    """Named tensors as one vector, in the order of their names."""
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def relative_error(found: Theta, expected: Theta) -> float:
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())


def hessian(regularizer: Regularizer, theta: Theta, x: Tensor) -> Tensor:
    """∇²R_θ at one image x (C, H, W) as a matrix."""
    units = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    return regularizer.linearize(theta, x.expand_as(units))(units).flatten(1)


def kept(store: Store, ids: Sequence[int]) -> Tensor:
    """A copy of what a store holds for some samples, all of which it must know."""
    assert store.rows is not None and store.present[list(ids)].all()
    return store.get(ids, store.rows[: len(ids)]).clone()
