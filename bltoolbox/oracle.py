"""f and its hypergradient at θ, to a tolerance: the only place that knows of warm starts, chunks and devices.

    f_v(θ) = 1/m Σ_i v_i g_i(x̂_i(θ))

Sums are accumulated over chunks in float64, so that a batch of any size takes the memory of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from bltoolbox.bounds import RITZ_STEPS, BoundKind, Certificate, estimate_bound, knows_mu
from bltoolbox.errors import NumericalError
from bltoolbox.interfaces import HypergradientEstimator, LowerSolver, Theta
from bltoolbox.interrupts import allowed
from bltoolbox.journal import Journal
from bltoolbox.loop import solve
from bltoolbox.problem import LowerLevel, Problem, UpperLoss
from bltoolbox.results import (
    Batch,
    Cost,
    Counter,
    Estimate,
    HypergradientResult,
    Scales,
    Solution,
    Status,
    Value,
)
from bltoolbox.samples import Samples
from bltoolbox.store import Store
from bltoolbox.tensors import norm

#: Accuracy, relative to the first gradient norm, of the solves that only tell sizes.
_ROUGH = 0.1

Reply = TypeVar("Reply", Value, HypergradientResult, Scales)


@dataclass(frozen=True)
class _Chunk:
    """Some samples of a batch, bound to θ."""

    samples: Sequence[int]
    weights: Tensor
    lower: LowerLevel
    upper: UpperLoss
    start: Tensor


class BilevelOracle:
    """Owns the warm starts and the ledger; ``on(batch)`` answers questions about one batch."""

    def __init__(
        self,
        problem: Problem,
        samples: Samples,
        solver: LowerSolver,
        hypergradient: HypergradientEstimator,
        *,
        chunk: int = 32,
        iteration_limit: int = 2000,
        strict: bool = False,
        bound: BoundKind = "none",
        bound_every: int = 1,
        before_call: Callable[[Cost], None] | None = None,
    ) -> None:
        self.problem = problem
        self.samples = samples
        self.solver = solver
        self.hypergradient = hypergradient
        self.chunk = chunk
        self.iteration_limit = iteration_limit
        #: Whether a tolerance below the floor of the dtype is an error.
        self.strict = strict
        self.bound = bound
        self.bound_every = bound_every
        self.before_call = before_call
        self.after_call: Callable[[], None] | None = None
        self.cost = Cost()
        self.counter = Counter()
        self.journal = Journal()
        self.certificate: Mapping[str, float | str] = {}
        self.solutions = Store(len(samples))
        self.adjoints = Store(len(samples))
        self.lipschitz_estimates = Store(len(samples))

    @property
    def stores(self) -> dict[str, Store]:
        """Everything that is kept by sample."""
        return {"solutions": self.solutions, "adjoints": self.adjoints, "lipschitz": self.lipschitz_estimates}

    def on(self, batch: Batch) -> BatchOracle:
        """The oracle of f_v for the weights of ``batch``."""
        return BatchOracle(self, batch)

    def chunks(self, theta: Theta, batch: Batch) -> Iterator[_Chunk]:
        at = self.problem.at(theta, self.samples.shape, self.counter)
        for first in range(0, len(batch.ids), self.chunk):
            ids = batch.ids[first : first + self.chunk]
            x_true, y = self.samples.batch(ids)
            weights = torch.tensor(batch.weights[first : first + self.chunk], dtype=torch.float64)
            lower = at.on(y)
            start = self.solutions.get(ids, lower.start())
            upper = UpperLoss(x_true, self.problem.loss_scale)
            yield _Chunk(ids, weights.to(y.device) / len(self.samples), lower, upper, start)

    def solve(self, chunk: _Chunk, tol: float) -> Solution:
        """x̃ with ‖x̃ − x̂‖ ≤ tol where μ is known, ‖∇h‖ ≤ tol elsewhere."""
        mu = torch.where(chunk.lower.mu > 0, chunk.lower.mu, 1.0)
        solution = solve(self.solver, chunk.lower, chunk.start, tol * mu, limit=self.iteration_limit)
        fatal = [Status.NOT_FINITE, Status.DIVERGED, Status.LIMIT]
        if self.strict:
            fatal.append(Status.STALLED)
        for status in fatal:
            if bad := [i for i, s in zip(chunk.samples, solution.status, strict=True) if s is status]:
                name = type(self.solver).__name__
                raise NumericalError(f"lower-level solver {name}, samples {_short(bad)}: {status.value}")
        return solution

    def new_certificate(self) -> Certificate:
        """For the next hypergradient: with the error bound if it is its turn."""
        due = self.cost.hypergradients % self.bound_every == 0
        return Certificate(self.bound if due else "none")

    def charge(self, cost: Cost) -> None:
        self.cost = self.cost + cost

    def ask(self, question: str, compute: Callable[[], Reply]) -> Reply:
        """Answer from the journal if this was asked before an interruption, else compute, wholly or not at all."""
        if self.journal.replaying:
            return self._note(cast(Reply, self.journal.replay(question)))
        if self.before_call is not None:
            self.before_call(self.cost)
        with self._transaction(), allowed():
            self.counter.collect()
            answer = compute()
            self.charge(self.counter.collect())
        self.journal.append(question, answer)
        if self.after_call is not None:
            self.after_call()
        return self._note(answer)

    def _note(self, answer: Reply) -> Reply:
        """Keep the last certificate for the log."""
        if isinstance(answer, HypergradientResult):
            self.certificate = answer.certificate
        return answer

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Warm starts and ledger change together, at the end, or not at all."""
        cost = self.cost
        for store in self.stores.values():
            store.begin()
        try:
            yield
        except BaseException:
            for store in self.stores.values():
                store.rollback()
            self.cost = cost
            raise
        for store in self.stores.values():
            store.commit()


@dataclass
class _Sum:
    """Weighted sums over chunks, in float64."""

    value: float = 0.0
    lower: float = 0.0
    upper: float = 0.0
    certified: bool = True
    residual: float = 0.0
    iterations: float = 0.0
    count: int = 0
    short: dict[Status, int] = field(default_factory=dict)

    def add(self, chunk: _Chunk, solution: Solution) -> None:
        mu = chunk.lower.mu
        epsilon = (solution.residual / torch.where(mu > 0, mu, 1.0)).double()
        value, slope = chunk.upper.value(solution.x), norm(chunk.upper.gradient(solution.x)).double()
        above = value + slope * epsilon + chunk.upper.lipschitz / 2 * epsilon.square()
        # g ≥ 0 as well as above its tangent.
        below = (value - slope * epsilon).clamp_min(0)
        self.value += float(chunk.weights @ value)
        self.upper += float(chunk.weights @ above)
        self.lower += float(chunk.weights @ below)
        self.certified &= bool((mu > 0).all())
        self.residual = max(self.residual, float(solution.residual.max()))
        self.iterations += float(solution.iterations.sum())
        self.count += len(chunk.samples)
        for status in solution.status:
            if status is not Status.CONVERGED:
                self.short[status] = self.short.get(status, 0) + 1

    def result(self, trial: object = None) -> Value:
        return Value(
            value=self.value,
            lower=self.lower,
            upper=self.upper,
            certified=self.certified,
            residual=self.residual,
            iterations=self.iterations / max(self.count, 1),
            short={status.name.lower(): count for status, count in self.short.items()},
            trial=trial,
        )


class BatchOracle:
    """What an upper-level optimizer sees."""

    def __init__(self, oracle: BilevelOracle, batch: Batch) -> None:
        self._oracle = oracle
        self._batch = batch

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ."""
        return self._oracle.problem.project(theta)

    def accept(self, value: Value) -> None:
        """Make the solutions behind a trial value the warm starts."""
        journal = self._oracle.journal
        if journal.replaying:
            journal.replay("accept")
            return
        for samples, x in value.trial or ():
            self._oracle.solutions.put(samples, x)
        journal.append("accept", None)

    def value(self, theta: Theta, tol: float) -> Value:
        """f_v(θ) with bounds, infinite where the solver fails; solutions become warm starts only through ``accept``."""
        return self._oracle.ask("value", lambda: self._value(theta, tol))

    def hypergradient(
        self, theta: Theta, tol: float, adjoint_tol: float, *, bound: bool = False
    ) -> HypergradientResult:
        """z_v(θ) with f_v(θ) and, when asked for, a bound on its error."""
        return self._oracle.ask("hypergradient", lambda: self._hypergradient(theta, tol, adjoint_tol, bound))

    def scales(self, theta: Theta) -> Scales:
        """The sizes at θ that `auto` accuracies are relative to."""
        return self._oracle.ask("scales", lambda: self._scales(theta))

    def _scales(self, theta: Theta) -> Scales:
        oracle = self._oracle
        distance, slope, count = 0.0, 0.0, 0
        for chunk in oracle.chunks(theta, self._batch):
            start = chunk.lower.start()
            # A tenth of the first gradient norm is enough to know a size by.
            tol = _ROUGH * chunk.lower.residual(start)
            solution = solve(oracle.solver, chunk.lower, start, tol, limit=oracle.iteration_limit)
            distance += float(norm(solution.x - start).sum())
            slope += float(norm(chunk.upper.gradient(solution.x)).sum())
            count += len(chunk.samples)
            oracle.charge(_cost_of(chunk, solution, None))
        return Scales(distance / max(count, 1), slope / max(count, 1))

    def _value(self, theta: Theta, tol: float) -> Value:
        oracle = self._oracle
        total, trial = _Sum(), []
        for chunk in oracle.chunks(theta, self._batch):
            try:
                solution = oracle.solve(chunk, tol)
            except NumericalError:
                # A trial θ so far off that nothing can be computed there is worse than any: a line search goes on.
                return replace(total.result(), value=math.inf, upper=math.inf, certified=False)
            total.add(chunk, solution)
            trial.append((chunk.samples, solution.x))
            spent = int(solution.iterations.sum())
            slowest = int(solution.iterations.max()) * len(chunk.samples)
            oracle.charge(Cost(lower_iterations=spent, slowest=slowest, line_search=spent))
        oracle.charge(Cost(values=1))
        return total.result(trial)

    def _hypergradient(
        self, theta: Theta, tol: float, adjoint_tol: float, bound: bool
    ) -> HypergradientResult:
        oracle = self._oracle
        total, certificate = _Sum(), oracle.new_certificate()
        z = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in theta.items()}
        omega, adjoint_residual, adjoint_iterations = 0.0, 0.0, 0.0
        for chunk in oracle.chunks(theta, self._batch):
            solution = oracle.solve(chunk, tol)
            total.add(chunk, solution)
            estimate = self._estimate(chunk, solution.x, adjoint_tol)
            for name, part in estimate.gradient.items():
                z[name] += part.double()
            adjoint_residual = max(adjoint_residual, float(estimate.residual.max()))
            adjoint_iterations += float(estimate.iterations.sum())
            estimated = self._estimated_bound(chunk, solution, estimate, bound or certificate.wants_estimate)
            if bound and estimated is not None:
                omega += float(chunk.weights @ estimated.double())
            certificate.add(chunk.lower, chunk.upper, solution, estimate, estimated)
            oracle.charge(_cost_of(chunk, solution, estimate))
        oracle.charge(Cost(hypergradients=1))
        gradient = {name: part.to(theta[name]) for name, part in oracle.problem.project_gradient(z).items()}
        if not all(bool(torch.isfinite(part).all()) for part in gradient.values()):
            raise NumericalError(
                f"the hypergradient of samples {_short(self._batch.ids)} is not finite; the step may be too long"
            )
        return HypergradientResult(
            gradient=gradient,
            value=total.result(),
            residual=adjoint_residual,
            iterations=adjoint_iterations / max(total.count, 1),
            bound=omega if bound else None,
            bound_kind="estimated" if bound else None,
            at_floor=Status.STALLED in total.short or adjoint_residual > 2 * adjoint_tol,
            certificate=certificate.result(),
        )

    def _estimate(self, chunk: _Chunk, x: Tensor, adjoint_tol: float) -> Estimate:
        """z of one chunk; x and the adjoint become warm starts."""
        oracle = self._oracle
        tol = torch.full_like(chunk.lower.mu, adjoint_tol)
        warm = oracle.adjoints.get(chunk.samples, torch.zeros_like(x))
        try:
            estimate = oracle.hypergradient.estimate(
                chunk.lower, chunk.upper, x, chunk.weights.to(x.dtype), tol, warm
            )
        except NumericalError as error:
            raise NumericalError(f"samples {_short(chunk.samples)}: {error}") from error
        oracle.solutions.put(chunk.samples, x)
        if estimate.adjoint is not None:
            oracle.adjoints.put(chunk.samples, estimate.adjoint)
        return estimate

    def _estimated_bound(
        self, chunk: _Chunk, solution: Solution, estimate: Estimate, wanted: bool
    ) -> Tensor | None:
        """ω_i of one chunk, where it is wanted and can be had."""
        if not wanted or estimate.adjoint is None:
            return None
        oracle = self._oracle
        unknown = torch.full(
            (len(chunk.samples), 2), torch.nan, dtype=torch.float64, device=solution.x.device
        )
        known = oracle.lipschitz_estimates.get(chunk.samples, unknown).to(solution.x.dtype)
        result = estimate_bound(
            chunk.lower,
            chunk.upper,
            solution.x,
            chunk.start,
            estimate.adjoint,
            solution.residual,
            estimate.residual,
            (known[:, 0], known[:, 1]),
        )
        constants = torch.stack([result.hessian_lipschitz, result.mixed_lipschitz], dim=1)
        oracle.lipschitz_estimates.put(chunk.samples, constants.double())
        if not knows_mu(chunk.lower):
            oracle.charge(Cost(power_iterations=RITZ_STEPS * len(chunk.samples)))
        return result.omega


def _cost_of(chunk: _Chunk, solution: Solution, estimate: Estimate | None) -> Cost:
    counts = [solution.iterations] + ([] if estimate is None else [estimate.iterations])
    return Cost(
        lower_iterations=int(counts[0].sum()),
        linear_iterations=sum(int(count.sum()) for count in counts[1:]),
        slowest=sum(int(count.max()) for count in counts) * len(chunk.samples),
    )


def _short(ids: Sequence[int]) -> str:
    shown = ", ".join(str(i) for i in ids[:8])
    return shown if len(ids) <= 8 else f"{shown}, … ({len(ids)} in all)"
