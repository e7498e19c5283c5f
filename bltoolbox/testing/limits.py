"""The declared limit of a biased hypergradient: the error of z along the settings that its class names.

e_k = ‖z_k − ∇f‖ / ‖∇f‖        at setting k; z_k is the mean over several draws if the estimator is stochastic
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Accuracy, Ask, BiasLimit, Effort, Estimate, Rows, Solution, Status
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.bilevel.tensors import norm
from bltoolbox.testing.reference import reference_solve

#: What the error must end below, and by how much it must fall from each setting to the next.
SMALL, FALL = 1e-2, 0.5
#: Errors below this are rounding, and need not fall further.
FLOOR = 1e-6
#: Standard errors by which a mean over draws may be off.
DEVIATIONS = 5.0
#: By how much the error may exceed what a declared order predicts; its leading term need not dominate at once.
ORDER_SLACK = 2.0
#: Draws over which a stochastic estimate is averaged, and what several standard errors of the mean may amount to.
DRAWS, UNCERTAIN = 8, 0.05


@dataclass(frozen=True)
class Point:
    """The relative error of z at one setting, and the standard error of a mean over draws in the same unit."""

    setting: str
    error: float
    noise: float = 0.0

    def __str__(self) -> str:
        chance = f" ± {_percent(self.noise)}" if self.noise else ""
        return f"{_percent(self.error)}{chance} at {self.setting}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %"


def minimise(lower: Lower, start: Tensor, effort: Effort) -> Solution:
    """What ``Ask.minimise`` does in a run, by the reference solver."""
    tol = float(lower.gradient_tol(effort.tol).min()) if isinstance(effort, Accuracy) else 0.0
    limit = 20_000 if isinstance(effort, Accuracy) else effort.count
    x = reference_solve(lower, start, max(tol, 1e-12), limit).to(start)
    residual = lower.residual(x)
    count = torch.full_like(residual, limit, dtype=torch.long)
    status = Status.CONVERGED if isinstance(effort, Accuracy) else Status.STEPS
    return Solution(x, residual, residual / lower.mu, count, (status,) * len(x))


def ask_at(
    lower: Lower, upper: Upper, x: Tensor, weights: Tensor, tol: float, memory: Rows | None = None
) -> Ask:
    """What a run asks at x, with a solver and an approximate inverse Hessian that belong to no plugin."""
    return Ask(
        lower,
        upper,
        x,
        lower.start(),
        weights,
        Accuracy(tol),
        memory or {},
        minimise=minimise,
        inverse=partial(rough_inverse, lower, x),
    )


def rough_inverse(lower: Lower, x: Tensor, v: Tensor) -> Tensor:
    """(∇²h + cI)⁻¹v, c a third of the mean eigenvalue: as a quasi-Newton method may have built it, off by tens of
    percent."""
    system, size = lower.linearize(x), x[0].numel()
    units = torch.eye(size, dtype=x.dtype, device=x.device).view(size, 1, *x.shape[1:])
    hessian = torch.stack([system.product(unit.expand_as(x)).flatten(1) for unit in units], 2)
    shift = hessian.diagonal(dim1=1, dim2=2).mean(1) / 3
    damped = hessian + torch.diag_embed(shift.unsqueeze(1).expand(-1, size))
    return torch.linalg.solve(damped, v.flatten(1).unsqueeze(-1)).view_as(v)


def repeated(estimator: HypergradientEstimator, ask: Ask, calls: int = 1) -> Estimate:
    """The last of several estimates at the same θ, each with the memory and x that the previous one returned."""
    memory = {
        name: row.new_zeros(len(ask.solution), *row.shape[1:])
        for name, row in estimator.keeps(ask.lower, ask.upper).items()
    }
    ask = replace(ask, memory=memory)
    for k in range(calls):
        estimate = estimator.estimate(replace(ask, call=ask.call + k))
        x = ask.solution if estimate.x is None else estimate.x
        ask = replace(ask, memory={**ask.memory, **estimate.memory}, solution=x)
    return estimate


def mean_estimate(
    estimator: HypergradientEstimator, ask: Ask, calls: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """z and its standard error; for a stochastic estimator the mean over draws, unless they are all the same."""
    z = repeated(estimator, ask, calls).gradient
    exact = z, {name: torch.zeros_like(entry) for name, entry in z.items()}
    if not estimator.stochastic:
        return exact
    drawn = [z]
    for k in range(1, DRAWS):
        drawn.append(repeated(estimator, replace(ask, call=ask.call + k * calls), calls).gradient)
        if k == 1 and all(torch.equal(entry, z[name]) for name, entry in drawn[1].items()):
            return exact  # one block, and nothing else to draw
    rows = {name: torch.stack([z[name] for z in drawn]) for name in drawn[0]}
    mean = {name: entry.mean(0) for name, entry in rows.items()}
    return mean, {name: entry.std(0) / DRAWS**0.5 for name, entry in rows.items()}


def extended(limit: BiasLimit, more: int) -> BiasLimit:
    """The settings continued by their last ratio, for problems on which those declared do not suffice."""
    sequences = [*limit.options.values(), *([limit.calls] if limit.calls else [])]
    if limit.condition or not all(_grows(values) for values in sequences):
        return limit
    return replace(
        limit,
        options={name: _continued(values, more) for name, values in limit.options.items()},
        calls=_continued(limit.calls, more) if limit.calls else (),
    )


def _grows(values: Sequence[Any]) -> bool:
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values
    )


def _continued(values: Sequence[Any], more: int) -> tuple[Any, ...]:
    whole = all(isinstance(value, int) for value in values)
    ratio = values[-1] / values[-2]
    tail = [values[-1] * ratio ** (k + 1) for k in range(more)]
    return (*values, *(round(value) if whole else value for value in tail))


def shortfall(limit: BiasLimit, points: Sequence[Point]) -> str | None:
    """A sentence if the errors do not fall as declared; None if they do, as far as chance allows to say."""
    for k in range(1, len(points)):
        before, here = points[k - 1], points[k]
        allowed = FALL * before.error
        if limit.order is not None:
            values = next(iter(limit.options.values()))
            allowed = min(allowed, ORDER_SLACK * before.error * (values[k - 1] / values[k]) ** limit.order)
        slack = DEVIATIONS * (here.noise + FALL * before.noise)
        if not here.error <= max(allowed + slack, FLOOR):
            rate = f" (order {limit.order:g})" if limit.order is not None else ""
            return f"the error of z is {before} and {here}, but should fall to {_percent(allowed)}{rate}"
    last = points[-1]
    if not last.error <= SMALL + DEVIATIONS * last.noise:
        return f"the error of z is still {last}, the last setting, and should end below {_percent(SMALL)}"
    return None


def follow(
    limit: BiasLimit, error_at: Callable[[Mapping[str, Any], int, float | None], tuple[float, float]]
) -> list[Point]:
    """The errors along a limit; ``error_at(options, calls, condition)`` measures one, with its standard error."""
    points = []
    for k in range(len(limit)):
        condition = limit.condition[k] if limit.condition else None
        error, noise = error_at(limit.options_at(k), limit.calls_at(k), condition)
        points.append(Point(limit.describe(k), error, noise))
    return points


def relative(z: Tensor, noise: Tensor, expected: Tensor) -> tuple[float, float]:
    """‖z − z*‖/‖z*‖ and the standard error in the same unit."""
    size = norm(expected.unsqueeze(0)).clamp_min(1e-300)
    return float(norm((z - expected).unsqueeze(0)) / size), float(norm(noise.unsqueeze(0)) / size)
