"""f and its hypergradient at θ, to a tolerance: the only place that knows of warm starts, chunks, devices and ranks.

    f_v(θ) = 1/m Σ_i v_i g_i(x̂_i(θ), θ) + P(θ)

Sums are accumulated over chunks in float64, so that a batch of any size takes the memory of one chunk. On several
ranks each solves its share of a batch; the results are added, and all ranks give the same answer. The penalty P is
added once, to the sum over ranks, and ∇P to z before z is projected.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from bltoolbox.bilevel.bounds import (
    RITZ_STEPS,
    BoundKind,
    Certificate,
    certificate_of,
    estimate_mu,
    knows_mu,
)
from bltoolbox.bilevel.hypergradient import Differentiator, named
from bltoolbox.bilevel.journal import SOLUTIONS, Journal, Trial
from bltoolbox.bilevel.kept import MEMORY, SOLVER, Kept
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.penalty import add_penalty, penalty_at, penalty_gradient
from bltoolbox.bilevel.precision import computing
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import (
    Accuracy,
    Batch,
    Cost,
    Counter,
    Effort,
    HypergradientResult,
    Scales,
    Solution,
    Status,
    Steps,
    Theta,
    Value,
)
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver, Problem
from bltoolbox.bilevel.share import Share, divide
from bltoolbox.bilevel.tally import Chunk, Slowest, Tally, merge
from bltoolbox.bilevel.tasks import Tasks
from bltoolbox.bilevel.tensors import detached
from bltoolbox.bilevel.warm_starts import MAPPED, Keeping, Store, Stores, mapped_copy
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.distributed.signals import allowed
from bltoolbox.errors import BltError, NumericalError, is_out_of_memory

log = logging.getLogger(__name__)

#: Accuracy, relative to the first gradient norm, of solves that only determine sizes.
_ROUGH = 0.1

#: What asking counts as, besides what it costs.
_CALLS = {"value": Cost(values=1), "hypergradient": Cost(hypergradients=1), "scales": Cost()}

Reply = TypeVar("Reply", Value, HypergradientResult, Scales)


class BilevelOracle:
    """Owns the warm starts and the ledger; ``on(batch)`` answers questions about one batch."""

    def __init__(
        self,
        problem: Problem,
        tasks: Tasks,
        solver: LowerSolver,
        hypergradient: HypergradientEstimator,
        *,
        chunk: int = 32,
        iteration_limit: int = 2000,
        strict: bool = False,
        estimates: bool = False,
        bound: BoundKind = "none",
        bound_every: int = 1,
        wants: str | None = None,
        seed: int = 0,
        before_call: Callable[[Cost], None] | None = None,
        ranks: Ranks = ALONE,
        keeping: Keeping = "full",
        adaptive: bool = False,
    ) -> None:
        self.problem = problem
        self.tasks = tasks
        self.solver = solver
        self.hypergradient = hypergradient
        self.chunk = chunk
        #: Whether ``chunk`` is a guess that may be halved once when memory runs out.
        self.adaptive = adaptive
        self.iteration_limit = iteration_limit
        #: Whether a tolerance below the floor of the dtype is an error.
        self.strict = strict
        #: Whether the first solve of a task starts from its ``Lower.estimate`` and not from its ``start``.
        self.estimates = estimates
        self.bound = bound
        self.bound_every = bound_every
        #: What a hypergradient reports about each sample: ``loss``, ``slope``, ``gradient`` or nothing.
        self.wants = wants
        #: For the draws of a stochastic estimator.
        self.seed = seed
        self.before_call = before_call
        self.after_call: Callable[[], None] | None = None
        self.cost = Cost()
        #: The cost of interrupted calls. They are repeated on resume, so that equal runs have equal ledgers.
        self.interrupted = Cost()
        self.counter = Counter()
        self.slowest = Slowest(0, chunk)
        self.journal = Journal()
        #: The tasks that this rank solves first in the next step, as far as they are known.
        self.upcoming: Sequence[int] = ()
        #: The last answer, for the log and for the loop's guards.
        self.latest: HypergradientResult | None = None
        self.ranks = ranks
        #: Everything that is stored per task: solutions, constants for error bounds, and what components keep.
        self.stores = Stores(len(tasks), ranks, keeping)
        self.solutions = self.stores[SOLUTIONS]
        self.lipschitz_estimates = self.stores["lipschitz"]
        self._kept: tuple[Kept, Kept] | None = None

    def store(self, name: str) -> Store:
        """The rows of one name, created on first use."""
        return self.stores[name]

    @property
    def needs_inverse(self) -> bool:
        """Whether the estimator uses the inverse Hessian that the solver builds."""
        wanted = "inverse" in self.hypergradient.requires.get("lower_solver", ())
        return wanted and self.solver.offers("inverse")

    def kept(self, theta: Theta) -> tuple[Kept, Kept]:
        """What the estimator and the solver keep of each task."""
        if self._kept is None:
            lower, upper = self.tasks.at(theta, Counter()).on([0])
            estimator, solver = type(self.hypergradient).__name__, type(self.solver).__name__
            self._kept = (
                Kept(
                    f"hypergradient {estimator}", MEMORY, self.hypergradient.keeps(lower, upper), self.stores
                ),
                Kept(f"lower-level solver {solver}", SOLVER, self.solver.persists(lower), self.stores),
            )
        return self._kept

    def persisted(self, solution: Solution) -> dict[str, Tensor]:
        """The fields of a solution's state that are kept, by store."""
        if self._kept is None or not self._kept[1].examples or solution.state is None:
            return {}
        fields = {name: getattr(solution.state, name) for name in self._kept[1].examples}
        return self._kept[1].rows_of(fields, len(solution.x))

    def on(self, batch: Batch) -> BatchOracle:
        """The oracle of f_v for the weights of ``batch``."""
        return BatchOracle(self, batch)

    def announce(self, batch: Batch) -> None:
        """The batch of the next step: its data may be read while this one is solved."""
        places = divide(batch.ids, self.ranks).positions[: self.chunk]
        self.upcoming = [batch.ids[place] for place in places]

    def chunks(self, theta: Theta, batch: Batch, positions: Sequence[int]) -> Iterator[Chunk]:
        """What this rank has to solve."""
        at = self.tasks.at(theta, self.counter)
        parts = [positions[first : first + self.chunk] for first in range(0, len(positions), self.chunk)]
        for number, places in enumerate(parts):
            ids = [batch.ids[place] for place in places]
            lower, upper = at.on(ids)
            following = parts[number + 1] if number + 1 < len(parts) else None
            self.tasks.prefetch([batch.ids[k] for k in following] if following else self.upcoming)
            weights = torch.tensor([batch.weights[place] for place in places], dtype=torch.float64)
            start = self.solutions.get(ids, self.cold(lower, ids))
            kept = self.kept(theta)[1].get(ids)
            yield Chunk(ids, places, weights / len(self.tasks), lower, upper, start, kept)

    def cold(self, lower: Lower, ids: Sequence[int]) -> Tensor:
        """Starts for samples without a warm one; estimates are computed for no others, so that their cost does not
        depend on who shares a chunk."""
        start = lower.start()
        missing = self.solutions.missing(ids) if self.estimates else []
        if missing:
            index = torch.tensor(missing, device=start.device)
            start = start.index_copy(0, index, lower.take(index).estimate())
        return start

    def minimise(self, lower: Lower, start: Tensor, effort: Effort, **options: Any) -> Solution:
        """x̃ with ‖x̃ − x̂‖ ≤ tol where μ > 0 is known, ‖∇h‖ ≤ tol elsewhere; or after a number of iterations."""
        if isinstance(effort, Steps):
            return solve(self.solver, lower, start, 0.0, limit=effort.count, ending=Status.STEPS, **options)
        tol = lower.gradient_tol(effort.tol)
        return solve(self.solver, lower, start, tol, limit=self.iteration_limit, **options)

    def solve(self, chunk: Chunk, effort: Effort) -> Solution:
        """The solutions of a chunk; a status without a usable solution is an error."""
        with_state = bool(chunk.kept) or self.needs_inverse
        solution = self.minimise(chunk.lower, chunk.start, effort, kept=chunk.kept, with_state=with_state)
        self.slowest.add(chunk.positions, solution.iterations.tolist())
        self.require_solved(solution, chunk.samples)
        return solution

    def require_solved(self, solution: Solution, samples: Sequence[int]) -> None:
        """Raise if a sample has no usable solution; after a number of iterations only NaN is unusable."""
        fatal = [Status.NOT_FINITE, Status.DIVERGED, Status.LIMIT]
        if self.strict:
            fatal.append(Status.STALLED)
        for status in fatal:
            if bad := [i for i, s in zip(samples, solution.status, strict=True) if s is status]:
                name = type(self.solver).__name__
                raise NumericalError(f"lower-level solver {name}, samples {named(bad)}: {status.value}")

    def new_certificate(self, together: bool = False) -> Certificate:
        """For the next hypergradient: with the error bound if it is due. There is none of iterates that are updated
        ``together``, since z belongs to the previous ones."""
        due = not together and self.cost.hypergradients % self.bound_every == 0
        return Certificate(self.bound if due else "none")

    def charge(self, cost: Cost) -> None:
        self.cost = self.cost + cost

    def ask(self, question: str, compute: Callable[[], Reply]) -> Reply:
        """Answer from the journal if this was asked before an interruption; else compute, completely or not at
        all."""
        if self.journal.replaying:
            return self._note(cast(Reply, self.journal.replay(question)))
        if self.before_call is not None:
            self.before_call(self.cost)
        try:
            answer = self._computed(compute)
        except Exception as error:
            if not self._halved(error):
                raise
            answer = self._computed(compute)
        self.journal.append(question, answer)
        if self.after_call is not None:
            self.after_call()
        return self._note(answer)

    def _computed(self, compute: Callable[[], Reply]) -> Reply:
        with self._transaction(), detached(), computing(self.tasks.device):
            return compute()

    def _halved(self, error: Exception) -> bool:
        """Whether memory ran out and smaller chunks may help. Other ranks cannot repeat a call."""
        if not self.adaptive or self.chunk < 2 or self.ranks.size > 1 or not is_out_of_memory(error):
            return False
        self.adaptive = False
        log.warning(
            "out of memory with chunks of %d samples; continuing with %d", self.chunk, self.chunk // 2
        )
        self.chunk //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    def _note(self, answer: Reply) -> Reply:
        """Keep the last hypergradient."""
        if isinstance(answer, HypergradientResult):
            self.latest = answer
        return answer

    def end_step(self) -> None:
        """A step is complete, or given up."""
        self.journal.clear()
        self.stores.end_step()

    @property
    def certificate(self) -> Mapping[str, float | str]:
        """What is logged about the last hypergradient."""
        return {} if self.latest is None else self.latest.certificate

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Warm starts change at the end or not at all. A failed call is counted, since it is not repeated.

        An interrupted call is repeated on resume: the ledger counts it then, ``interrupted`` now.
        """
        before = self.cost
        try:
            with self.stores.transaction():
                yield
        except BaseException as error:
            if not isinstance(error, NumericalError):
                self.interrupted = self.interrupted + (self.cost - before)
                self.cost = before
            raise


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
        for samples, rows in value.trial or ():
            for name, values in rows.items():
                self._oracle.stores[name].put(samples, values)
        journal.append("accept", None)

    def value(
        self,
        theta: Theta,
        effort: Effort,
        *,
        bound: bool = False,
        towards: Value | None = None,
        fraction: float = 1.0,
    ) -> Value:
        """f_v(θ) with bounds, infinite where the solver fails; solutions become warm starts only through
        ``accept``. With ``towards``, solves start between the warm starts and the solutions of that value."""

        def compute() -> Value:
            with self._starting(towards, fraction):
                return self._value(theta, effort, bound)

        return self._oracle.ask("value", compute)

    def hypergradient(
        self, theta: Theta, effort: Effort, adjoint: Effort, *, bound: bool = False, together: bool = False
    ) -> HypergradientResult:
        """z_v(θ) with f_v(θ) and, when asked for, a bound on its error."""
        return self._oracle.ask(
            "hypergradient", lambda: self._hypergradient(theta, effort, adjoint, bound, together)
        )

    def scales(self, theta: Theta) -> Scales:
        """The sizes at θ that `auto` accuracies are relative to."""
        return self._oracle.ask("scales", lambda: self._scales(theta))

    @cached_property
    def _share(self) -> Share:
        return divide(self._batch.ids, self._oracle.ranks)

    def _tally(
        self,
        question: str,
        theta: Theta,
        add: Callable[[Chunk, Tally], None],
        certificate: Certificate | None = None,
    ) -> Tally:
        """Solve the share of this rank chunk by chunk, add the results of all ranks, and count the cost even on
        failure."""
        oracle = self._oracle
        oracle.slowest = Slowest(len(self._batch.ids), oracle.chunk)
        oracle.counter.collect()
        tally = Tally()

        def work() -> dict[str, Any]:
            with allowed():
                try:
                    for chunk in oracle.chunks(theta, self._batch, self._share.positions):
                        add(chunk, tally)
                except NumericalError as error:
                    tally.error = str(error)
                tally.certificate = {} if certificate is None else certificate.totals()
            tally.charge(oracle.counter.collect())
            return tally.totals()

        try:
            total = merge(oracle.ranks.each(self._place(question, theta), work))
        except BaseException:
            oracle.charge(tally.cost + oracle.counter.collect())
            raise
        oracle.charge(replace(total.cost, slowest=oracle.slowest.total(oracle.ranks)) + _CALLS[question])
        return total

    def _place(self, question: str, theta: Theta) -> str:
        """The meeting place of ranks: those with another θ are out of step."""
        if self._oracle.ranks.size == 1:
            return question
        digest = 0
        for value in theta.values():
            digest = zlib.crc32(value.detach().cpu().contiguous().numpy().tobytes(), digest)
        return f"{question} at θ {digest:08x}"

    @contextmanager
    def _hosting(self, question: str, theta: Theta, *stores: str, keep: bool = False) -> Iterator[None]:
        """Have the warm starts of samples that live on other ranks."""
        oracle, share = self._oracle, self._share
        if share.travels:
            oracle.ranks.gather(self._place(f"{question}, guests", theta))
        kinds = {name: (oracle.store(name), self._like(name)) for name in stores}
        with share.hosting(oracle.ranks, kinds, keep):
            yield

    @contextmanager
    def _starting(self, towards: Value | None, fraction: float) -> Iterator[None]:
        """Have x + fraction·(x⁺ − x) as warm starts, where x⁺ are the solutions of an earlier value; then x again."""
        stores, trial = self._oracle.stores, towards.trial if towards is not None else None
        names = {name: None for _, rows in trial or () for name in rows}
        for samples, rows in trial or ():
            for name, values in rows.items():
                stores[name].put(samples, torch.lerp(stores[name].get(samples, values), values, fraction))
        yield
        for name in names:
            stores[name].undo()

    def _like(self, store: str) -> Tensor:
        """An empty tensor of the rows of a store."""
        tasks = self._oracle.tasks
        if store == "lipschitz":
            return torch.empty((0, 2), dtype=torch.float64, device=tasks.device)
        if store == SOLUTIONS:
            return torch.empty((0, *tasks.shape), dtype=tasks.dtype, device=tasks.device)
        assert self._oracle._kept is not None
        return next(kept.likes[store] for kept in self._oracle._kept if store in kept.likes)

    def _scales(self, theta: Theta) -> Scales:
        oracle = self._oracle

        def add(chunk: Chunk, tally: Tally) -> None:
            start = chunk.lower.start()
            # A tenth of the first gradient norm is enough to determine a size.
            tol = _ROUGH * chunk.lower.residual(start)
            solution = solve(oracle.solver, chunk.lower, start, tol, limit=oracle.iteration_limit)
            oracle.slowest.add(chunk.positions, solution.iterations.tolist())
            tally.measured(chunk, start, solution)

        return _unless_failed(self._tally("scales", theta, add)).as_scales()

    def _value(self, theta: Theta, effort: Effort, bound: bool) -> Value:
        oracle = self._oracle
        trial: Trial = []
        kept = oracle.kept(theta)[1]
        row = math.prod(oracle.tasks.shape) * oracle.tasks.dtype.itemsize + kept.row_bytes
        large = len(self._batch.ids) * row > MAPPED

        def add(chunk: Chunk, tally: Tally) -> None:
            solution = oracle.solve(chunk, effort)
            tally.solved(chunk, solution, self._mu(chunk, solution, bound, tally))
            rows = {SOLUTIONS: solution.x} | oracle.persisted(solution)
            if large:
                rows = {name: mapped_copy(values, oracle.stores.folder) for name, values in rows.items()}
            trial.append((list(chunk.samples), rows))

        names = (SOLUTIONS, *kept.names)
        with self._hosting("value", theta, *names):
            total = self._tally("value", theta, add)
        oracle.charge(Cost(line_search=total.cost.lower_iterations))
        if total.failed:
            # A trial θ where nothing can be computed is worse than any other: a line search continues.
            return total.as_value()
        self._share.bring_home(oracle.ranks, trial, {name: self._like(name) for name in names})
        return add_penalty(total.as_value(trial), penalty_at(oracle.problem, theta))

    def _hypergradient(
        self, theta: Theta, effort: Effort, adjoint: Effort, bound: bool, together: bool
    ) -> HypergradientResult:
        oracle = self._oracle
        _require_simultaneous(oracle.hypergradient, together)
        certificate, (memory, kept) = oracle.new_certificate(together), oracle.kept(theta)
        gives_adjoint = oracle.hypergradient.gives_adjoint and not together
        differentiate = Differentiator(oracle, memory, effort, adjoint, together)
        z: dict[str, Tensor] = {}
        seen = torch.zeros(0 if oracle.wants is None else len(self._batch.ids), dtype=torch.float64)

        def add(chunk: Chunk, tally: Tally) -> None:
            tally.first &= not oracle.solutions.has_any(chunk.samples)
            solution, estimate = differentiate(chunk)
            wanted = bound or certificate.wants_estimate
            mu = self._mu(chunk, solution, bound or (wanted and gives_adjoint), tally)
            loss, slope = tally.solved(chunk, solution, mu)
            for name, entry in estimate.gradient.items():
                z[name] = z[name] + entry if name in z else entry.double()
            tally.differentiated(estimate)
            if oracle.wants is not None:
                seen[list(chunk.positions)] = differentiate.seen(chunk, solution.x, estimate, loss, slope)
            estimated = None
            if wanted and gives_adjoint:
                estimated = differentiate.bound(chunk, solution, estimate, mu)
            if bound and estimated is not None:
                tally.omega += float(chunk.weights @ estimated.double().cpu())
            certificate.add(chunk.lower, chunk.upper, solution, estimate, estimated)

        names = (SOLUTIONS, "lipschitz", *memory.names, *kept.names)
        with self._hosting("hypergradient", theta, *names, keep=True):
            total = _unless_failed(self._tally("hypergradient", theta, add, certificate))
        for name, value in theta.items():  # a rank may have no samples
            if name not in z:
                z[name] = torch.zeros_like(value, dtype=torch.float64)
        z = self._sum({name: z[name] for name in theta})
        seen = self._sum({"seen": seen})["seen"]
        penalty, direct = penalty_gradient(oracle.problem, theta)
        if penalty is not None and not math.isfinite(penalty):
            raise NumericalError("the penalty P(θ) is not finite; use a smaller step")
        z = {name: entry + direct[name] if direct else entry for name, entry in z.items()}
        gradient = {name: entry.to(theta[name]) for name, entry in oracle.problem.project_gradient(z).items()}
        if not _finite(gradient):
            raise NumericalError(
                f"the hypergradient of samples {named(self._batch.ids)} is not finite; use a smaller step"
            )
        return HypergradientResult(
            gradient=gradient,
            value=add_penalty(total.as_value(), penalty),
            residual=total.adjoint_residual,
            iterations=total.adjoint_iterations / max(total.count, 1),
            bound=total.omega if bound and gives_adjoint else None,
            bound_kind="estimated" if bound and gives_adjoint else None,
            at_floor="stalled" in total.short
            or _above(total.adjoint_residual, adjoint, oracle.problem.loss_scale),
            first=together and total.first,
            loss_scale=oracle.problem.loss_scale,
            certificate=_reached(total) | certificate_of(total.certificate),
            seen={} if oracle.wants is None else {oracle.wants: seen},
        )

    def _sum(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Over the ranks, as one vector."""
        if self._oracle.ranks.size == 1 or not any(entry.numel() for entry in parts.values()):
            return parts
        total = self._oracle.ranks.sum(torch.cat([entry.flatten() for entry in parts.values()]))
        pieces = total.split([entry.numel() for entry in parts.values()])
        return {
            name: piece.view_as(entry) for (name, entry), piece in zip(parts.items(), pieces, strict=True)
        }

    def _mu(self, chunk: Chunk, solution: Solution, wanted: bool, tally: Tally) -> Tensor:
        """μ of each sample, where it is ``wanted`` and not known as an estimate."""
        if not wanted or knows_mu(chunk.lower):
            return chunk.lower.mu
        tally.charge(Cost(power_iterations=RITZ_STEPS * len(chunk.samples)))
        return estimate_mu(chunk.lower, solution.x)


def _require_simultaneous(hypergradient: HypergradientEstimator, together: bool) -> None:
    if together and not (hypergradient.simultaneous or hypergradient.moves_x):
        name = type(hypergradient).__name__
        raise BltError(
            f"hypergradient {name} cannot form z from the iterates of the previous step, so x and the adjoint cannot be"
            " updated simultaneously; use cg-ift, minres or neumann, or update them in turn"
        )


def _unless_failed(tally: Tally) -> Tally:
    """The combined result of all ranks, or the error of the first that failed."""
    if tally.error is not None:
        raise NumericalError(tally.error)
    return tally


def _finite(gradient: Theta) -> bool:
    """Whether all numbers are, in one look at the device: their sum is then, and cannot overflow in float64."""
    entries = [entry.flatten() for entry in gradient.values()]
    return not entries or math.isfinite(float(torch.cat(entries).sum(dtype=torch.float64)))


def _reached(total: Tally) -> dict[str, float | str]:
    """The largest residuals of the lower level and of the adjoint system, for the log; those that were measured."""
    reached = {"lower_residual": total.residual, "adjoint_residual": total.adjoint_residual}
    return {name: value for name, value in reached.items() if total.count and math.isfinite(value)}


def _above(residual: float, effort: Effort, scale: float) -> bool:
    """Whether a tolerance was missed by more than rounding explains; an infinite residual was not measured."""
    return isinstance(effort, Accuracy) and math.isfinite(residual) and residual > 2 * effort.tol * scale
