"""The records that are passed between rooms. Failure is data: a status whose value is a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bltoolbox.bilevel.problem import Lower, Upper

#: Named parameters: a component sees its own names, a problem those of all its components with a prefix.
Theta = Mapping[str, Tensor]

#: Tensors by name whose first dimension is the task.
Rows = Mapping[str, Tensor]

#: A valid bound, the same for all samples or one per sample; None means unknown, which is never expressed as 0 or 1.
Bound = Tensor | float | None

#: An amount in the ledger. A derivative of one block of a finite sum is a fraction; exact, so that sums over ranks and
#: calls are the same in any order.
Amount = int | Fraction
_FRACTION = re.compile(r"-?\d{1,18}/[1-9]\d{0,17}")


@dataclass(frozen=True)
class Accuracy:
    """Effort until a tolerance is met: a distance to the minimiser, or the residual norm of a linear system."""

    tol: float


@dataclass(frozen=True)
class Steps:
    """Effort of a number of iterations, whatever accuracy that gives."""

    count: int


#: The effort of a call: until a tolerance is reached, or a number of iterations.
Effort = Accuracy | Steps


class Status(Enum):
    """How a lower-level solve of one sample ended."""

    CONVERGED = "the gradient norm reached the tolerance"
    STEPS = "the requested number of iterations is done"
    STALLED = "no progress at the precision of the dtype; use float64 or a larger tolerance"
    LIMIT = "the iteration limit was reached; raise it or use a larger tolerance"
    DIVERGED = (
        "the iteration diverged; the step or the Lipschitz constant is wrong for this problem, or its energy has no"
        " minimum, for which strong_convexity in the recipe is a remedy"
    )
    NOT_FINITE = "a NaN or Inf appeared; θ went out of range (use a smaller step) or the data are"


@dataclass(frozen=True)
class Batch:
    """Sample ids and their weights v_i."""

    ids: Sequence[int]
    weights: Sequence[float]


@dataclass(frozen=True)
class Cost:
    """The ledger, every entry summed over samples unless stated otherwise.

    ``computations``, lower-level plus linear iterations, is the paper's unit. Line search is in it, evaluation is
    not. Failed solves are included, too; a failed adjoint system counts its Hessian products.
    """

    lower_iterations: Amount = 0
    linear_iterations: Amount = 0
    #: The paper's own count: iterations of the slowest sample of a chunk times its size.
    slowest: Amount = 0
    #: Part of ``lower_iterations`` spent in trial values of a line search.
    line_search: Amount = 0
    #: Lanczos steps that estimate μ, for error bounds of hypergradients and values.
    power_iterations: int = 0
    #: Gradients of the lower level, whether for an iteration, a start, a check or a bound.
    gradients: Amount = 0
    hessian_products: Amount = 0
    linearisations: Amount = 0
    #: Mixed derivatives ∂_θ⟨∇h, q⟩.
    mixed_products: Amount = 0
    #: Derivatives ∂_θ h of the lower level, which value-function methods use.
    theta_gradients: Amount = 0
    #: Iterations spent on validation and evaluation tasks, and in tuning the baseline.
    evaluation_iterations: int = 0
    #: Oracle calls, not summed over samples.
    hypergradients: int = 0
    values: int = 0

    @property
    def computations(self) -> int | float:
        return _logged(self.lower_iterations + self.linear_iterations)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int | float]:
        """For logs: integers unless something was a fraction."""
        amounts = {f.name: _logged(getattr(self, f.name)) for f in fields(self)}
        return {"computations": self.computations} | amounts

    def pack(self) -> dict[str, int | str]:
        """As plain data without rounding, for checkpoints and other ranks: fractions are text such as ``7/5``."""
        amounts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: int(amount) if amount == int(amount) else str(amount) for name, amount in amounts.items()
        }

    @classmethod
    def unpack(cls, amounts: Mapping[str, int | str]) -> Cost:
        """What ``pack`` returned; ValueError for anything else."""
        if unknown := sorted(set(amounts) - {f.name for f in fields(cls)}):
            raise ValueError(f"the cost has an unknown entry {unknown[0]}")
        read: dict[str, Any] = {name: _amount(amount) for name, amount in amounts.items()}
        return cls(**read)


def _logged(amount: Amount) -> int | float:
    return int(amount) if amount == int(amount) else float(amount)


def _amount(value: object) -> Amount:
    if isinstance(value, int):
        return value
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        return Fraction(value)
    raise ValueError("the cost has an entry that is neither an integer nor a fraction")


@dataclass
class Counter:
    """Counts iterations and derivatives as they happen, so that failed and interrupted calls have a cost, too.

    The ledger collects them after each oracle call.
    """

    lower_iterations: int = 0
    linear_iterations: int = 0
    gradients: int = 0
    hessian_products: int = 0
    linearisations: int = 0
    mixed_products: int = 0
    theta_gradients: int = 0
    #: The counters of single blocks, by the number of blocks of which each is one.
    parts: dict[int, Counter] = field(default_factory=dict)

    def part(self, blocks: int) -> Counter:
        """Where iterations and derivatives of one of ``blocks`` blocks are counted: each costs 1/blocks."""
        if blocks == 1:
            return self
        return self.parts.setdefault(blocks, Counter())

    def copy(self) -> Counter:
        """The counts as they are now."""
        return replace(self, parts={blocks: counter.copy() for blocks, counter in self.parts.items()})

    def collect(self) -> Cost:
        """The counts since the last call."""
        counts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "parts"}
        for blocks, counter in self.parts.items():
            for name in counts:
                counts[name] += Fraction(getattr(counter, name), blocks)
        for name in counts:
            setattr(self, name, 0)
        self.parts = {}
        return Cost(**counts)


@dataclass(frozen=True)
class Solution:
    """x̃ with the norm of the gradient at x̃, per sample; all but x and the state are on the host."""

    x: Tensor
    #: +∞ where it was not measured.
    residual: Tensor
    #: residual/μ ≥ ‖x̃ − x̂‖, certified; NaN where no strong convexity is known.
    distance: Tensor
    iterations: Tensor
    status: tuple[Status, ...]
    #: The last state of the solver for each sample, in their order; only if it was requested.
    state: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Ask:
    """The request to a hypergradient component: z = Σ_i weights_i ∇f_i at the θ of ``lower``.

    θ is ``lower.theta``, by the names of the problem; z has the same names.
    """

    lower: Lower
    upper: Upper
    #: x̃, from which z is to be formed; ``start`` is where its solve began. For a component that ``moves_x`` both are
    #: the x of its last call; with ``together``, too, while the solver moves on from there.
    solution: Tensor
    start: Tensor
    weights: Tensor
    #: For the linear system, per sample: ``Accuracy`` is the norm of its residual.
    effort: Effort
    #: The tensors that ``keeps`` of the component names, by task; rows of new tasks are zero.
    memory: Rows = field(default_factory=dict)
    #: The number of this call in the run, the same after a resume and on every rank.
    call: int = 0
    #: Update x and the memory simultaneously from their previous values, not in turn: z is formed from ``solution`` and
    #: ``memory`` as they are, and the memory returned is that after iterations of the requested effort.
    together: bool = False
    #: Minimise another lower level, such as ``lower.tilted(upper, weight)``, with the solver of the recipe from a
    #: start: ``minimise(lower, x0, effort)``. Its iterations are counted, and a failure is an error.
    minimise: Callable[[Lower, Tensor, Effort], Solution] | None = None
    #: The inverse Hessian that the lower-level solver has built, as a product; None if it has none.
    inverse: Callable[[Tensor], Tensor] | None = None
    #: The effort requested for the lower level; that of the linear system if None.
    lower_effort: Effort | None = None
    #: The seed of the recipe: draws come from ``keyed_generator(seed, task, call, iteration)``, so that they do not
    #: depend on batches, ranks or a resume.
    seed: int = 0

    @property
    def tol(self) -> Tensor:
        """The residual norm to reach, one per sample; 0 where a number of iterations is requested."""
        return self.lower.mu.new_full(self.lower.mu.shape, self._tol)

    @property
    def tol_on_host(self) -> Tensor:
        """``tol``, for loops that look at residuals on the host."""
        return torch.full(self.lower.mu.shape, self._tol, dtype=self.lower.mu.dtype)

    @property
    def _tol(self) -> float:
        return self.effort.tol if isinstance(self.effort, Accuracy) else 0.0

    def limit(self, most: int) -> int:
        """The requested number of iterations, or ``most`` if a tolerance is requested."""
        return self.effort.count if isinstance(self.effort, Steps) else most


@dataclass(frozen=True)
class Estimate:
    """The result of a hypergradient component: the weighted sum z and, per sample, the outcome of its linear system,
    on the host or on the device.

    ``memory`` contains what ``keeps`` names, for the next call with the same tasks. ``x`` replaces the solution as
    a warm start. A component that ``moves_x`` must return it, and the loss is that of this x.
    """

    gradient: dict[str, Tensor]
    residual: Tensor
    iterations: Tensor
    adjoint: Tensor | None = None
    memory: Rows = field(default_factory=dict)
    x: Tensor | None = None
    #: Of a component that ``moves_x``, per sample: its iterations on x, and ``lower.residual(x)`` if it knows that.
    lower_iterations: Tensor | None = None
    lower_residual: Tensor | None = None
    #: Every iteration used one of this many blocks of a finite sum, and costs that fraction of a whole one.
    blocks: int = 1


@dataclass(frozen=True)
class BiasLimit:
    """A sequence of settings along which the bias of a hypergradient component vanishes; ``blt check`` follows it.

    All sequences that are given have the same length, at least two: setting k consists of their k-th entries. Along
    them the error of z at a minimiser must at least halve from each setting to the next, and end below 1 %.

        BiasLimit({"steps": (10, 40, 160)})                     truncated: error falls with the steps
        BiasLimit({"penalty": (10, 100, 1000)}, order=1)        error proportional to 1/penalty
        BiasLimit(calls=(1, 10, 100))                           iterates from call to call at one θ
        BiasLimit(condition=(2, 1.2, 1))                        exact where ∇²h is a multiple of the identity
    """

    #: Values of options of the component by name; all others are those of its ``example``.
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: Numbers of calls at the same θ, each with the ``memory`` (and ``x``) that the previous one returned; the last z
    #: counts.
    calls: Sequence[int] = ()
    #: Condition numbers of the Hessian ∇²h, for methods with no option that removes the bias.
    condition: Sequence[float] = ()
    #: p, if the error falls like the p-th power of 1/value of the first option; None if no rate is claimed.
    order: float | None = None

    def __post_init__(self) -> None:
        lengths = {
            len(entries) for entries in (*self.options.values(), self.calls, self.condition) if entries
        }
        if len(lengths) != 1 or min(lengths) < 2:
            raise ValueError(
                "a BiasLimit needs sequences of one common length, at least 2; it has"
                f" {', '.join(map(str, sorted(lengths))) or 'none'}"
            )
        if self.order is not None and not self.options:
            raise ValueError("the order of a BiasLimit is that of an option; name it in options")

    def __len__(self) -> int:
        return max(len(entries) for entries in (*self.options.values(), self.calls, self.condition))

    def options_at(self, k: int) -> dict[str, Any]:
        """The options of setting k."""
        return {name: values[k] for name, values in self.options.items()}

    def calls_at(self, k: int) -> int:
        """The number of calls of setting k; 1 unless declared."""
        return self.calls[k] if self.calls else 1

    def describe(self, k: int) -> str:
        """Setting k in words, e.g. ``steps = 40``."""
        parts = [f"{name} = {value}" for name, value in self.options_at(k).items()]
        parts += [f"{self.calls[k]} calls"] if self.calls else []
        parts += [f"condition number {self.condition[k]:g}"] if self.condition else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Constants:
    """Valid bounds on a ball around each x: the Lipschitz constants of ∇²R and of B = ∂²_{xθ}R there, and ‖B(x)‖."""

    hessian_lipschitz: Tensor
    mixed_lipschitz: Tensor
    mixed_norm: Tensor


@dataclass(frozen=True)
class Value:
    """f at θ with ``lower ≤ f ≤ upper``: certified where the strong convexity is known, elsewhere estimated if
    the oracle was asked for bounds; ``upper`` is infinite if not."""

    value: float
    lower: float
    upper: float
    certified: bool
    residual: float
    iterations: float
    #: The number of samples that ended in each status other than converged, by its name.
    short: Mapping[str, int] = field(default_factory=dict)
    #: P(θ), which value and bounds contain; None where the problem has no penalty.
    penalty: float | None = None
    #: The solutions by sample id, until they are accepted as warm starts.
    trial: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Scales:
    """The sizes at θ that accuracies are relative to, as means over samples."""

    #: ‖x̃ − x₀‖, how far the lower level moves from a cold start.
    distance: float
    #: ‖∇g(x̃)‖, the right-hand side of the adjoint system, for a loss of scale 1.
    slope: float


@dataclass(frozen=True)
class HypergradientResult:
    """z at θ, with the value of f there and, on request, a bound ω on ‖z − ∇f‖."""

    gradient: dict[str, Tensor]
    value: Value
    residual: float
    iterations: float
    bound: float | None = None
    bound_kind: str | None = None
    #: Whether a tolerance was below what the dtype can reach.
    at_floor: bool = False
    #: Whether z was formed ``together`` with the first iterations on every task, from adjoints that are still zero.
    first: bool = False
    #: The factor of the loss: multiply quantities in units of z or f by it.
    loss_scale: float = 1.0
    #: For the log: mean and maximum over samples of the distance to the minimiser and of the error bound.
    certificate: Mapping[str, float | str] = field(default_factory=dict)
    #: What the sampler ``wants``, by its name: one number per sample in the order of the batch, float64 on the CPU,
    #: the same on all ranks; nothing where no sampler observes.
    seen: Rows = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One upper-level step: the new θ and state, and the values to log (plain numbers)."""

    theta: dict[str, Tensor]
    state: dict[str, Any]
    loss: float
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    #: A sentence if the optimizer has nothing left to do.
    finished: str | None = None
    #: ``Value.penalty`` of the value that is the loss, so that it can be logged separately.
    penalty: float | None = None
