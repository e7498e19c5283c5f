"""Properties of problems: parameters, splits, determinism, batches, and derivatives of both levels in x and θ."""

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
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import (
    batches,
    best_difference,
    derivative_fails,
    describe_batch,
    require_theta_derivative,
)

KIND = "problem"
SPLITS = ("training", "validation", "evaluation")
LIKE = torch.zeros((), dtype=torch.float64)
#: Tasks that are tried at once.
COUNT = 3
#: Relative error of sums in another order.
ORDER = 1e-10
#: Accepted relative error of the hypergradient.
ACCEPTED = 1e-5


@dataclass(frozen=True)
class Bench:
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


def bench_of(subject: Subject, split: str = "training") -> Bench:
    """The problem with its example options, on one split."""
    problem: Problem = subject()
    tasks = _tasks_of(problem, split)
    if tasks is None:
        raise NotApplicable(f"it has no tasks for {split}")
    initial = problem.init_params(keyed_generator("θ", 0))
    moved = {
        name: value.double() + 0.1 * normal(*value.shape, seed=50 + k)
        for k, (name, value) in enumerate(initial.items())
    }
    return Bench(problem, tasks, problem.project(moved))


def _tasks_of(problem: Problem, split: str, like: Tensor = LIKE) -> Tasks | None:
    tasks = problem.tasks(split, like)
    return None if tasks is None or not len(tasks) else tasks


@holds(KIND, "begins with the same finite parameters every time")
def _initial(subject: Subject) -> None:
    first, second = (subject().init_params(keyed_generator("θ", 0)) for _ in range(2))
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
    bench = bench_of(subject)
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
        all(torch.allclose(free[name], entry, atol=1e-12) for name, entry in z.items()),
        "project_gradient() applied twice differs from once; it must be a linear projection",
    )
    penalty = bench.problem.penalty(bench.theta)
    require(
        penalty is None or (isinstance(penalty, Tensor) and penalty.numel() == 1),
        "penalty() must return one number as a tensor, or None; sum it up",
    )


@holds(KIND, "has tasks of the requested dtype, with an x of their shape")
def _splits(subject: Subject) -> None:
    problem: Problem = subject()
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


def _figures(bench: Bench) -> dict[str, Tensor]:
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
            first, second = bench_of(subject, split), bench_of(subject, split)
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
    bench = bench_of(subject)
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
    results = {
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
    return {name: value.detach().nan_to_num(posinf=1e300, neginf=-1e300) for name, value in results.items()}


@holds(KIND, "has the derivatives in x of both levels")
def _derivatives(subject: Subject) -> None:
    bench = bench_of(subject)
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
    bench = bench_of(subject)
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
