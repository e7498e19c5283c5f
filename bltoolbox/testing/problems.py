"""Bilevel problems whose answers are known in closed form.

    oracle = make_oracle(smooth_images(8), Tikhonov(), solver, hypergradient)
    theta = {"regularizer.log_weight": torch.zeros(3, dtype=torch.float64)}
    z = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-8), Accuracy(1e-8))

With a ``Tikhonov`` regularizer and the plain ``Gain`` operator (A = I), ``x̂``, ``f``, ``∇f`` and the minimiser of f are
formulas with which a solver, a hypergradient or an upper-level optimizer can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn import functional as F

from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.problem import Upper
from bltoolbox.bilevel.records import Batch, Bound, Rows, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.roles import (
    Data,
    DataTerm,
    Forward,
    Noise,
    Operator,
    Regularizer,
    Sample,
    UpperLoss,
)
from bltoolbox.restoration.variational import Constraint, Variational, VariationalTasks


class Images(Data):
    """Images from memory, (N, C, H, W) with values in [0, 1]."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def clean(self, ids: Sequence[int]) -> Tensor:
        return self.images[torch.as_tensor(ids, dtype=torch.long)].float()


def smooth_images(count: int, shape: Sequence[int] = (3, 12, 14), seed: int = 0) -> Tensor:
    """Random images of ``shape`` (C, H, W): smooth ramps with a sharp edge, values in [0.1, 0.9].

    Image i depends only on the seed and on i.
    """
    channels, height, width = shape
    images = []
    for i in range(count):
        generator = keyed_generator("smooth images", seed, i)
        coarse = torch.rand(2, channels, 3, 3, dtype=torch.float64, generator=generator)
        ramps = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
        mask = torch.rand(1, 1, 3, 3, dtype=torch.float64, generator=generator)
        mask = F.interpolate(mask, (height, width), mode="bilinear", align_corners=True)[0] > 0.5
        images.append(0.1 + 0.8 * torch.where(mask, ramps[0], ramps[1]))
    return torch.stack(images).float()


class Gain(Operator):
    """A_θ x = e^θ x: the identity, or with ``learned`` an operator of one parameter that starts at θ = ``log_gain``."""

    def __init__(self, learned: bool = False, log_gain: float = 0.0) -> None:
        self.learned = learned
        self.log_gain = log_gain
        self.identity = not learned and log_gain == 0

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        value = torch.full((1,), self.log_gain, dtype=torch.float64)
        return {"log_gain": value} if self.learned else {}

    def apply(self, x: Tensor, theta: Theta, context: Rows) -> Tensor:
        return theta["log_gain"].exp() * x if self.learned else x * math.exp(self.log_gain)

    def adjoint(self, y: Tensor, theta: Theta, context: Rows) -> Tensor:
        return self.apply(y, theta, context)

    def spectrum(self, theta: Theta, shape: Sequence[int], context: Rows) -> tuple[Bound, Bound]:
        squared = (2 * theta["log_gain"]).exp().squeeze() if self.learned else math.exp(2 * self.log_gain)
        return squared, squared

    def symbol(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        squared, _ = self.spectrum(theta, shape, {})
        return torch.ones(tuple(shape[1:]), dtype=torch.float64) * torch.as_tensor(squared).cpu()


class SquaredMisfit(DataTerm):
    """D(t; y) = ½‖t − y‖²."""

    quadratic = True
    rescales = True

    def value(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (t - y).square().flatten(1).sum(1)

    def gradient(self, theta: Theta, t: Tensor, y: Tensor) -> Tensor:
        return t - y

    def curvature(self, theta: Theta, t: Tensor, y: Tensor) -> float:
        return 1.0

    def spectrum(self, theta: Theta, y: Tensor) -> tuple[Bound, Bound]:
        return 1.0, 1.0

    def third(self, theta: Theta, y: Tensor) -> Bound:
        return 0.0

    def majorant(self, theta: Theta, t: Tensor, y: Tensor) -> float:
        return 1.0

    def prox(self, theta: Theta, t: Tensor, y: Tensor, step: Tensor | float) -> Tensor:
        return (t + step * y) / (1 + step)


@dataclass(frozen=True)
class SquaredDistance(Upper):
    """g(x) = scale·‖x − x*‖², summed in float64."""

    truth: Tensor
    scale: float = 1.0
    infimum: float = 0.0

    @property
    def lipschitz(self) -> float:  # type: ignore[override]
        return 2 * self.scale

    def value(self, x: Tensor) -> Tensor:
        return self.scale * (x - self.truth).double().square().flatten(1).sum(1)

    def gradient(self, x: Tensor) -> Tensor:
        return 2 * self.scale * (x - self.truth)

    def take(self, index: Tensor) -> SquaredDistance:
        return replace(self, truth=self.truth[index])


class White(Noise):
    """Gaussian noise of one level."""

    level: float

    def __init__(self, level: float) -> None:
        self.level = level

    def sample(self, t: Tensor, generator: torch.Generator) -> Tensor:
        return t + self.level * torch.randn(t.shape, dtype=t.dtype, generator=generator)


class SquaredLoss(UpperLoss):
    """The squared distance to the true image."""

    def bind(self, sample: Sample, forward: Forward) -> SquaredDistance:
        assert sample.truth is not None
        return SquaredDistance(sample.truth)


def variational(
    operator: Operator,
    regularizer: Regularizer,
    constraint: Constraint = "none",
    strong_convexity: float = 0.0,
    samples: Mapping[str, Samples] | None = None,
) -> Variational:
    """A problem with the squared misfit and the squared distance."""
    return Variational(
        operator,
        regularizer,
        SquaredMisfit(),
        SquaredLoss(),
        constraint,
        strong_convexity,
        samples=samples or {},
    )


class Tikhonov(Regularizer):
    """R_θ(x) = ½ Σ_c e^{θ_c} Σ_p d_p x_cp², one parameter per channel.

    The fixed weights d run from 1 down to 1/condition over the pixels, equally spaced in the logarithm. With A = I:

        x̂_cp  = s_cp y_cp,                 s_cp = 1/(1 + e^{θ_c} d_p)
        f(θ)   = 1/m Σ_i v_i ‖x̂_i − x*_i‖²
        ∂f/∂θ_c = −2/m Σ_i v_i Σ_p (x̂_icp − x*_icp) s_cp (1 − s_cp) y_icp

    and for condition 1, f is smallest where s_c = Σ⟨y_c, x*_c⟩/Σ‖y_c‖², that is at θ_c = log(1/s_c − 1).

    Args:
        weight: initial e^{θ_c}.
        condition: largest over smallest eigenvalue of ∇²R.
    """

    def __init__(
        self, weight: Annotated[float, Gt(0)] = 1.0, condition: Annotated[float, Ge(1)] = 1.0
    ) -> None:
        self.weight = weight
        self.condition = condition

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        return {"log_weight": torch.full((shape[0],), math.log(self.weight), dtype=torch.float64)}

    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        return 0.5 * (self._curvature(theta, x) * x.square()).sum((1, 2, 3))

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        return self._curvature(theta, x) * x

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return theta["log_weight"].exp().max()

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor:
        return theta["log_weight"].exp().min() / self.condition

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        return x

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        return t

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        return self._curvature(theta, t).expand_as(t)

    def analysis_norm(self, theta: Theta, shape: Sequence[int]) -> float:
        return 1.0

    def potential_sum(self, theta: Theta, t: Tensor) -> Tensor:
        return 0.5 * (self._curvature(theta, t) * t.square()).flatten(1).sum(1, dtype=torch.float64)

    def conjugate(self, theta: Theta, p: Tensor) -> Tensor:
        return 0.5 * (p.square() / self._curvature(theta, p)).flatten(1).sum(1, dtype=torch.float64)

    def prox_potential(self, theta: Theta, t: Tensor, step: Tensor | float) -> Tensor:
        return t / (1 + step * self._curvature(theta, t))

    def solution(self, theta: Theta, y: Tensor) -> Tensor:
        """x̂ of measurements y with A = I."""
        return y / (1 + self._curvature(theta, y))

    def value(self, theta: Theta, y: Tensor, x_true: Tensor, weights: Tensor | None = None) -> float:
        """f_v(θ); the weights v are 1 unless given."""
        error = (self.solution(theta, y) - x_true).square().sum((1, 2, 3))
        return float((error if weights is None else weights * error).mean())

    def value_gradient(
        self, theta: Theta, y: Tensor, x_true: Tensor, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """∇f_v(θ)."""
        shrinkage = 1 / (1 + self._curvature(theta, y))
        slope = -2 * (shrinkage * y - x_true) * shrinkage * (1 - shrinkage) * y
        each = slope.sum((2, 3))
        return {"log_weight": (each if weights is None else weights.view(-1, 1) * each).mean(0)}

    def minimiser(self, y: Tensor, x_true: Tensor) -> dict[str, Tensor]:
        """The θ that minimises f, for condition 1 and if y must be shrunk."""
        if self.condition != 1:
            raise ValueError("the minimiser has a closed form only for condition 1")
        shrinkage = (y * x_true).sum((0, 2, 3)) / y.square().sum((0, 2, 3))
        return {"log_weight": (1 / shrinkage - 1).log()}

    def _curvature(self, theta: Theta, x: Tensor) -> Tensor:
        """e^{θ_c} d_p, shape (C, H, W)."""
        height, width = x.shape[-2:]
        decades = -math.log10(self.condition)
        d = torch.logspace(0, decades, height * width, dtype=x.dtype, device=x.device).view(height, width)
        return theta["log_weight"].exp().view(-1, 1, 1) * d


def make_oracle(
    images: Tensor,
    regularizer: Regularizer,
    solver: LowerSolver,
    hypergradient: HypergradientEstimator,
    operator: Operator | None = None,
    *,
    noise: float = 0.1,
    seed: int = 0,
    constraint: Constraint = "none",
    strong_convexity: float = 0.0,
    dtype: torch.dtype = torch.float64,
    operator_theta: Theta | None = None,
    **options: Any,
) -> BilevelOracle:
    """An oracle for ``images`` with Gaussian noise; ``options`` are those of ``BilevelOracle``, e.g. ``chunk``."""
    operator = operator or Gain()
    samples = Samples(
        Images(images), operator, White(noise), seed=seed, dtype=dtype, operator_theta=operator_theta
    )
    problem = variational(operator, regularizer, constraint, strong_convexity, {"training": samples})
    tasks = VariationalTasks(problem, samples)
    return BilevelOracle(problem, tasks, solver, hypergradient, seed=seed, **options)


def full_batch(oracle: BilevelOracle) -> Batch:
    """All samples of an oracle, with weight 1."""
    m = len(oracle.tasks)
    return Batch(range(m), [1.0] * m)
