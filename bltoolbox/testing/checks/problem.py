"""Properties of problems: derivatives of both levels in x and θ, bounds, blocks, batches, splits and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Counter, Theta
from bltoolbox.bilevel.roles import Problem
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import dot, keyed_generator
from bltoolbox.runs.metric import Metric
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import (
    DENSE,
    batches,
    best_difference,
    derivative_fails,
    describe_batch,
    require_theta_derivative,
    shifted,
)
from bltoolbox.testing.reference import reference_hypergradient, reference_solve

KIND = "problem"
SPLITS = ("training", "validation", "evaluation")
LIKE = torch.zeros((), dtype=torch.float64)
#: Tasks that are tried at once.
COUNT = 3
#: Relative errors that rounding explains: of bounds, and of sums in another order.
ROUNDING, ORDER = 1e-9, 1e-10
#: Accepted relative error of the hypergradient.
ACCEPTED = 1e-5


@dataclass(frozen=True)
class _Bench:
    """Some tasks at a θ near the initial one, and a random x."""

    problem: Problem
    tasks: Tasks
    theta: dict[str, Tensor]

    @property
    def ids(self) -> list[int]:
        return list(range(min(COUNT, len(self.tasks))))

    def at(self, theta: Theta | None = None) -> tuple[Lower, Upper]:
        return self.tasks.at(self.theta if theta is None else theta, Counter()).on(self.ids)

    def x(self, seed: int = 0) -> Tensor:
        lower, _ = self.at()
        start = lower.start()
        return start + 0.5 * normal(*start.shape, seed=seed)

    def directions(self, seed: int = 7) -> dict[str, Tensor]:
        raw = {
            name: normal(*value.shape, seed=seed + k) / max(value.numel(), 1) ** 0.5
            for k, (name, value) in enumerate(self.theta.items())
        }
        return self.problem.project_gradient(raw)


def _build(subject: Subject) -> Problem:
    if subject.cls.from_sections:
        raise NotApplicable(
            "it is made of the sections of a recipe, so that blt check tests it with a recipe"
        )
    problem: Problem = subject()
    return problem


def _bench(subject: Subject, split: str = "training") -> _Bench:
    problem = _build(subject)
    tasks = _tasks_of(problem, split)
    if tasks is None:
        raise NotApplicable(f"it has no tasks for {split}")
    initial = problem.init_params(keyed_generator("θ", 0))
    moved = {
        name: value.double() + 0.1 * normal(*value.shape, seed=50 + k)
        for k, (name, value) in enumerate(initial.items())
    }
    return _Bench(problem, tasks, problem.project(moved))


def _tasks_of(problem: Problem, split: str, like: Tensor = LIKE) -> Tasks | None:
    tasks = problem.tasks(split, like)
    return None if tasks is None or not len(tasks) else tasks


@holds(KIND, "begins with the same finite parameters every time")
def _initial(subject: Subject) -> None:
    first, second = (_build(subject).init_params(keyed_generator("θ", 0)) for _ in range(2))
    require(bool(first), "init_params returns no parameters, so that there is nothing to learn")
    for name, value in first.items():
        good = isinstance(value, Tensor) and value.dtype == torch.float64 and value.device.type == "cpu"
        require(good, f"init_params must return float64 CPU tensors, but {name!r} is not one")
        require(bool(torch.isfinite(value).all()), f"init_params returns NaN or infinity in {name!r}")
    require(
        same(first, second),
        "init_params called twice with equal generators returned different θ; draw only from the given generator",
    )


@holds(KIND, "projects onto admissible parameters")
def _projection(subject: Subject) -> None:
    bench = _bench(subject)
    again = bench.problem.project(bench.theta)
    for name, value in bench.theta.items():
        require(name in again, f"project() drops {name!r}; it must return every parameter")
        require_close(
            again[name],
            value,
            ORDER,
            f"{name} of project(project(θ)) differs from project(θ)",
            "a projection does not move what is already admissible",
        )
    z = bench.directions()
    free = bench.problem.project_gradient(z)
    require(
        all(torch.allclose(free[name], part, atol=1e-12) for name, part in z.items()),
        "project_gradient() applied twice differs from once; it must be a linear projection",
    )
    penalty = bench.problem.penalty(bench.theta)
    require(
        penalty is None or (isinstance(penalty, Tensor) and penalty.numel() == 1),
        "penalty() must return one number as a tensor, or None; sum it up",
    )


@holds(KIND, "has tasks of the requested dtype, with an x of their shape")
def _splits(subject: Subject) -> None:
    problem = _build(subject)
    require(_tasks_of(problem, "training") is not None, "it has no tasks for training")
    theta = problem.init_params(keyed_generator("θ", 0))
    for dtype in (torch.float32, torch.float64):
        like = torch.zeros((), dtype=dtype)
        for split in SPLITS:
            if (tasks := _tasks_of(problem, split, like)) is None:
                continue
            cast = {name: value.to(dtype) for name, value in theta.items()}
            ids = list(range(min(COUNT, len(tasks))))
            lower, upper = tasks.at(cast, Counter()).on(ids)
            start, what = lower.start(), f"{split} tasks in {str(dtype).removeprefix('torch.')}"
            require(tasks.dtype == dtype, f"{what}: dtype is {tasks.dtype}; convert to the dtype of `like`")
            require_like(start, like, f"start() of {what}", (len(ids), *tasks.shape))
            for name, value in (
                ("energy", lower.energy(start)),
                ("mu", lower.mu),
                ("lipschitz", lower.lipschitz),
            ):
                require_like(value, like, f"{name} of {what}", (len(ids),))
            require_like(lower.gradient(start), start, f"gradient of {what}")
            value = upper.value(start)
            require(
                value.dtype == torch.float64 and tuple(value.shape) == (len(ids),),
                f"value() of the loss of {what} must be float64 of shape ({len(ids)},), got {value.dtype} of"
                f" {tuple(value.shape)}; convert with .double() before the sum",
            )
            require_like(upper.gradient(start), start, f"gradient of the loss of {what}")
            require(lower.ids.tolist() == ids, f"ids of {what} must be {ids}, got {lower.ids.tolist()}")
            require(
                all(isinstance(tasks.label(number), str) and tasks.label(number) for number in ids),
                f"label() of {what} must return a name for each task",
            )


def _figures(bench: _Bench) -> dict[str, Tensor]:
    (lower, upper), x = bench.at(), bench.x()
    return {
        "the start": lower.start(),
        "the energy": lower.energy(x),
        "the gradient": lower.gradient(x),
        "the loss": upper.value(x),
    }


@holds(KIND, "draws the same tasks whenever it is asked")
def _determinism(subject: Subject) -> None:
    for split in SPLITS:
        try:
            first, second = _bench(subject, split), _bench(subject, split)
        except NotApplicable:
            if split == "training":
                raise
            continue
        require(
            len(first.tasks) == len(second.tasks) and first.tasks.digest() == second.tasks.digest(),
            f"digest() of the {split} tasks differs between two objects with the same options",
        )
        for name, value in _figures(first).items():
            require(
                same(value, _figures(second)[name]),
                f"{name} of the {split} tasks differs between two objects with the same options; draw from a"
                " generator with a seed of its own, not from the global one",
            )


@stateless(KIND)
def _use(subject: Subject, component: Problem, problem: int) -> Iterator[tuple[str, Any]]:
    if subject.cls.from_sections:
        raise NotApplicable(
            "it is made of the sections of a recipe, so that blt check tests it with a recipe"
        )
    split = SPLITS[problem] if _tasks_of(component, SPLITS[problem]) is not None else SPLITS[0]
    theta = component.init_params(keyed_generator("θ", problem))
    yield "init_params", theta
    tasks = component.tasks(split, LIKE)
    assert tasks is not None
    bound = tasks.at(theta, Counter())
    lower, upper = bound.on([0])
    x = lower.start() + 0.1 * normal(1, *tasks.shape, seed=problem)
    yield "energy", lower.energy(x)
    yield "gradient", lower.gradient(x)
    yield "the loss", upper.value(x)
    yield "project", component.project(theta)


@holds(KIND, "treats each task for itself")
def _batch_independence(subject: Subject) -> None:
    bench = _bench(subject)
    x, count = bench.x(), len(bench.ids)
    together = _all_results(*bench.at(), x)
    for index in batches(count):
        chosen = [bench.ids[int(k)] for k in index]
        asked = bench.tasks.at(bench.theta, Counter()).on(chosen)
        whole = bench.at()
        taken = whole[0].take(index), whole[1].take(index)
        for how, (lower, upper) in (("on()", asked), ("take()", taken)):
            for name, value in _all_results(lower, upper, x[index]).items():
                require_close(
                    value,
                    together[name][index],
                    ORDER,
                    f"{name} of {describe_batch(index)} by {how} differs from the result in a batch of {count}",
                    "sums and means must not run over the first dimension",
                )


def _all_results(lower: Lower, upper: Upper, x: Tensor) -> dict[str, Tensor]:
    bound = torch.as_tensor(math.inf if upper.lipschitz is None else upper.lipschitz, dtype=torch.float64)
    found = {
        "start": lower.start(),
        "energy": lower.energy(x).detach(),
        "gradient": lower.gradient(x),
        "hvp": lower.linearize(x).hvp(0.3 * x + 1),
        "mu": lower.mu,
        "lipschitz": lower.lipschitz,
        "loss": upper.value(x),
        "gradient of the loss": upper.gradient(x),
        "lipschitz of the loss": bound.expand(len(x)),
        "ids": lower.ids.double(),
    }
    return {name: value.detach().nan_to_num(posinf=1e300, neginf=-1e300) for name, value in found.items()}


@holds(KIND, "has the derivatives in x of both levels")
def _derivatives(subject: Subject) -> None:
    bench = _bench(subject)
    (lower, upper), x = bench.at(), bench.x()
    v = normal(*x.shape, seed=3)
    _compare(
        lambda t: lower.energy(x + t * v).detach(), dot(lower.gradient(x), v), "gradient() of the lower level"
    )
    _compare(
        lambda t: dot(lower.gradient(x + t * v), v),
        dot(lower.linearize(x).hvp(v), v),
        "hvp() of the lower level",
    )
    _compare(lambda t: upper.value(x + t * v), dot(upper.gradient(x), v), "gradient() of the loss")


def _compare(function: Callable[[float], Tensor], claimed: Tensor, what: str) -> None:
    quotient, error = best_difference(function, claimed)
    if error > ACCEPTED and float((quotient - claimed).abs().max()) > 1e-9:
        derivative_fails(f"{what} along a random direction", "finite differences", claimed, quotient)


@holds(KIND, "has the derivatives in θ of both levels")
def _theta_derivatives(subject: Subject) -> None:
    bench = _bench(subject)
    (lower, upper), x = bench.at(), bench.x()
    q, weights = normal(*x.shape, seed=4), torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
    d = bench.directions()
    for what, claimed, function, cause in (
        (
            "mixed()",
            lower.mixed(x, q, weights),
            lambda theta: weights @ dot(bench.at(theta)[0].gradient(x), q),
            "energy() and pairing() must depend on θ through self.theta alone",
        ),
        (
            "theta_gradient() of the lower level",
            lower.theta_gradient(x, weights),
            lambda theta: weights @ bench.at(theta)[0].energy(x).detach(),
            "energy() must depend on θ through self.theta alone",
        ),
        (
            "theta_gradient() of the loss",
            upper.theta_gradient(x, weights),
            lambda theta: weights @ bench.at(theta)[1].value(x),
            "a loss that depends on θ must implement it, and return every parameter it depends on",
        ),
    ):
        total = sum((claimed[name] * d[name]).sum() for name in claimed) if claimed else 0.0
        slope = torch.as_tensor(total, dtype=torch.float64).detach()
        require_theta_derivative(function, bench.theta, d, slope, what, cause)


@holds(KIND, "has valid bounds of its curvature")
def _bounds(subject: Subject) -> None:
    bench = _bench(subject)
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
    found = torch.stack(quotients)
    return found.amin(0), found.amax(0)


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
    bench = _bench(subject)
    (lower, upper), x = bench.at(), bench.x()
    if lower.blocks == 1 and upper.blocks == 1:
        raise NotApplicable("neither level is a finite sum")
    q, weights = normal(*x.shape, seed=4), torch.ones(len(x), dtype=torch.float64)
    cause = (
        "the mean over all blocks, not their sum, is the whole; a block of n rows has weights times blocks"
    )
    if lower.blocks > 1:
        parts = [lower.block(torch.full((len(x),), j)) for j in range(lower.blocks)]
        for name, of in (
            ("energy", lambda one: one.energy(x).detach()),
            ("gradient", lambda one: one.gradient(x)),
            ("hvp", lambda one: one.linearize(x).hvp(q)),
        ):
            mean = torch.stack([of(part) for part in parts]).mean(0)
            require_close(mean, of(lower), ORDER, f"the mean of {name} over {lower.blocks} blocks", cause)
        for name, value in lower.mixed(x, q, weights).items():
            mean = torch.stack([part.mixed(x, q, weights)[name] for part in parts]).mean(0)
            require_close(
                mean, value, ORDER, f"the mean of mixed() in {name} over {lower.blocks} blocks", cause
            )
        for j, part in enumerate(parts):
            _require_bounds(part, *_spectrum(part, x), what=f"block {j}")
    if upper.blocks > 1:
        pieces = [upper.block(torch.full((len(x),), j)) for j in range(upper.blocks)]
        for name, of_loss in (("value", lambda one: one.value(x)), ("gradient", lambda one: one.gradient(x))):
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
    bench = _bench(subject)
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
    bench = _bench(subject)
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
