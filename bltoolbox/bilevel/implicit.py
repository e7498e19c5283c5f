"""x̂(θ, y) as a function that autograd can differentiate, by any hypergradient component.

    x̂(θ, y) = argmin_x h(x; θ, y),        v ↦ (∂x̂/∂θ)ᵀ v, (∂x̂/∂y)ᵀ v

The vector v that arrives in a backward pass is the gradient of the linear loss g(x) = ⟨v, x⟩, so the hypergradient of g
is the product that is asked for. g is scaled to ‖∇g_i‖ = 1 for every task, and the size of v_i is its weight: the
accuracy of the linear system is relative to v, whatever the size of the loss, and depends on no other task.

Nothing is recorded while x̂ is computed: memory does not grow with the number of iterations. Second derivatives are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Accuracy, Ask, Effort, Solution, Status, Steps, Theta
from bltoolbox.bilevel.roles import HypergradientEstimator, LowerSolver
from bltoolbox.bilevel.tensors import dot, expand, full_precision, norm, ordinary
from bltoolbox.errors import BltError, NumericalError

_TWICE = (
    "the implicit layer has first derivatives only: it was differentiated twice (create_graph=True); for second"
    " derivatives use finite differences of its gradient"
)
_UNSOLVED = (Status.NOT_FINITE, Status.DIVERGED, Status.LIMIT)


@dataclass(frozen=True)
class Implicit:
    """How x̂ and its derivatives are computed.

    ``tol`` is the distance to the minimiser (the gradient norm where no strong convexity is known), ``adjoint_tol``
    the residual of the linear system relative to the gradient that arrives.
    """

    solver: LowerSolver
    estimator: HypergradientEstimator
    tol: float
    adjoint_tol: float
    iteration_limit: int = 2000

    @property
    def needs_inverse(self) -> bool:
        return "inverse" in self.estimator.requires.get("lower_solver", ())

    def minimise(
        self, lower: Lower, start: Tensor, effort: Effort | None = None, with_state: bool = False
    ) -> Solution:
        """x̃ from a start, by default to the accuracy ``tol``; an error if it cannot be reached."""
        effort = Accuracy(self.tol) if effort is None else effort
        if isinstance(effort, Steps):
            solution = solve(self.solver, lower, start, 0.0, limit=effort.count, ending=Status.STEPS)
        else:
            tol = lower.gradient_tol(effort.tol)
            solution = solve(
                self.solver, lower, start, tol, limit=self.iteration_limit, with_state=with_state
            )
        for status in _UNSOLVED:
            if count := solution.status.count(status):
                name = type(self.solver).__name__
                raise NumericalError(
                    f"lower-level solver {name}, {count} of {len(start)} samples: {status.value}"
                )
        return solution

    def pull_back(
        self, lower: Lower, x: Tensor, v: Tensor, inputs: Sequence[str] = (), state: Any = None
    ) -> dict[str, Tensor]:
        """Σ_i (∂x̂_i/∂θ)ᵀ v_i by parameter, and (∂x̂_i/∂y_i)ᵀ v_i, one row each, of the named inputs."""
        lower = lower.wrt(*inputs) if inputs else lower
        size = norm(v)
        if not bool(size.any()):
            return {name: torch.zeros_like(value) for name, value in lower.theta.items()}
        upper = Pairing(v / expand(torch.where(size == 0, 1.0, size), v))
        kept = self.estimator.keeps(lower, upper)
        ask = Ask(
            lower,
            upper,
            solution=x,
            start=x,
            weights=size,
            effort=Accuracy(self.adjoint_tol),
            memory={name: row.new_zeros(len(x), *row.shape[1:]) for name, row in kept.items()},
            minimise=self.minimise,
            inverse=None if state is None else partial(self.solver.inverse, state),
            lower_effort=Accuracy(self.tol),
        )
        return self.estimator.estimate(ask).gradient


@dataclass(frozen=True)
class Pairing(Upper):
    """g(x) = ⟨v, x⟩."""

    v: Tensor

    lipschitz = 0.0

    def value(self, x: Tensor) -> Tensor:
        return dot(self.v.double(), x.double())

    def gradient(self, x: Tensor) -> Tensor:
        return self.v

    def take(self, index: Tensor) -> Pairing:
        return Pairing(self.v[index])


def minimiser(
    method: Implicit, lower: Lower, theta: Theta, inputs: Theta, start: Tensor | None = None
) -> Tensor:
    """x̂ of a lower level that is bound to the values of ``theta`` and ``inputs``, differentiable in these.

    ``start`` is a warm start, the cold one by default.
    """
    recording = torch.is_grad_enabled()
    values = {**theta, **inputs}
    with full_precision(lower.mu):
        start = ordinary(lower.estimate() if start is None else lower.project(start.detach()))
        if not (recording and any(value.requires_grad for value in values.values())):
            return method.minimise(lower, start).x
    call = _Call(method, lower, start, tuple(values), frozenset(inputs))
    x: Tensor = _Minimiser.apply(call, *values.values())
    return x


@dataclass(frozen=True)
class _Call:
    """What a backward pass needs besides tensors; ``names`` are those of the tensors, in their order."""

    method: Implicit
    lower: Lower
    start: Tensor
    names: tuple[str, ...]
    inputs: frozenset[str]


class _Minimiser(torch.autograd.Function):
    """x̂ forwards, the hypergradient of ⟨v, x̂⟩ backwards."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *values: Tensor) -> Tensor:
        with full_precision(call.start):
            solution = call.method.minimise(call.lower, call.start, with_state=call.method.needs_inverse)
        ctx.call, ctx.state = call, solution.state
        # The values are those of ``call.lower``: saved, so that autograd notices if they change before they are used.
        ctx.save_for_backward(solution.x, *values)
        return solution.x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        call, (x, *values) = ctx.call, ctx.saved_tensors
        needed = dict(zip(call.names, ctx.needs_input_grad[1:], strict=True))
        inputs = [name for name in call.names if name in call.inputs and needed[name]]
        with full_precision(x):
            gradient = call.method.pull_back(call.lower, x, v.detach(), inputs, ctx.state)
        wanted = [gradient[name] for name in call.names if needed[name]]
        if torch.is_grad_enabled():
            # Outputs that depend on what they are derivatives of: a second derivative is an error and not zero.
            wanted = list(_FirstDerivative.apply(len(wanted), *wanted, *values))
        rest = iter(wanted)
        return (None, *(next(rest) if needed[name] else None for name in call.names))


class _FirstDerivative(torch.autograd.Function):
    """Gradients as they are; differentiating them is refused."""

    @staticmethod
    def forward(ctx: FunctionCtx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Any, ...]:
        raise BltError(_TWICE)
