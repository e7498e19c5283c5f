"""Whether the bias of a recipe's hypergradient vanishes in the limit that its class declares, on the recipe's samples.

The exact z comes from conjugate gradients at the minimiser; ``check_recipe`` has compared its ingredients with
differences before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.problem import Lower, Upper
from bltoolbox.bilevel.records import Ask, Theta
from bltoolbox.config.block import Block
from bltoolbox.config.registry import Registry
from bltoolbox.errors import NumericalError
from bltoolbox.testing.limits import (
    DEVIATIONS,
    UNCERTAIN,
    extended,
    follow,
    mean_estimate,
    relative,
    shortfall,
)

#: Settings added to those declared, since a recipe may be worse conditioned than the problems of ``blt check``.
FURTHER = 2


@dataclass(frozen=True)
class Bias:
    """A sentence, and whether it was shown that the bias vanishes (True), that it does not (False), or neither."""

    sentence: str
    vanishes: bool | None


def follow_bias(block: Block, registry: Registry, ask: Ask) -> Bias:
    """The error of z along the limit that the hypergradient ``block`` declares."""
    cls = registry.get("hypergradient", block.name).load()
    if cls.limit is None:
        return Bias(
            "no tolerance makes it exact and it declares no limit in which it is, so nothing shows whether z is right",
            None,
        )
    if not (cls.limit.options or cls.limit.calls):
        return Bias("the limit that it declares is one of the problem, which the recipe fixes", None)
    exact = _flat(exact_gradient(ask.lower, ask.upper, ask.solution, ask.weights))

    def error(options: Mapping[str, Any], calls: int, condition: float | None) -> tuple[float, float]:
        estimator = registry.build(replace(block, options={**block.options, **options}))
        z, noise = mean_estimate(estimator, ask, calls)
        return relative(_flat(z), _flat(noise), exact)

    for limit in (cls.limit, extended(cls.limit, FURTHER)):
        try:
            points = follow(limit, error)
        except NumericalError as problem:
            return Bias(f"its declared limit cannot be followed here: {problem}", None)
        sentence = shortfall(limit, points)
        if sentence is None and DEVIATIONS * points[-1].noise > UNCERTAIN:
            return Bias(f"the mean over draws is too uncertain: its error is {points[-1]}", None)
        if sentence is None:
            return Bias(f"its error is {points[-1]}", True)
    return Bias(f"it does not vanish in the limit that it declares: {sentence}", False)


def exact_gradient(lower: Lower, upper: Upper, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Σ_i w_i (∂_θ g_i − ∂_θ⟨∇h_i, q_i⟩) with ∇²h q = ∇g to 1e-9."""
    right, tol = upper.gradient(x), torch.full_like(lower.mu, 1e-9)
    with torch.no_grad():
        method = ConjugateGradients("the check")
        q = solve_linear(method, lower.linearize(x), right, torch.zeros_like(right), tol, 5_000)[0]
    z = {name: -entry for name, entry in lower.mixed(x, q, weights).items()}
    for name, entry in upper.theta_gradient(x, weights).items():
        z[name] = z[name] + entry
    return z


def _flat(parts: Theta) -> Tensor:
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])
