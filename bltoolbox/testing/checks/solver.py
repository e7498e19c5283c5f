"""Properties of lower-level solvers, on a quadratic energy with a closed form and on a smooth one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Solution, Status
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import norm, take
from bltoolbox.testing.checks.base import (
    NotApplicable,
    Subject,
    Untouched,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
    same,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.numerics import batches, describe_batch
from bltoolbox.testing.checks.partners import Bench, quadratic, smooth

KIND = "lower_solver"
TOL = 1e-8
LIMIT = 20_000
STEPS = 6


@holds(KIND, "reaches its tolerance on a quadratic")
def closed_form(subject: Subject) -> None:
    bench = quadratic(subject)
    assert bench.formula is not None
    lower = bench.lower()
    solution = converged(subject(), lower, "a quadratic of condition 6")
    expected = bench.formula.solution(bench.own_theta, bench.y)
    distance, allowed = norm(solution.x - expected), 1.01 * TOL / lower.mu
    require(
        bool((distance <= allowed).all()),
        f"x is {float(distance.max()):.3g} away from the minimiser of a quadratic, but the reported residual allows"
        f" at most tol/μ = {float(allowed.min()):.3g}; compute the residual at the returned x",
    )


@holds(KIND, "no perturbation improves the energy")
def optimal(subject: Subject) -> None:
    lower = smooth(subject).lower()
    solution = converged(subject(), lower, "a smooth convex energy")
    least = lower.energy(solution.x)
    for seed, length in enumerate((1e-1, 1e-2, 1e-3)):
        moved = lower.energy(solution.x + length * normal(*solution.x.shape, seed=seed))
        gain = float((least - moved).max())
        require(
            gain <= 1e-12 * float(least.abs().max()),
            f"a random step of size {length:g} away from the solution lowers the energy by {gain:.3g}:"
            " the solution is not a minimiser",
        )


@holds(KIND, "the residual is the gradient norm at the same x")
def residual(subject: Subject) -> None:
    if subject.cls.by_gap:
        raise NotApplicable("its residual bounds the error by a duality gap")
    for bench in _benches(subject):
        lower, solver = bench.lower(), subject()
        state = solver.init(lower, lower.start(), {})
        for k in range(STEPS + 1):
            require_close(
                state.residual,
                lower.residual(state.x),
                1e-6,
                f"the residual of the state after {k} steps",
                "it must be lower.residual(x) at the x of the same state",
            )
            with torch.no_grad():
                state = solver.step(lower, state)


@holds(KIND, "states are records of tensors, one row per sample")
def compactable(subject: Subject) -> None:
    for bench in _benches(subject):
        lower, solver = bench.lower(), subject()
        state = _advance(solver, lower, 2)
        require(
            dataclasses.is_dataclass(state), f"the state must be a dataclass, not a {type(state).__name__}"
        )
        _require_rows(state, len(bench.y), "")
        index = torch.tensor([2, 0])
        with torch.no_grad():
            whole, rows = solver.step(lower, state), solver.step(lower.take(index), take(state, index))
        require_close(
            rows.x, whole.x[index], 1e-8, "x after a step of two of three samples",
            "the rows of the state must contain everything that a sample needs to continue alone",
        )  # fmt: skip


def _require_rows(record: Any, count: int, prefix: str) -> None:
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            _require_rows(value, count, f"{name}.")
            continue
        good = isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
        shown = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        require(
            value is None or isinstance(value, int) or good,
            f"field {name!r} of the state must be a tensor with {count} rows, one per sample (or None, a record of such"
            f" tensors, or an integer that all samples share), not {shown}: the loop keeps only the rows of the samples"
            " that have not converged",
        )


@holds(KIND, "a sample's result does not depend on its batch")
def batch_independent(subject: Subject) -> None:
    for bench in _benches(subject):
        lower, solver = bench.lower(), subject()
        together = _advance(solver, lower, STEPS)
        whole = solve(solver, lower, lower.start(), 1e-6, limit=LIMIT)
        for index in batches(len(bench.y)):
            alone = lower.take(index)
            what = f"x of {describe_batch(index)} after {STEPS} steps differs from the result in a batch"
            cause = "step sizes, inner products and stopping criteria must be per sample"
            require_close(_advance(solver, alone, STEPS).x, together.x[index], 1e-7, what, cause)
            count = solve(solver, alone, alone.start(), 1e-6, limit=LIMIT).iterations
            require(
                int((count - whole.iterations[index]).abs().max()) <= 2,
                f"{describe_batch(index)} took {count.tolist()} iterations, but"
                f" {whole.iterations[index].tolist()} in a batch; {cause}",
            )


@holds(KIND, "same input, same result")
def deterministic(subject: Subject) -> None:
    lower = smooth(subject).lower()
    first, second = (_advance(subject(), lower, STEPS).x for _ in range(2))
    require(same(first, second), "two solvers with the same options took different steps from the same start")


@stateless(KIND)
def use(subject: Subject, solver: LowerSolver, problem: int) -> Iterator[tuple[str, Any]]:
    lower = smooth(subject, count=3 - problem, seed=problem).lower()
    state = solver.init(lower, lower.start(), {})
    yield "the initial residual", state.residual
    for k in range(STEPS):
        with torch.no_grad():
            state = solver.step(lower, state)
        yield f"x after {k + 1} steps", state.x
        yield f"the residual after {k + 1} steps", state.residual


@holds(KIND, "float32 and float64 are kept")
def dtype_kept(subject: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        lower = smooth(subject).lower(dtype)
        x0 = lower.start()
        state = _advance(subject(), lower, 3)
        require_like(state.x, x0, f"x after 3 steps in {str(dtype)[6:]}")
        require_like(state.residual, x0, f"the residual in {str(dtype)[6:]}", (len(x0),))


@holds(KIND, "inputs are left untouched")
def untouched(subject: Subject) -> None:
    bench = smooth(subject)
    lower, solver = bench.lower(), subject()
    x0 = lower.start().clone()
    guard = Untouched(x0=x0, y=bench.y, theta=lower.theta)
    state = solver.init(lower, x0, {})
    guard.verify("init")
    for _ in range(3):
        guard = Untouched(x0=x0, y=bench.y, theta=lower.theta, state=_fields(state))
        with torch.no_grad():
            after = solver.step(lower, state)
        guard.verify("step")
        state = after


@holds(KIND, "iterates stay in the constraint")
def constraint(subject: Subject) -> None:
    if not subject.cls.handles_constraint:
        raise NotApplicable("it declares handles_constraint = False")
    bench = quadratic(subject, constraint="box")
    # Measurements far outside [0, 1], so that the constraint is active.
    bench = dataclasses.replace(bench, y=3 * bench.y - 1)
    assert bench.formula is not None
    lower, solver = bench.lower(), subject()
    state = solver.init(lower, lower.start(), {})
    for k in range(STEPS):
        low, high = float(state.x.min()), float(state.x.max())
        require(
            low >= 0 and high <= 1,
            f"after {k} steps x has values in [{low:.4g}, {high:.4g}] but must stay in [0, 1];"
            " pass every iterate through lower.project",
        )
        with torch.no_grad():
            state = solver.step(lower, state)
    solution = converged(solver, lower, "a quadratic with x in [0, 1]")
    expected = bench.formula.solution(bench.own_theta, bench.y).clamp(0, 1)
    require_close(
        solution.x, expected, 1e-6, "the minimiser of a separable quadratic over [0, 1]",
        "project after the gradient step, with one step length for all pixels",
    )  # fmt: skip


def converged(solver: LowerSolver, lower: Lower, what: str) -> Solution:
    """Solve to TOL and verify the residual by recomputing it from x."""
    solution = solve(solver, lower, lower.start(), TOL, limit=LIMIT)
    for i, status in enumerate(solution.status):
        if status is not Status.CONVERGED:
            fail(
                f"on {what}, sample {i} did not reach a residual of {TOL:g}: it is {float(solution.residual[i]):.3g}"
                f" after {int(solution.iterations[i])} iterations ({status.value})"
            )
    if solver.by_gap:
        return solution
    true = lower.residual(solution.x)
    require(
        bool((true <= 1.001 * TOL).all()),
        f"on {what}, it reports residuals up to {float(solution.residual.max()):.3g}, but recomputed from x they are"
        f" up to {float(true.max()):.3g}; declare exact_residual only if residuals are those of the returned x",
    )
    return solution


def _benches(subject: Subject) -> list[Bench]:
    benches = [smooth(subject)]
    try:
        return [quadratic(subject), *benches]
    except NotApplicable:
        return benches


@torch.no_grad()
def _advance(solver: LowerSolver, lower: Lower, steps: int) -> Any:
    state = solver.init(lower, lower.start(), {})
    for _ in range(steps):
        state = solver.step(lower, state)
    return state


def _fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
