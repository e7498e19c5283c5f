"""An implicit layer: y ↦ x̂ as a module of PyTorch.

    x̂(θ, y) = argmin_x D_θ(A_θ x; y) + R_θ(x)

The parameters of the module are θ, under the names that they have in θ files: ``regularizer.log_weights``. Backward
passes are hypergradients, by any component of that kind, to a tolerance; see ``bltoolbox.bilevel.implicit``. Every
sample is solved by itself, so that results and gradients do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bltoolbox.bilevel.implicit import Implicit, minimiser
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.bilevel.tensors import full_precision, lasting, ordinary
from bltoolbox.config.block import Block
from bltoolbox.config.compatibility import listed
from bltoolbox.config.signatures import Type
from bltoolbox.config.validation import Checker
from bltoolbox.errors import UsageError
from bltoolbox.restoration.layout import image_layout
from bltoolbox.restoration.measurements import as_batch, bind, context_rows
from bltoolbox.restoration.roles import Operator, Regularizer
from bltoolbox.restoration.variational import Variational

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry

#: A component, its name, or its name with options as in a recipe.
Choice = HypergradientEstimator | Block | Mapping[str, Any] | str
#: The residual of the linear system, relative to its right-hand side, unless ``tol`` asks for more.
_ADJOINT_TOL = 1e-3


class Parameters(nn.Module):
    """θ as parameters of a module, each under its own name; points in a name separate modules."""

    def __init__(self, theta: Theta, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self._names = tuple(theta)
        for name, value in theta.items():
            learned = name.partition(".")[0] not in frozen
            *path, last = name.split(".")
            home: nn.Module = self
            for module in path:
                if module not in home._modules:
                    home.add_module(module, nn.Module())
                home = home.get_submodule(module)
            home.register_parameter(last, _parameter(name, value, learned))

    @property
    def theta(self) -> dict[str, Tensor]:
        """The parameters by their names in θ files; what is computed with them is differentiable."""
        return {name: self._parameter(name) for name in self._names}

    def _parameter(self, name: str) -> Tensor:
        home, _, last = name.rpartition(".")
        value: Tensor = getattr(self.get_submodule(home), last)
        return value


def _parameter(name: str, value: Tensor, learned: bool) -> nn.Parameter:
    """A copy, or the parameter itself that was given."""
    if isinstance(value, nn.Parameter):
        return value
    if value.requires_grad:
        raise UsageError(
            f"θ {name!r} requires a gradient but is not an nn.Parameter; make it one, or give θ to the call,"
            " layer(y, theta=…), which differentiates in any tensor"
        )
    with lasting():
        return nn.Parameter(value.detach().clone(), requires_grad=learned)


class ImplicitLayer(Parameters):
    """y ↦ x̂, differentiable in θ, in y and in whatever these were computed from.

    ``method`` says how x̂ and its derivatives are computed; ``shape`` is that of the images that θ is for, if known.
    """

    def __init__(
        self, problem: Variational, method: Implicit, theta: Theta, shape: Sequence[int] | None = None
    ) -> None:
        super().__init__(theta, sorted(problem.frozen))
        self.problem = problem
        self.method = method
        self.shape = None if shape is None else tuple(shape)

    def forward(
        self,
        y: Tensor,
        *,
        context: Mapping[str, Tensor | np.ndarray[Any, Any]] | None = None,
        start: Tensor | None = None,
        theta: Theta | None = None,
    ) -> Tensor:
        """Restore measurements ``(C, H, W)`` or ``(B, C, H, W)``; the result has the dtype and device of ``y``.

        ``context`` is what the components need to know about each measurement. ``start`` is a warm start: images from
        which the solver begins, e.g. the last result for the same y; it affects the time and not the result. ``theta``
        replaces parameters, e.g. by the output of a network.
        """
        theta = {name: ordinary(value) for name, value in (self.theta | dict(theta or {})).items()}
        if unknown := sorted(set(theta) - set(self._names)):
            raise UsageError(f"θ has no parameter {unknown[0]!r}; it has {listed(self._names, 'and')}")
        like = next(iter(theta.values()), y)
        batch = as_batch(ordinary(y)).to(like)
        single = y.ndim == 3
        with full_precision(like):
            rows = context_rows(context, len(batch), single, like)
            values = {name: value.detach() for name, value in theta.items()}
            lower = bind(self.problem.restoring, values, image_layout(batch.detach()), rows, self.shape)
            first = None if start is None else lower.embed(image_layout(_batch_of(start, like)))
            if first is not None and first.shape[1:] != lower.shape:
                raise UsageError(
                    f"the start has images of shape {tuple(start.shape[-3:])}, but those of y are"  # type: ignore[union-attr]
                    f" {lower.at.shape}"
                )
        x = lower.view(minimiser(self.method, lower, theta, {"y": batch}, first))
        kind = y.dtype if y.is_floating_point() else x.dtype
        return (x[0] if single else x).to(y.device, kind)

    def project_(self) -> None:
        """Move the parameters to the nearest admissible θ, e.g. to filters of zero mean; call it after each step."""
        with torch.no_grad():
            for name, value in self.problem.project(self.theta).items():
                self._parameter(name).copy_(value)

    def with_operator(self, operator: Operator) -> ImplicitLayer:
        """The same regularizer and data term with another operator; parameters are shared, not copied."""
        theta = {name: value for name, value in self.theta.items() if not name.startswith("operator.")}
        return ImplicitLayer(replace(self.problem, operator=operator), self.method, theta, self.shape)

    def penalty(self) -> Tensor | None:
        """P(θ) to be added to the loss, differentiable; None where no component has a penalty."""
        return self.problem.penalty(self.theta)

    def extra_repr(self) -> str:
        parts = {role: type(component).__name__ for role, component in self.problem.components.items()}
        parts |= {"hypergradient": type(self.method.estimator).__name__}
        return ", ".join([*(f"{key}={name}" for key, name in parts.items()), f"tol={self.method.tol:g}"])


def _batch_of(images: Tensor, like: Tensor) -> Tensor:
    return as_batch(images.detach()).to(like)


def method_for(
    problem: Variational,
    solver: LowerSolver,
    hypergradient: Choice | None,
    registry: Registry,
    *,
    tol: float,
    adjoint_tol: float | None = None,
    iteration_limit: int = 2000,
) -> Implicit:
    """How to solve and to differentiate; an error where the hypergradient component does not fit.

    It is ``cg-ift`` by default, or ``piggyback`` where the regularizer is not smooth. ``adjoint_tol`` is by default
    as small as ``tol`` relative to the range of values, and at most 1e-3.
    """
    if not tol > 0 or not (adjoint_tol is None or adjoint_tol > 0):
        raise UsageError("tol and adjoint_tol are distances; give numbers greater than 0")
    estimator = _build(hypergradient, problem.regularizer, registry)
    if misfit := next(_misfits(estimator, problem, solver), None):
        raise UsageError(f"hypergradient {type(estimator).__name__} {misfit}")
    accuracy = min(_ADJOINT_TOL, tol / problem.unit) if adjoint_tol is None else adjoint_tol
    return Implicit(solver, estimator, tol, accuracy, iteration_limit)


def _build(choice: Choice | None, regularizer: Regularizer, registry: Registry) -> HypergradientEstimator:
    if isinstance(choice, HypergradientEstimator):
        return choice
    if choice is None:
        choice = "cg-ift" if regularizer.smooth else "piggyback"
    if not isinstance(choice, Block):
        checker = Checker(registry)
        choice = checker.value(Type("component", role="hypergradient"), choice, ("hypergradient",))
        if checker.issues:
            raise UsageError("; ".join(issue.message for issue in checker.issues))
    try:
        estimator: HypergradientEstimator = registry.build(choice)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"hypergradient: {error}") from error
    return estimator


def _misfits(estimator: HypergradientEstimator, problem: Variational, solver: LowerSolver) -> Iterator[str]:
    """Why a component cannot differentiate x̂."""
    if estimator.moves_x:
        yield "iterates on x from step to step of a training and has no derivative of x̂; use cg-ift"
    if not problem.regularizer.smooth and not estimator.handles_nonsmooth:
        name = type(problem.regularizer).__name__
        yield f"needs derivatives of the regularizer, and {name} is not smooth; use piggyback"
    partners = problem.components | {"lower_solver": solver}
    for kind, methods in estimator.requires.items():
        partner = partners.get(kind)
        missing = [method for method in methods if partner is not None and not partner.offers(method)]
        if missing:
            yield f"needs a {kind} with {listed(missing, 'and')}, which {type(partner).__name__} does not have"
