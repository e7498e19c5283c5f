"""The records that are passed between rooms. Failure is data: a status whose value is a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from bltoolbox.bilevel.problem import Lower, Upper

#: Named parameters: a component sees its own names, a problem those of all its components with a prefix.
Theta = Mapping[str, Tensor]

#: Tensors by name whose first dimension is the task.
Rows = Mapping[str, Tensor]

#: A valid bound, the same for all samples or one per sample; None means unknown, which is never expressed as 0 or 1.
Bound = Tensor | float | None


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
    DIVERGED = "the iteration diverged; the step or the Lipschitz constant is wrong for this problem"
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

    lower_iterations: int = 0
    linear_iterations: int = 0
    #: The paper's own count: iterations of the slowest sample of a chunk times its size.
    slowest: int = 0
    #: Part of ``lower_iterations`` spent in trial values of a line search.
    line_search: int = 0
    #: Lanczos steps that estimate μ, for error bounds of hypergradients and values.
    power_iterations: int = 0
    #: Gradients of the lower level, whether for an iteration, a start, a check or a bound.
    gradients: int = 0
    hessian_products: int = 0
    linearisations: int = 0
    #: Mixed derivatives ∂_θ⟨∇h, q⟩.
    mixed_products: int = 0
    #: Iterations spent in restoring validation and evaluation images, and in tuning the baseline.
    evaluation_iterations: int = 0
    #: Oracle calls, not summed over samples.
    hypergradients: int = 0
    values: int = 0

    @property
    def computations(self) -> int:
        return self.lower_iterations + self.linear_iterations

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        return {"computations": self.computations} | {f.name: getattr(self, f.name) for f in fields(self)}


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

    def collect(self) -> Cost:
        """The counts since the last call."""
        cost = Cost(**vars(self))
        for entry in fields(self):
            setattr(self, entry.name, 0)
        return cost


@dataclass(frozen=True)
class Solution:
    """x̃ with the norm of the gradient at x̃, per sample."""

    x: Tensor
    residual: Tensor
    #: residual/μ ≥ ‖x̃ − x̂‖, certified; NaN where no strong convexity is known.
    distance: Tensor
    iterations: Tensor
    status: tuple[Status, ...]


@dataclass(frozen=True)
class Ask:
    """The request to a hypergradient component: z = Σ_i weights_i ∇f_i at the θ of ``lower``."""

    lower: Lower
    upper: Upper
    #: x̃, from which z is to be formed; ``start`` is where its solve began.
    solution: Tensor
    start: Tensor
    weights: Tensor
    #: For the linear system, per sample: ``Accuracy`` is the norm of its residual.
    effort: Effort
    #: The tensors that ``keeps`` of the component names, by task; rows of new tasks are zero.
    memory: Rows = field(default_factory=dict)
    #: The number of this call in the run, the same after a resume and on every rank.
    call: int = 0
    #: Update x and the memory simultaneously from their previous values, not in turn.
    together: bool = False
    #: Minimise another lower level with the solver of the recipe, from a start: ``minimise(lower, x0, effort)``.
    minimise: Callable[[Lower, Tensor, Effort], Solution] | None = None
    #: The inverse Hessian that the lower-level solver has built, as a product; None if it has none.
    inverse: Callable[[Tensor], Tensor] | None = None

    @property
    def tol(self) -> Tensor:
        """The residual norm to reach, one per sample; 0 where a number of iterations is requested."""
        tol = self.effort.tol if isinstance(self.effort, Accuracy) else 0.0
        return self.lower.mu.new_full(self.lower.mu.shape, tol)

    def limit(self, most: int) -> int:
        """The requested number of iterations, or ``most`` if a tolerance is requested."""
        return self.effort.count if isinstance(self.effort, Steps) else most


@dataclass(frozen=True)
class Estimate:
    """The result of a hypergradient component: the weighted sum z and, per sample, the outcome of its linear system.

    ``memory`` contains what ``keeps`` names, for the next call with the same tasks. ``x`` replaces the solution as
    a warm start, for methods that iterate on it themselves.
    """

    gradient: dict[str, Tensor]
    residual: Tensor
    iterations: Tensor
    adjoint: Tensor | None = None
    memory: Rows = field(default_factory=dict)
    x: Tensor | None = None


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
