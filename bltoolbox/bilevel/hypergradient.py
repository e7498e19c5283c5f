"""z of one chunk: lower level and adjoint system in turn, the request to the estimator, and what is kept of its answer.

In turn: x⁺ from x at θ, then q⁺ from q at x⁺, and z from (x⁺, q⁺). Together: x⁺ from x, q⁺ from q at x, and z from
(x, q), the values before this call. An estimator that ``moves_x`` replaces all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bltoolbox.bilevel.bounds import estimate_bound, gradient_norms
from bltoolbox.bilevel.kept import Kept
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Accuracy, Ask, Counter, Effort, Estimate, Solution, Status
from bltoolbox.bilevel.tally import Chunk
from bltoolbox.bilevel.tensors import beside
from bltoolbox.errors import BltError, NumericalError

if TYPE_CHECKING:
    from bltoolbox.bilevel.oracle import BilevelOracle


@dataclass(frozen=True)
class Differentiator:
    """Forms the hypergradient of chunks with given efforts."""

    oracle: BilevelOracle
    memory: Kept
    effort: Effort
    adjoint: Effort
    together: bool

    def __call__(self, chunk: Chunk) -> tuple[Solution, Estimate]:
        """x with its residual, and z; both become warm starts."""
        oracle = self.oracle
        if oracle.hypergradient.moves_x:
            estimate = self._estimate(chunk, chunk.start, None)
            solution = self._moved(chunk, estimate)
        else:
            solution = oracle.solve(chunk, self.effort)
            estimate = self._estimate(chunk, chunk.start if self.together else solution.x, solution)
        oracle.solutions.put(chunk.samples, solution.x if estimate.x is None else estimate.x)
        rows = self.memory.rows_of(estimate.memory, len(chunk.samples)) | oracle.persisted(solution)
        for name, values in rows.items():
            oracle.stores[name].put(chunk.samples, values)
        return solution, estimate

    def _estimate(self, chunk: Chunk, x: Tensor, solution: Solution | None) -> Estimate:
        oracle = self.oracle
        counted = _Counted(oracle, chunk)
        ask = Ask(
            chunk.lower,
            chunk.upper,
            solution=x,
            start=chunk.start,
            weights=beside(chunk.weights.to(x.dtype), x),
            effort=_scaled(self.adjoint, chunk.upper.scale),
            memory=self.memory.get(chunk.samples),
            call=oracle.cost.hypergradients,
            together=self.together,
            minimise=counted.minimise,
            inverse=self._inverse(solution),
            lower_effort=self.effort,
            seed=oracle.seed,
        )
        before = oracle.counter.copy()
        try:
            estimate = oracle.hypergradient.estimate(ask)
        except BaseException as error:
            self._charge_unfinished(chunk, before)
            if isinstance(error, NumericalError):
                raise NumericalError(f"samples {named(chunk.samples)}: {error}") from error
            raise
        estimate = replace(estimate, iterations=estimate.iterations.cpu())
        oracle.counter.part(estimate.blocks).linear_iterations += int(estimate.iterations.sum())
        oracle.slowest.add(chunk.positions, estimate.iterations.tolist(), linear=True, blocks=estimate.blocks)
        counted.finish(estimate, solution)
        return estimate

    def _inverse(self, solution: Solution | None) -> Callable[[Tensor], Tensor] | None:
        if solution is None or not self.oracle.needs_inverse:
            return None
        return partial(self.oracle.solver.inverse, solution.state)

    def _moved(self, chunk: Chunk, estimate: Estimate) -> Solution:
        """The x to which an estimator has moved."""
        name, x, count = type(self.oracle.hypergradient).__name__, estimate.x, len(chunk.samples)
        if x is None:
            raise BltError(f"hypergradient {name} declares moves_x, but its estimate has no x")
        finite = torch.isfinite(x).flatten(1).all(1).tolist()
        if bad := [sample for sample, good in zip(chunk.samples, finite, strict=True) if not good]:
            raise NumericalError(f"hypergradient {name}, samples {named(bad)}: {Status.NOT_FINITE.value}")
        mu, residual, iterations = (
            chunk.lower.mu_on_host,
            estimate.lower_residual,
            estimate.lower_iterations,
        )
        residual = torch.full_like(mu, torch.inf) if residual is None else residual.cpu()
        iterations = torch.zeros(count, dtype=torch.long) if iterations is None else iterations.cpu()
        distance = residual / torch.where(mu > 0, mu, torch.nan)
        return Solution(x, residual, distance, iterations, (Status.STEPS,) * count)

    def _charge_unfinished(self, chunk: Chunk, before: Counter) -> None:
        """A failed estimate reports no iterations; its derivatives, one per iteration, are counted instead."""
        counter, count, spent = self.oracle.counter, len(chunk.samples), Fraction(0)
        for blocks in (1, *counter.parts):
            now, then = counter.part(blocks), before.part(blocks)
            linear = now.hessian_products - then.hessian_products
            lower = 0
            if self.oracle.hypergradient.moves_x:
                # What ``minimise`` has spent is counted already.
                solved = now.lower_iterations - then.lower_iterations
                lower = max(0, now.gradients - then.gradients - solved)
            now.linear_iterations += linear
            now.lower_iterations += lower
            spent += Fraction(linear + lower, blocks)
        self.oracle.slowest.add(chunk.positions, [math.ceil(spent / count)] * count, linear=True)

    def seen(self, chunk: Chunk, x: Tensor, estimate: Estimate, loss: Tensor, slope: Tensor) -> Tensor:
        """What the sampler wants to know about the samples of a chunk; the rows of z cost mixed derivatives."""
        oracle = self.oracle
        if oracle.wants == "gradient":
            assert estimate.adjoint is not None
            at = chunk.start if self.together else x
            project = oracle.problem.project_gradient
            rows = gradient_norms(chunk.lower, chunk.upper, at, estimate.adjoint, project)
        else:
            rows = loss if oracle.wants == "loss" else slope
        return rows.double().cpu()

    def bound(self, chunk: Chunk, solution: Solution, estimate: Estimate, mu: Tensor) -> Tensor | None:
        """ω_i of one chunk, unless the estimator gives no adjoint."""
        if estimate.adjoint is None:
            return None
        oracle = self.oracle
        unknown = torch.full(
            (len(chunk.samples), 2), torch.nan, dtype=torch.float64, device=solution.x.device
        )
        previous = oracle.lipschitz_estimates.get(chunk.samples, unknown).to(solution.x.dtype)
        result = estimate_bound(
            chunk.lower,
            chunk.upper,
            solution.x,
            chunk.start,
            estimate.adjoint,
            solution.residual.to(mu),
            estimate.residual.to(mu),
            (previous[:, 0], previous[:, 1]),
            mu,
            oracle.problem.project_gradient,
        )
        constants = torch.stack([result.hessian_lipschitz, result.mixed_lipschitz], dim=1)
        oracle.lipschitz_estimates.put(chunk.samples, constants.double())
        return result.omega


class _Counted:
    """``Ask.minimise`` of one chunk, with its iterations added to those of the lower level."""

    def __init__(self, oracle: BilevelOracle, chunk: Chunk) -> None:
        self.oracle, self.chunk = oracle, chunk
        self.spent = dict.fromkeys(chunk.samples, 0)

    def minimise(self, lower: Lower, x0: Tensor, effort: Effort) -> Solution:
        solution = self.oracle.minimise(lower, x0, effort)
        samples = lower.ids.tolist()
        for sample, iterations in zip(samples, solution.iterations.tolist(), strict=True):
            self.spent[sample] += iterations
        self.oracle.require_solved(solution, samples)
        return solution

    def finish(self, estimate: Estimate, solution: Solution | None) -> None:
        """Charge the iterations that an estimator reports of itself, and count the slowest sample with all of them."""
        own, count = estimate.lower_iterations, len(self.spent)
        if own is not None:
            self.oracle.counter.part(estimate.blocks).lower_iterations += int(own.sum())
        solved = [0] * count if solution is None else solution.iterations.tolist()
        added = (
            [Fraction(0)] * count
            if own is None
            else [Fraction(products, estimate.blocks) for products in own.tolist()]
        )
        total = [sum(parts) for parts in zip(solved, added, self.spent.values(), strict=True)]
        self.oracle.slowest.add(self.chunk.positions, total)


def named(samples: Sequence[int]) -> str:
    """Samples, in a message."""
    shown = ", ".join(str(i) for i in samples[:8])
    return shown if len(samples) <= 8 else f"{shown}, … ({len(samples)} in all)"


def _scaled(effort: Effort, scale: float) -> Effort:
    """Accuracies are relative to the size of the loss."""
    return Accuracy(effort.tol * scale) if isinstance(effort, Accuracy) else effort
