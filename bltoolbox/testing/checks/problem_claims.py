"""Claims of problems: bounds of curvature, blocks, metrics, and hypergradients that follow from the rest."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter
from bltoolbox.bilevel.tensors import dot
from bltoolbox.runs.metric import Metric
from bltoolbox.testing.checks.base import NotApplicable, Subject, fail, holds, normal, require, require_close
from bltoolbox.testing.checks.numerics import DENSE, shifted
from bltoolbox.testing.checks.problem import ACCEPTED, KIND, ORDER, bench_of
from bltoolbox.testing.reference import reference_hypergradient, reference_solve

#: Relative error of an eigenvalue that rounding explains.
ROUNDING = 1e-9


@holds(KIND, "has valid bounds of its curvature")
def _bounds(subject: Subject) -> None:
    bench = bench_of(subject)
    lower, upper = bench.at()
    for seed in (0, 1):
        x = bench.x(seed)
        low, high = _spectrum(lower, x)
        _require_bounds(lower, low, high, "the lower level")
        _require_loss_bounds(upper, x)


def _spectrum(lower: Lower, x: Tensor) -> tuple[Tensor, Tensor]:
    """The extreme eigenvalues of each task's Hessian; of random directions where it is large."""
    system = lower.linearize(x)
    return _extremes(system.hvp, x)


def _extremes(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    size = x[0].numel()
    if size <= DENSE:
        units = torch.eye(size, dtype=x.dtype).view(size, 1, *x.shape[1:])
        columns = torch.stack([product(unit.expand_as(x)).flatten(1) for unit in units], 2)
        values = torch.linalg.eigvalsh((columns + columns.mT) / 2)
        return values[:, 0], values[:, -1]
    quotients = []
    for seed in range(20):
        v = normal(*x.shape, seed=seed)
        quotients.append(dot(v, product(v)) / dot(v, v))
    stacked = torch.stack(quotients)
    return stacked.amin(0), stacked.amax(0)


def _require_bounds(lower: Lower, low: Tensor, high: Tensor, what: str) -> None:
    slack = ROUNDING * high.abs()
    for task in range(len(low)):
        mu, bound = float(lower.mu[task]), float(lower.lipschitz[task])
        require(
            mu <= float(low[task] + slack[task]),
            f"mu of {what} of task {task} is {mu:.6g}, but its Hessian has the eigenvalue {float(low[task]):.6g};"
            " it must be a lower bound at every x, or −∞ where none is known",
        )
        require(
            bound >= float(high[task] - slack[task]),
            f"lipschitz of {what} of task {task} is {bound:.6g}, but its Hessian has the eigenvalue"
            f" {float(high[task]):.6g}; it must be an upper bound at every x, or +∞ where none is known",
        )
    require(
        not lower.bounded or bool(torch.isfinite(lower.lipschitz).all()),
        "bounded says that lipschitz is known for every task, but one of them is infinite",
    )


def _require_loss_bounds(upper: Upper, x: Tensor) -> None:
    def product(v: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            slope = torch.autograd.grad(upper.value(at).sum(), at, create_graph=True)[0]
            if not slope.requires_grad:
                return torch.zeros_like(x)
            return torch.autograd.grad(slope, at, v, retain_graph=True)[0]

    low, high = _extremes(product, x)
    slack = ROUNDING * high.abs().clamp_min(1e-12)
    least = bool((low >= -slack).all()) or not upper.convex
    require(least, f"the loss is declared convex, but its Hessian has the eigenvalue {float(low.min()):.6g}")
    if upper.lipschitz is not None:
        bound = torch.as_tensor(upper.lipschitz, dtype=torch.float64).expand(len(x))
        size = torch.maximum(low.abs(), high.abs())
        require(
            bool((bound >= size - slack).all()),
            f"lipschitz of the loss is {float(bound.min()):.6g}, but its Hessian has an eigenvalue of size"
            f" {float(size.max()):.6g}; return None where none is known",
        )
    require(
        bool((upper.value(x) >= upper.infimum).all()),
        f"infimum of the loss is {upper.infimum:g}, but a value is {float(upper.value(x).min()):.6g}",
    )


@holds(KIND, "is the mean of its blocks")
def _blocks(subject: Subject) -> None:
    bench = bench_of(subject)
    (lower, upper), x = bench.at(), bench.x()
    if lower.blocks == 1 and upper.blocks == 1:
        raise NotApplicable("neither level is a finite sum")
    q, weights = normal(*x.shape, seed=4), torch.ones(len(x), dtype=torch.float64)
    cause = (
        "the mean over all blocks, not their sum, is the whole; a block of n rows has weights times blocks"
    )
    if lower.blocks > 1:
        blocks = [lower.block(torch.full((len(x),), j)) for j in range(lower.blocks)]
        for name, of in (
            ("energy", lambda block: block.energy(x).detach()),
            ("gradient", lambda block: block.gradient(x)),
            ("hvp", lambda block: block.linearize(x).hvp(q)),
        ):
            mean = torch.stack([of(block_level) for block_level in blocks]).mean(0)
            require_close(mean, of(lower), ORDER, f"the mean of {name} over {lower.blocks} blocks", cause)
        for name, value in lower.mixed(x, q, weights).items():
            mean = torch.stack([block_level.mixed(x, q, weights)[name] for block_level in blocks]).mean(0)
            require_close(
                mean, value, ORDER, f"the mean of mixed() in {name} over {lower.blocks} blocks", cause
            )
        for j, block_level in enumerate(blocks):
            _require_bounds(block_level, *_spectrum(block_level, x), what=f"block {j}")
    if upper.blocks > 1:
        pieces = [upper.block(torch.full((len(x),), j)) for j in range(upper.blocks)]
        for name, of_loss in (
            ("value", lambda block: block.value(x)),
            ("gradient", lambda block: block.gradient(x)),
        ):
            mean = torch.stack([of_loss(piece) for piece in pieces]).mean(0)
            require_close(
                mean,
                of_loss(upper),
                ORDER,
                f"the mean of {name} of the loss over {upper.blocks} blocks",
                cause,
            )


@holds(KIND, "measures its metrics of each task")
def _metrics(subject: Subject) -> None:
    bench = bench_of(subject)
    metrics = bench.problem.metrics
    if not metrics:
        raise NotApplicable("it has no metrics besides the loss")
    for name, metric in metrics.items():
        good = (
            isinstance(metric, Metric) and metric.name == name and Metric.parse(metric.as_dict()) is not None
        )
        require(good, f"metrics[{name!r}] must be a Metric with the name {name!r}, in lower case")
        require(name != "loss", "'loss' is measured for every problem; leave it out of metrics")
    x, names = bench.x(), list(metrics)
    at = bench.tasks.at(bench.theta, Counter())
    together = at.measure(names, bench.ids, x)
    for name in names:
        require(name in together, f"measure() returns no {name!r}, which is among metrics")
        values = together[name]
        good = len(values) == len(bench.ids) and all(isinstance(value, float) for value in values)
        require(good, f"measure() must return a list of one float per task for {name!r}, got {values!r}")
        alone = [at.measure([name], [k], x[k : k + 1])[name][0] for k in bench.ids]
        close = all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(alone, values, strict=True)
        )
        require(close, f"{name} of a task alone differs from its value in a batch: {alone} and {values}")


@holds(KIND, "has hypergradients that agree with differences of f")
def _hypergradient(subject: Subject) -> None:
    bench = bench_of(subject)
    (lower, upper), weights = (
        bench.at(),
        torch.full((len(bench.ids),), 1 / len(bench.ids), dtype=torch.float64),
    )
    if lower.start()[0].numel() > DENSE:
        raise NotApplicable(
            f"x has more than {DENSE} entries; let example() return options for a smaller problem"
        )
    x = reference_solve(lower, lower.start(), 1e-12)
    if float(lower.residual(x).max()) > 1e-8:
        fail(
            f"the lower level cannot be minimised: the gradient norm remains at {float(lower.residual(x).max()):.2g};"
            " example() must return options for which it is strongly convex"
        )
    z, d = (
        bench.problem.project_gradient(reference_hypergradient(lower, upper, x, weights)),
        bench.directions(),
    )
    claimed = torch.as_tensor(sum((z[name] * d[name]).sum() for name in z)).detach()

    def value(t: float) -> Tensor:
        moved_lower, moved_upper = bench.at(shifted(bench.theta, d, t))
        return weights @ moved_upper.value(reference_solve(moved_lower, x, 1e-12))

    errors = []
    for step in (1e-3, 1e-4):
        quotient = (value(step) - value(-step)) / (2 * step)
        size = max(abs(float(quotient)), abs(float(claimed)), 1e-8)
        errors.append((abs(float(quotient - claimed)) / size, float(quotient)))
    error, best = min(errors)
    require(
        error <= ACCEPTED,
        f"the derivative of f along a random direction is {float(claimed):.8g} by implicit differentiation, and"
        f" {best:.8g} by central differences; look at how energy() and the loss depend on θ",
    )
