"""Properties of hypergradients, exact or not: weights, the declared limit of a bias, memory, and no hidden state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bltoolbox.bilevel.records import BiasLimit
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.testing.checks.base import (
    NotApplicable,
    NotVerified,
    Subject,
    fail,
    holds,
    normal,
    require,
    require_close,
    require_like,
)
from bltoolbox.testing.checks.hidden_state import stateless
from bltoolbox.testing.checks.hypergradient import KIND
from bltoolbox.testing.checks.partners import smooth
from bltoolbox.testing.checks.questions import Question, flat, questions, some_weights
from bltoolbox.testing.limits import (
    DEVIATIONS,
    DRAWS,
    UNCERTAIN,
    ask_at,
    follow,
    mean_estimate,
    relative,
    repeated,
    shortfall,
)
from bltoolbox.testing.problems import SquaredDistance

UNVERIFIED = (
    "no tolerance makes z exact and no limit is declared, so nothing shows whether z is right; declare in `limit`"
    " along which options its bias vanishes"
)


@holds(KIND, "z is linear in the weights")
def linear(subject: Subject) -> None:
    for question in questions(subject):
        ask = question.ask(1e-3)

        def z(weights: Tensor, ask: Any = ask) -> Tensor:
            return flat(repeated(subject(), replace(ask, weights=weights)).gradient)

        first = question.weights
        second = torch.where(torch.arange(len(first)) == 0, 2 * first, torch.zeros_like(first))
        cause = "z = Σ weights_i z_i: the weights scale each z_i, and nothing else may depend on them"
        what = f"of {question.what}"
        require_close(z(2 * first), 2 * z(first), 1e-8, f"z(2w) {what} against 2 z(w)", cause)
        require_close(
            z(first + second), z(first) + z(second), 1e-8, f"z(v + w) {what} against z(v) + z(w)", cause
        )


@holds(KIND, "its bias vanishes in the declared limit")
def limit(subject: Subject) -> None:
    declared = subject.cls.limit
    require(
        not (subject.cls.stochastic and subject.cls.exact),
        "it declares stochastic = True and exact = True, but no tolerance removes the error of a draw; declare"
        " exact = False and a limit",
    )
    if declared is None:
        if subject.cls.exact:
            raise NotApplicable("a tolerance makes it exact, and it declares no limit")
        raise NotVerified(UNVERIFIED)
    require(isinstance(declared, BiasLimit), f"limit must be a BiasLimit, not a {type(declared).__name__}")
    names = [question.what for question in questions(subject, _first(declared))]
    for number, name in enumerate(names):
        # Without options, the sequence is one of calls or of condition numbers.
        points = follow(declared, _Errors(subject, number))
        if sentence := shortfall(declared, points):
            fail(f"on {name}, {sentence}; the limit is declared in `limit` of the class")
        if DEVIATIONS * points[-1].noise > UNCERTAIN:
            raise NotVerified(
                f"on {name}, the mean over {DRAWS} draws of z is too uncertain: its error is {points[-1]}"
            )


def _first(declared: BiasLimit) -> float | None:
    return declared.condition[0] if declared.condition else None


class _Errors:
    """The error of z on one of the questions, at a setting."""

    def __init__(self, subject: Subject, number: int) -> None:
        self.subject = subject
        self.number = number
        self.fixed: Question | None = None

    def __call__(
        self, options: Mapping[str, Any], calls: int, condition: float | None
    ) -> tuple[float, float]:
        question = self._question(condition)
        z, noise = mean_estimate(self.subject.having(options)(), question.ask(), calls)
        return relative(flat(z), flat(noise), question.expected)

    def _question(self, condition: float | None) -> Question:
        if self.fixed is None or condition is not None:
            self.fixed = list(questions(self.subject, condition))[self.number]
        return self.fixed


@holds(KIND, "memory is what keeps declares")
def memory(subject: Subject) -> None:
    for question in questions(subject):
        estimator = subject()
        examples, count = estimator.keeps(question.lower, question.upper), len(question.x)
        kept = repeated(estimator, question.ask(1e-3)).memory
        require(
            set(kept) <= set(examples),
            f"Estimate.memory has the names {sorted(kept)}, but keeps declares {sorted(examples)}: only these come"
            " back in the next call",
        )
        for name, row in examples.items():
            require(len(row) == 0, f"keeps must give empty examples (0, …), but {name!r} has {len(row)} rows")
            if name in kept:
                require_like(kept[name], row, f"memory[{name!r}]", (count, *row.shape[1:]))


@stateless(KIND)
def use(subject: Subject, estimator: HypergradientEstimator, problem: int) -> Iterator[tuple[str, Any]]:
    # Problems of one shape, and an x that moves from call to call: otherwise a hidden warm start would change nothing.
    bench = smooth(subject, seed=problem)
    lower, upper, weights = bench.lower(), SquaredDistance(bench.x_true), some_weights(len(bench.y))
    kept = {
        name: row.new_zeros(len(bench.y), *row.shape[1:])
        for name, row in estimator.keeps(lower, upper).items()
    }
    for call in range(3):
        x = lower.start() + 0.01 * normal(*bench.y.shape, seed=problem + 2 * call)
        estimate = estimator.estimate(replace(ask_at(lower, upper, x, weights, 1e-3, kept), call=call))
        yield f"z of call {call + 1}", estimate.gradient
        yield f"the residual of call {call + 1}", estimate.residual
        kept = {**kept, **estimate.memory}
