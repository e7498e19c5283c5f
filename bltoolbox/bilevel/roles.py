"""The roles: what the author of a plugin implements.

A component is one plain class. Its ``__init__`` parameters, with their annotations and defaults, are its entire
configuration: validation, ``blt show`` and the docs come from the signature. Components have no hidden state and
never change their arguments; whatever evolves is returned.

Every quantity is per sample. Batched tensors have the sample as first dimension; energies, residuals, tolerances,
step sizes and Lipschitz constants have shape ``(B,)``, and nothing may depend on which samples share a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.records import (
    Ask,
    Batch,
    BiasLimit,
    Effort,
    Estimate,
    HypergradientResult,
    Rows,
    Scales,
    Step,
    Theta,
    Value,
)

if TYPE_CHECKING:
    from bltoolbox.bilevel.problem import Lower, Upper
    from bltoolbox.bilevel.tasks import Tasks


class Role(ABC):
    """What all roles share.

    A constructor (and ``Sampler.init``, ``Data.clean``) refuses what its annotations cannot express with a
    ``ValueError`` that is one sentence: what is wrong, what would be right. The user sees it with the position in the
    recipe.

    ``requires`` maps a partner's kind to the optional methods that it must provide, e.g.
    ``{"regularizer": ("analyse", "synthesise", "majorant")}``. Validation refuses a partner that lacks one of them
    and suggests one that fits. Methods that the class or a base below the role defines count, whatever their name, so
    a solver and a regularizer may agree on one that is not part of a role.
    """

    kind: ClassVar[str]
    requires: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        """Options with which ``blt check`` tests the component; its defaults unless overridden.

        Needed if a parameter has no default or the defaults take long. Files may be created in ``folder``,
        which is empty and temporary. A nested component is ``{"name": …}``, as in a
        recipe.
        """
        return {}

    def offers(self, method: str) -> bool:
        """Whether this component implements an optional method of its role."""
        base = next(cls for cls in type(self).__mro__ if "kind" in vars(cls))
        own = getattr(type(self), method, None)
        return own is not None and own is not getattr(base, method, None)


class Parametric(Role):
    """A component that may have parameters, which are learned. ``caption`` says what ``pictures`` shows of them."""

    caption: str = ""

    def init_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """The initial parameters for x of ``shape``, as float64 CPU tensors; none by default."""
        return {}

    def standard_params(self, shape: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """The standard parameters, as chosen without learning, for a baseline; the initial ones by default.

        A ``ValueError`` that is one sentence refuses a baseline where there is no such choice.
        """
        return self.init_params(shape, generator)

    def prepare(self, theta: Theta) -> Theta:
        """θ with quantities derived from it once and used often. The methods that compute with θ receive the result.

        It must contain the entries of θ under their names, and be differentiable in them. Methods that change θ
        (``upgrade``, ``project``, ``project_gradient``) receive θ itself, and so do ``penalty`` and
        ``pairing_gradients``.
        """
        return theta

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        """θ as read from a file, converted from the parameters of earlier versions."""
        return dict(theta)

    def check(self, shape: Sequence[int]) -> str | None:
        """A sentence if x of ``shape`` cannot be handled, else None."""
        return None

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ: acts on θ − αz after a step."""
        return dict(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        """Projection of z onto the directions that a *linear* constraint leaves free; applied before any norm of z."""
        return dict(gradient)

    def penalty(self, theta: Theta) -> Tensor | None:
        """P(θ), a differentiable scalar in the dtype of θ that is added to f once, not per sample; None for none.

        It is not multiplied by the ``scale`` of the loss.
        """
        return None

    def pictures(self, theta: Theta) -> Tensor | None:
        """Something to look at, e.g. learned filters, a kernel or a map of weights: (N, C, H, W) of any scale, or
        None."""
        return None


class Problem(Role):
    """The source of tasks: h_i and g_i for every split, and the θ that they share.

    A task is one lower-level problem: a picture to reconstruct, a fold of a cross-validation, a few-shot problem.
    ``metrics`` are what its tasks measure, each a ``Metric`` by its name; the first decides which θ is best unless the
    recipe names another one. ``loss``, the mean of the upper loss, is always among them.

    Accuracies of the upper level are relative to ``loss_scale``, the ``scale`` of its losses; those of evaluations to
    ``unit``, the size of x. ``from_sections`` is only for the problem of the toolbox that is made of the sections of a
    recipe for images, instead of options of its own.
    """

    kind = "problem"
    loss_scale: float = 1.0
    unit: float = 1.0
    metrics: ClassVar[Mapping[str, Any]] = {}
    from_sections: ClassVar[bool] = False

    @abstractmethod
    def init_params(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The initial parameters, as float64 CPU tensors."""

    @abstractmethod
    def tasks(self, split: str, like: Tensor) -> Tasks | None:
        """The tasks of a split, ``training``, ``validation`` or ``evaluation``; None if there are none.

        Their tensors have the dtype and the device of ``like``. Data that are drawn depend on options alone, so that
        every call returns the same tasks.
        """

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ."""
        return dict(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        """z without its components across a linear constraint."""
        return dict(gradient)

    def penalty(self, theta: Theta) -> Tensor | None:
        """P(θ), a differentiable scalar that is added to f once, not per task; None for none."""
        return None


class SolverState(Protocol):
    """A frozen dataclass of tensors whose first dimension is the sample, with at least these two. None is allowed, and
    so are records of such tensors and integers that all samples share, e.g. a number of iterations."""

    @property
    def x(self) -> Tensor: ...

    @property
    def residual(self) -> Tensor: ...


class LowerSolver(Role):
    """An iteration for ``argmin_x h(x, θ)``. The loop around it (stopping, compaction, guards) belongs to the core.

    ``residual`` is ``lower.residual(x)``, the (projected) gradient norm at the ``x`` of the same state. A
    solver that always evaluates it there may set ``exact_residual``; otherwise the loop recomputes it before it
    accepts a sample as converged. A residual of +∞ means that it was not measured in this iteration.
    ``handles_constraint`` means that iterates stay in the constraint set through ``lower.project``. One that does not
    converge to the minimiser, such as a stochastic method with a fixed step, declares ``converges = False``:
    evaluations then use another solver.
    A solver that needs no gradient of the regularizer declares ``handles_nonsmooth``; if it bounds its error by a
    duality gap, it declares ``by_gap`` and reports √(2μ·gap) as residual, which bounds μ‖x − x̂‖ like a gradient norm.
    """

    kind = "lower_solver"
    exact_residual: ClassVar[bool] = False
    handles_constraint: ClassVar[bool] = False
    handles_nonsmooth: ClassVar[bool] = False
    by_gap: ClassVar[bool] = False
    converges: ClassVar[bool] = True

    def persists(self, lower: Lower) -> Rows:
        """Fields of the state that are kept for each task as a warm start besides x, as empty examples (0, …); none by
        default.

        They must not depend on θ (a dual variable does not). They are part of checkpoints.
        """
        return {}

    @abstractmethod
    def init(self, lower: Lower, x0: Tensor, kept: Rows) -> Any:
        """The state at x0, with its residual.

        ``kept`` contains the fields that ``persists`` names, with zeros in the rows of new tasks, so that zero must
        be a valid start; it is empty in cold solves.
        """

    @abstractmethod
    def step(self, lower: Lower, state: Any) -> Any:
        """One iteration, for all samples of the state."""

    def outcome(self, state: Any) -> Any:
        """What outlives the solve, for ``persists`` and ``inverse``: the state itself, or one whose fields have shapes
        that do not depend on the iteration, since samples finish in different iterations."""
        return state

    def quick(self) -> LowerSolver:
        """The solver for cold solves to a few digits, of a large picture for instance; this one unless another is
        faster."""
        return self

    def inverse(self, state: Any, v: Tensor) -> Tensor:
        """The inverse Hessian that the solver has built, times v; ``state`` is its ``outcome``."""
        raise NotImplementedError(f"{type(self).__name__} builds no inverse Hessian")


class HypergradientEstimator(Role):
    """z ≈ ∇f from an approximate minimiser.

    One whose estimate has no ``adjoint`` declares ``gives_adjoint = False``: it has no error bound.
    One that no tolerance makes exact declares ``exact = False``.
    One with a bias that an option removes (a number of terms, a penalty) declares in ``limit`` along which settings it
    vanishes, whether it is exact at its defaults or not; ``blt check`` follows them. Where neither a tolerance nor a
    limit makes z exact, its check ends with "not verified".
    One that draws at random is ``stochastic``: z depends on ``Ask.call``, and its mean over calls is compared.
    One that needs neither gradients nor Hessians of the regularizer declares ``handles_nonsmooth``.
    One that iterates on x itself declares ``moves_x = True``: the lower level is then not solved before ``estimate``,
    ``Ask.solution`` is the x that the last call returned as ``Estimate.x`` (the cold start for new tasks), and the
    loss and the residual of a step are those of the new one.

    One that forms z from ``Ask.memory`` as it is where ``Ask.together`` is set declares ``simultaneous = True``;
    others are refused for such a call, unless they move x by rules of their own.
    One whose result depends on what was kept (iterates, tables), so that losing it would be more than a cold start,
    declares ``needs_memory = True``: warm starts must then be stored as they are.

    One that uses ``Ask.inverse`` declares ``requires = {"lower_solver": ("inverse",)}``.
    """

    kind = "hypergradient"
    gives_adjoint: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    limit: ClassVar[BiasLimit | None] = None
    stochastic: ClassVar[bool] = False
    handles_nonsmooth: ClassVar[bool] = False
    moves_x: ClassVar[bool] = False
    simultaneous: ClassVar[bool] = False
    needs_memory: ClassVar[bool] = False

    def keeps(self, lower: Lower, upper: Upper) -> Rows:
        """Tensors kept for each task from one call to the next, as empty examples (0, …); none by
        default.

        They are passed back in ``Ask.memory``, with zeros for new tasks, and are part of checkpoints.
        """
        return {}

    @abstractmethod
    def estimate(self, ask: Ask) -> Estimate:
        """z = Σ_i weights_i ∇f_i."""


class Sampler(Role):
    """v ~ D with E[v_i] = 1: which samples, with which weights.

    ``full`` means that every batch contains all samples with weight 1, which some optimizers need.
    """

    kind = "sampler"
    full: ClassVar[bool] = False
    #: What ``observe`` receives about each sample: its ``loss`` g_i, the ``slope`` ‖∇g_i‖ or the ``gradient`` norm
    #: ‖z_i‖, which costs a mixed derivative per sample and needs an estimator with an adjoint. Read once, when a run is
    #: assembled; ``__init__`` may set it.
    wants: str = "loss"

    @abstractmethod
    def init(self, m: int, seed: int) -> dict[str, Any]:
        """The state before the first draw: plain numbers and tensors, so that it can be saved."""

    @abstractmethod
    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        """A batch of ids and weights, and the next state."""

    def observe(self, state: Mapping[str, Any], batch: Batch, seen: Rows) -> dict[str, Any]:
        """The state after a successful step; ``state`` is what ``next`` returned with the batch.

        ``seen[wants]`` has one number per sample in the order of the batch (float64, on the CPU), from the last
        hypergradient of the step: where a method asks for several, that is the most accurate one, at the θ from which
        the step was taken. It is the same on all ranks and after a resume. Not called for failed steps.
        """
        return dict(state)


class Oracle(Protocol):
    """What an upper-level optimizer may request about f (or f_v of the current batch), to a given accuracy.

    ``tol`` is a distance in x, ``adjoint_tol`` a residual norm of the adjoint system for a loss of scale 1: it is
    multiplied by the recipe's ``loss_scale``, so that the scale of the loss does not change the path of θ.

    Both may be a number of iterations instead, ``Steps(k)``: then reaching it is not a failure, only NaN is, and the
    residuals reached are logged as ``lower_residual`` and ``adjoint_residual``.

    Every call may raise ``BudgetExhausted``; the optimizer must not catch it.
    """

    def value(
        self,
        theta: Theta,
        effort: Effort,
        *,
        bound: bool = False,
        towards: Value | None = None,
        fraction: float = 1.0,
    ) -> Value:
        """f(θ), its bounds certified where the strong convexity is known and with ``bound`` estimated elsewhere.

        Its solutions become warm starts only through ``accept``. Solves start at the warm starts x or, with an
        earlier value ``towards`` whose solutions are x⁺, at x + fraction·(x⁺ − x): the fraction is 1 for the same θ at
        another accuracy, and ½ for a step of half the length. This changes no warm start.
        """
        ...

    def hypergradient(
        self, theta: Theta, effort: Effort, adjoint: Effort, *, bound: bool = False, together: bool = False
    ) -> HypergradientResult:
        """z(θ) and f(θ), the lower level solved with ``effort`` and the linear system of the hypergradient with
        ``adjoint``.

        With ``bound`` also ω ≥ ‖z − ∇f‖ and bounds on f (estimated or certified). With ``together`` all iterates are
        updated from their previous values, as simultaneous single-loop methods do: z is formed from the stored x and
        the stored adjoint, and is zero on the first visit; there is no ω, and the loss is that of the new x.
        """
        ...

    def scales(self, theta: Theta) -> Scales:
        """The sizes at θ that `auto` accuracies are relative to."""
        ...

    def accept(self, value: Value) -> None:
        """Make the solutions behind a trial value the warm starts."""
        ...

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ."""
        ...


class UpperOptimizer(Role):
    """θ ← θ⁺, with any number of calls to the oracle.

    ``handles_floor`` means that it detects when a tolerance is below what the dtype can reach; for others
    the run stops with a message. ``full_batch`` means that it needs all data at each step, so that a
    mini-batch sampler is refused, and ``needs_bound`` that it asks for ``hypergradient(…, bound=True)``, so
    that an estimator without adjoint is. ``needs_memory`` means that its iterates are the warm starts themselves, as
    in single-loop methods: they must then be stored as they are, neither dropped nor rounded.
    """

    kind = "upper_optimizer"
    full_batch: ClassVar[bool] = False
    needs_bound: ClassVar[bool] = False
    handles_floor: ClassVar[bool] = False
    needs_memory: ClassVar[bool] = False

    @abstractmethod
    def init(self, theta: Theta) -> dict[str, Any]:
        """The state before the first step: plain numbers and tensors, so that it can be saved."""

    @abstractmethod
    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        """One step."""

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        """The state with all further steps shortened by ``factor``, for `on_divergence: shrink-step`."""
        raise NotImplementedError(f"{type(self).__name__} cannot shorten its steps")


class Logger(Role, Listener):
    """Sends the events of a run somewhere else: to a file, a dashboard, a service.

    It is a `Listener` and implements the methods it needs. The constructor only keeps options; connections and slow
    work belong in ``started``. If a package is missing, raise ``MissingError`` in the constructor, before the run. A
    logger that fails is logged as a warning once and receives no further events; the run continues.

    A recipe may come from someone else, so a parameter of type ``Path`` is a place in the run directory, and any
    other place is refused; write there with the functions of ``bltoolbox.plugin`` that take the run directory as
    ``within``.
    """

    kind = "logger"
