"""The roles: what the author of a plugin implements.

A component is one plain class. Its ``__init__`` parameters, with their annotations and defaults, are its whole
configuration: validation, ``blt show`` and the docs come from the signature. Components hold no hidden state and never
change their arguments; whatever evolves is returned.

Every quantity is per sample. Batched tensors have the sample as first dimension; energies, residuals, tolerances, step
sizes and Lipschitz constants have shape ``(B,)``, and nothing may depend on which samples share a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from bltoolbox.bilevel.events import Listener

if TYPE_CHECKING:
    from bltoolbox.bilevel.problem import LowerLevel, UpperLoss
    from bltoolbox.bilevel.records import (
        Batch,
        Constants,
        Estimate,
        HypergradientResult,
        Potentials,
        Scales,
        Step,
        Value,
    )

#: Named parameters. Components see their own names; the problem prefixes them with ``regularizer.`` or ``operator.``.
Theta = Mapping[str, Tensor]


class Role(ABC):
    """What all roles share.

    A constructor (and ``Sampler.init``, ``Data.clean``) refuses what its annotations cannot express with a
    ``ValueError`` that is one sentence: what is wrong, what would be right. The user sees it with the place in
    the recipe.

    ``requires`` maps a partner's kind to the optional methods that it must provide, e.g.
    ``{"regularizer": ("analyse", "synthesise", "majorant")}``. Validation refuses a partner that lacks one, and
    names one that fits. Methods count that the class itself or a base below the role defines, whatever their name, so
    that a solver and a regularizer may agree on one that no role knows.
    """

    kind: ClassVar[str]
    requires: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        """Options that ``blt check`` tries the component with; its defaults unless overridden.

        Written by a component with a parameter that has no default, or whose defaults take long. Files that it needs
        may be made in ``folder``, which is empty and temporary. A nested component is ``{"name": …}``, as in a recipe.
        """
        return {}

    def offers(self, method: str) -> bool:
        """Whether this component implements an optional method of its role."""
        base = next(cls for cls in type(self).__mro__ if Role in cls.__bases__)
        own = getattr(type(self), method, None)
        return own is not None and own is not getattr(base, method, None)


class Data(Role):
    """Clean images, addressed by id. Noise, splits and batching are added by the core."""

    kind = "data"

    @abstractmethod
    def __len__(self) -> int:
        """Number of images."""

    @abstractmethod
    def clean(self, ids: Sequence[int]) -> Tensor:
        """Images ``ids`` as a float32 CPU tensor ``(B, C, H, W)`` with values in [0, 1]."""

    def label(self, id: int) -> str:
        """What tables and figures call image ``id``."""
        return f"#{id}"

    def group(self, id: int) -> str | None:
        """What image ``id`` was taken from, e.g. a photograph; None when it stands for itself, as by default.

        Images of one group are never on both sides of a split. Any two components mean the same by the same text, so
        it should name a file, or a data set and an index.
        """
        return None


class Operator(Role):
    """The forward operator A of ``½‖Ax − y‖²``."""

    kind = "operator"

    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters of a learned operator; none by default.

        Measurements are made with an empty θ: there a learned operator is the true one.
        """
        return {}

    def check(self, shape: Sequence[int]) -> str | None:
        """A sentence when images of ``shape`` (C, H, W) cannot be measured, else None."""
        return None

    @abstractmethod
    def apply(self, x: Tensor, theta: Theta) -> Tensor:
        """A x."""

    @abstractmethod
    def adjoint(self, y: Tensor, theta: Theta) -> Tensor:
        """Aᵀ y, exact to rounding."""

    def add_noise(self, y: Tensor, noise: Tensor) -> Tensor:
        """y with noise; overridden where parts of y are no measurements and must stay as they are."""
        return y + noise

    def start(self, y: Tensor, theta: Theta) -> Tensor:
        """Where a cold solve begins, and the image a user would call 'before'."""
        return self.adjoint(y, theta)

    def norm_bound(self, theta: Theta, shape: Sequence[int]) -> Tensor | float | None:
        """A true upper bound of ‖A‖² for images of ``shape`` (C, H, W), or None when none is known."""
        return None

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor | float | None:
        """A true lower bound of the smallest eigenvalue of AᵀA. 0, the default, holds for every operator."""
        return 0.0


class Regularizer(Role):
    """R_θ(x), convex in x. Only ``init_params`` and ``energy`` are needed; the rest makes it faster or certified.

    One that is not convex in x declares ``convex = False``: ``blt check`` then does not ask for convexity, and h counts
    as strongly convex only if ``strong_convexity`` says how far from convex R can be.
    """

    kind = "regularizer"
    convex: ClassVar[bool] = True

    @abstractmethod
    def init_params(self, channels: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The initial parameters, as float64 CPU tensors."""

    def upgrade(self, theta: Theta) -> dict[str, Tensor]:
        """θ as read from a file, in today's parameters: where an earlier version stored others, the same R in these."""
        return dict(theta)

    @abstractmethod
    def energy(self, theta: Theta, x: Tensor) -> Tensor:
        """R_θ of each sample, shape (B,)."""

    def check(self, shape: Sequence[int]) -> str | None:
        """A sentence when images of ``shape`` (C, H, W) cannot be treated, else None."""
        return None

    def gradient(self, theta: Theta, x: Tensor) -> Tensor:
        """∇R_θ(x); by autograd unless overridden."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(theta, x).sum(), x)[0]

    def linearize(self, theta: Theta, x: Tensor) -> Callable[[Tensor], Tensor]:
        """v ↦ ∇²R_θ(x) v, with whatever depends on x alone computed once; double backward unless overridden."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradient = torch.autograd.grad(self.energy(theta, x).sum(), x, create_graph=True)[0]

        def hvp(v: Tensor) -> Tensor:
            if not gradient.requires_grad:
                return torch.zeros_like(v)
            return torch.autograd.grad(gradient, x, v, retain_graph=True)[0]

        return hvp

    def pairing(self, theta: Theta, x: Tensor, q: Tensor) -> Tensor:
        """⟨∇R_θ(x), q⟩ of each sample, shape (B,), differentiable in θ and linear in q.

        Its θ-derivative is the mixed derivative that a hypergradient needs.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(theta, x).sum()
            gradient = torch.autograd.grad(energy, x, create_graph=True)[0]
            return (gradient * q).flatten(1).sum(1)

    def pairing_gradients(self, theta: Theta, x: Tensor, q: Tensor) -> dict[str, Tensor]:
        """∂_θ⟨∇R_θ(x), q⟩ of each sample apart: every entry has a leading sample dimension; differentiable in q.

        Only error bounds need it; one backward pass a sample unless overridden.
        """
        rows: list[list[Tensor]] = []
        names = list(theta)
        with torch.enable_grad():
            leaves = {name: theta[name].detach().requires_grad_() for name in names}
            for i in range(len(x)):
                value = self.pairing(leaves, x[i : i + 1], q[i : i + 1]).sum()
                grads = torch.autograd.grad(
                    value, list(leaves.values()), create_graph=True, allow_unused=True
                )
                rows.append(
                    [
                        torch.zeros_like(leaf) if grad is None else grad
                        for grad, leaf in zip(grads, leaves.values(), strict=True)
                    ]
                )
        return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)}

    def lipschitz(self, theta: Theta, shape: Sequence[int]) -> Tensor | float | None:
        """A true upper bound of ‖∇²R_θ‖ over all images of ``shape`` (C, H, W), or None when none is known."""
        return None

    def strong_convexity(self, theta: Theta, shape: Sequence[int]) -> Tensor | float | None:
        """A true lower bound of the eigenvalues of ∇²R_θ over all images of ``shape``: 0 for a convex R and no more, −ρ
        for a weakly convex one, None when none is known. By default 0 if R is ``convex``, else None."""
        return 0.0 if self.convex else None

    def constants(self, theta: Theta, x: Tensor, radius: Tensor) -> Constants:
        """True constants on the ball of ``radius`` (B,) around each x, for certified error bounds of hypergradients."""
        raise NotImplementedError(f"{type(self).__name__} knows no constants")

    def project(self, theta: Theta) -> dict[str, Tensor]:
        """The nearest admissible θ: acts on θ − αz after a step."""
        return dict(theta)

    def project_gradient(self, gradient: Theta) -> dict[str, Tensor]:
        """Projection of z on the directions a *linear* constraint leaves free; taken before any norm of z."""
        return dict(gradient)

    # A half-quadratic structure, R(x) = Σ ψ(t) with t = C x: what majorise–minimise solvers live on.

    def analyse(self, theta: Theta, x: Tensor) -> Tensor:
        """t = C x (linear in x)."""
        raise NotImplementedError(f"{type(self).__name__} has no analysis operator")

    def synthesise(self, theta: Theta, t: Tensor, shape: Sequence[int]) -> Tensor:
        """Cᵀ t, an image of ``shape`` (C, H, W)."""
        raise NotImplementedError(f"{type(self).__name__} has no analysis operator")

    def majorant(self, theta: Theta, t: Tensor) -> Tensor:
        """w(t) = ψ'(t)/t, the curvature of the parabola above ψ that touches it at t; ∇R = Cᵀ(w(t)·t)."""
        raise NotImplementedError(f"{type(self).__name__} has no majorant")

    def pictures(self, theta: Theta) -> Tensor | None:
        """Something to look at, e.g. learned filters sorted by importance: (N, C, H, W) of any scale, or None."""
        return None

    def potentials(self, theta: Theta) -> Potentials | None:
        """The functions on the responses to look at, in the order of ``pictures`` where there are some, or None."""
        return None


class SolverState(Protocol):
    """A frozen dataclass of tensors whose first dimension is the sample (None is allowed), with at least these two."""

    @property
    def x(self) -> Tensor: ...

    @property
    def residual(self) -> Tensor: ...


class LowerSolver(Role):
    """An iteration for ``argmin_x h(x, θ)``. The loop around it (stopping, compaction, guards) is the core's.

    ``residual`` is ``lower.residual(x)``, the (projected) gradient norm at the very ``x`` of the same state. A
    solver that always evaluates it there may set ``exact_residual``; otherwise the loop recomputes it before it
    declares a sample finished. ``handles_constraint`` says that iterates stay in the constraint set through
    ``lower.project``.
    """

    kind = "lower_solver"
    exact_residual: ClassVar[bool] = False
    handles_constraint: ClassVar[bool] = False

    @abstractmethod
    def init(self, lower: LowerLevel, x0: Tensor) -> Any:
        """The state at x0, with its residual."""

    @abstractmethod
    def step(self, lower: LowerLevel, state: Any) -> Any:
        """One iteration, for all samples of the state."""


class HypergradientEstimator(Role):
    """z ≈ ∇f from an approximate minimiser.

    One whose estimate has no ``adjoint`` says so with ``gives_adjoint = False``: no error bound can be had from it.
    One that no tolerance makes exact says so with ``exact = False``: ``blt check`` then only asks it to point downhill.
    """

    kind = "hypergradient"
    gives_adjoint: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    @abstractmethod
    def estimate(
        self,
        lower: LowerLevel,
        upper: UpperLoss,
        x: Tensor,
        weights: Tensor,
        tol: Tensor,
        warm: Tensor | None,
    ) -> Estimate:
        """z = Σ_i weights_i ∇f_i, its linear system solved to ``tol`` (per sample), from the adjoint ``warm``."""


class Sampler(Role):
    """v ~ D with E[v_i] = 1: which samples, with which weights.

    ``full`` says that every batch is all samples with weight 1, which some optimizers need.
    """

    kind = "sampler"
    full: ClassVar[bool] = False

    @abstractmethod
    def init(self, m: int, seed: int) -> dict[str, Any]:
        """The state before the first draw: plain numbers and tensors, so that it can be saved."""

    @abstractmethod
    def next(self, state: Mapping[str, Any]) -> tuple[Batch, dict[str, Any]]:
        """A batch of ids and weights, and the next state."""


class Oracle(Protocol):
    """What an upper-level optimizer may ask about f (or f_v of the current batch). Tolerances are arguments.

    ``tol`` is a distance in x, ``adjoint_tol`` a residual norm of the adjoint system for a loss of scale 1: it is
    multiplied by the recipe's ``loss_scale``, so that the scale of the loss does not change the path of θ.

    Every call may raise ``BudgetExhausted``; the optimizer lets it pass.
    """

    def value(self, theta: Theta, tol: float, *, bound: bool = False) -> Value:
        """f(θ), its bounds certified where the strong convexity is known and with ``bound`` estimated elsewhere. Its
        solutions become warm starts only through ``accept``."""
        ...

    def hypergradient(
        self, theta: Theta, tol: float, adjoint_tol: float, *, bound: bool = False
    ) -> HypergradientResult:
        """z(θ) and f(θ), and with ``bound`` also ω ≥ ‖z − ∇f‖ and bounds of f (estimated or certified)."""
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
    """θ ← θ⁺, with as many questions to the oracle as it likes.

    ``handles_floor`` says that it notices itself when a tolerance is below what the dtype can reach; for others
    the run stops there with a sentence. ``full_batch`` says that it needs all data at each step, so that a
    mini-batch sampler is refused, and ``needs_bound`` that it asks for ``hypergradient(…, bound=True)``, so
    that an estimator without adjoint is.
    """

    kind = "upper_optimizer"
    full_batch: ClassVar[bool] = False
    needs_bound: ClassVar[bool] = False
    handles_floor: ClassVar[bool] = False

    @abstractmethod
    def init(self, theta: Theta) -> dict[str, Any]:
        """The state before the first step: plain numbers and tensors, so that it can be saved."""

    @abstractmethod
    def step(self, theta: Theta, oracle: Oracle, state: Mapping[str, Any]) -> Step:
        """One step."""

    def shorten(self, state: Mapping[str, Any], factor: float) -> dict[str, Any]:
        """The state with all further steps shorter by ``factor``: what `on_divergence: shrink-step` asks for."""
        raise NotImplementedError(f"{type(self).__name__} cannot shorten its steps")


class Logger(Role, Listener):
    """Carries what happens in a run to somewhere else: a file, a dashboard, a service.

    It is a `Listener` and writes the methods it needs. A constructor only keeps options; what takes time or has to be
    reached belongs into ``started``. A package that is not installed is refused with a ``MissingError`` in the
    constructor, before the run. A logger that fails is told nothing more, with one warning, and the run goes on.

    A recipe may come from someone else, so a parameter of type ``Path`` is a place in the run directory, and any other
    place is refused; write there with ``bltoolbox.runs.files``, whose functions take the run directory as ``within``.
    """

    kind = "logger"
