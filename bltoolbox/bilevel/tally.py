"""What an oracle call adds up: over the chunks of a rank, and over the ranks.

Weighted sums in float64, maxima, and the ledger. The ranks' tallies are merged in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.bounds import loss_lipschitz
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Amount, Cost, Estimate, Rows, Scales, Solution, Status, Value
from bltoolbox.bilevel.tensors import norm
from bltoolbox.distributed.ranks import Ranks


@dataclass(frozen=True)
class Chunk:
    """Some samples of a batch, bound to θ."""

    samples: Sequence[int]
    #: Where they stand in the batch.
    positions: Sequence[int]
    #: On the host.
    weights: Tensor
    lower: Lower
    upper: Upper
    start: Tensor
    #: What the solver persists of these samples.
    kept: Rows = field(default_factory=dict)


@dataclass
class Tally:
    """Plain numbers: what one rank sends to the others."""

    value: float = 0.0
    lower: float = 0.0
    upper: float = 0.0
    certified: bool = True
    #: Whether μ was known or estimated for all samples, so that ``upper`` bounds anything.
    bounded: bool = True
    residual: float = 0.0
    iterations: float = 0.0
    count: int = 0
    short: dict[str, int] = field(default_factory=dict)
    #: Why a solve failed, so that there is neither a value nor a hypergradient.
    error: str | None = None
    adjoint_residual: float = 0.0
    adjoint_iterations: float = 0.0
    #: Whether no sample had been visited before.
    first: bool = True
    #: The error bound of the weighted mean.
    omega: float = 0.0
    #: Sums of the sizes that accuracies are relative to.
    distance: float = 0.0
    slope: float = 0.0
    #: The totals of the certificate, and the ledger.
    certificate: dict[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    def solved(self, chunk: Chunk, solution: Solution, mu: Tensor) -> tuple[Tensor, Tensor]:
        """Values of one chunk, and their bounds where ``mu``, known or estimated, is positive.

        Returns g_i and ‖∇g_i‖ of each sample, on the host.
        """
        gradient = chunk.upper.gradient(solution.x)
        lipschitz, weights = loss_lipschitz(chunk.upper, solution.x, chunk.start), chunk.weights
        # What is needed of the device, in one look.
        seen = [chunk.upper.value(solution.x), norm(gradient).double()]
        seen += [lipschitz.double()] if isinstance(lipschitz, Tensor) else []
        value, slope, *measured = torch.stack(seen).cpu()
        lipschitz = measured[0] if measured else lipschitz
        mu = (chunk.lower.mu_on_host if mu is chunk.lower.mu else mu.cpu()).double()
        # An infinite residual was not measured.
        convex = (mu > 0) & torch.isfinite(solution.residual)
        epsilon = torch.where(convex, solution.residual.double() / mu, 0.0)
        above = value + slope * epsilon + lipschitz / 2 * epsilon.square()
        # Above its tangent where g is convex, as well as above its infimum.
        below = value - slope * epsilon
        if not chunk.upper.convex:
            below = below - lipschitz / 2 * epsilon.square()
        infimum = chunk.upper.infimum
        below = torch.where(convex, below.clamp_min(infimum), 0.0)
        self.value += float(weights @ value)
        self.upper += float(weights @ above)
        self.lower += float(weights @ below)
        self.bounded &= bool(convex.all())
        certified = bool((chunk.lower.mu_on_host > 0).all())
        self.certified &= chunk.upper.lipschitz is not None and certified
        self.residual = max(self.residual, float(solution.residual.max()))
        self.iterations += float(solution.iterations.sum())
        self.count += len(chunk.samples)
        for status in solution.status:
            if status is not Status.CONVERGED:
                name = status.name.lower()
                self.short[name] = self.short.get(name, 0) + 1
        return value, slope

    def differentiated(self, estimate: Estimate) -> None:
        """How the adjoint systems of one chunk went."""
        self.adjoint_residual = max(self.adjoint_residual, float(estimate.residual.max()))
        self.adjoint_iterations += float(estimate.iterations.sum())

    def measured(self, chunk: Chunk, start: Tensor, solution: Solution) -> None:
        """How far the solutions of one chunk are from their start, and how steep the loss is there."""
        self.distance += float(norm(solution.x - start).sum())
        self.slope += float(norm(chunk.upper.gradient(solution.x)).sum()) / chunk.upper.scale
        self.count += len(chunk.samples)

    def charge(self, cost: Cost) -> None:
        """Add to the ledger."""
        self.cost = self.cost + cost

    @property
    def failed(self) -> bool:
        return self.error is not None

    def totals(self) -> dict[str, Any]:
        """As plain data."""
        return vars(self) | {"cost": self.cost.pack()}

    def as_value(self, trial: object = None) -> Value:
        """f with its bounds, infinite where a solve failed; the upper one also where no μ is known."""
        return Value(
            value=math.inf if self.failed else self.value,
            lower=self.lower,
            upper=self.upper if self.bounded and not self.failed else math.inf,
            certified=self.certified and not self.failed,
            residual=self.residual,
            iterations=self.iterations / max(self.count, 1),
            short=dict(self.short),
            trial=None if self.failed else trial,
        )

    def as_scales(self) -> Scales:
        return Scales(self.distance / max(self.count, 1), self.slope / max(self.count, 1))


_LARGEST = {"residual", "adjoint_residual"}


def merge(tallies: Sequence[Mapping[str, Any]]) -> Tally:
    """The sum of the tallies of all ranks, in the order of ranks."""
    cost = sum((Cost.unpack(tally["cost"]) for tally in tallies), Cost())
    total, *others = [{name: amount for name, amount in tally.items() if name != "cost"} for tally in tallies]
    for tally in others:
        total = _join("", total, tally)
    return Tally(**total, cost=cost)


def _join(name: str, mine: Any, theirs: Any) -> Any:
    if isinstance(mine, dict):
        extra = {key: value for key, value in theirs.items() if key not in mine}
        return {
            key: _join(key, value, theirs[key]) if key in theirs else value for key, value in mine.items()
        } | extra
    if name == "error":
        return theirs if mine is None else mine
    if isinstance(mine, bool):
        return mine and theirs
    return max(mine, theirs) if name in _LARGEST or name.endswith("_max") else mine + theirs


class Slowest:
    """The count of the paper: the iterations of the slowest sample of each chunk, times the size of the chunk.

    The chunks are those of the full batch, so the count does not depend on how it is divided over ranks.
    """

    def __init__(self, count: int, chunk: int) -> None:
        self.count, self.chunk = count, chunk
        #: The largest number of iterations of a lower-level solve and of a linear system, chunk after chunk.
        self.most: list[Amount] = [0] * (2 * -(-count // chunk))

    def add(
        self, positions: Sequence[int], iterations: Sequence[Amount], *, linear: bool = False, blocks: int = 1
    ) -> None:
        """Iterations of the lower level, or of a linear system, of the samples at some positions of the batch, each on
        one of ``blocks`` blocks."""
        for position, spent in zip(positions, iterations, strict=True):
            place = 2 * (position // self.chunk) + linear
            amount = spent if blocks == 1 else Fraction(spent) / blocks
            self.most[place] = max(self.most[place], amount)

    def total(self, ranks: Ranks) -> Amount:
        """The count over all ranks."""
        most = self.most
        if ranks.size > 1:
            # As whole numbers of the smallest unit that any rank has.
            mine = math.lcm(*(count.denominator for count in most))
            unit = int(ranks.largest(torch.tensor([mine])))
            most = [
                Fraction(count, unit)
                for count in ranks.largest(torch.tensor([int(count * unit) for count in most])).tolist()
            ]
        sizes = (min(self.chunk, self.count - first) for first in range(0, self.count, self.chunk))
        return sum(
            size * (lower + linear) for size, lower, linear in zip(sizes, most[::2], most[1::2], strict=True)
        )
