"""stocbio, amigo, soba and saba: against references written from the papers, in their limits, and in the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_regressions import REFERENCES, Array, Bare, M, N, Reference, ToyTasks

from blt_builtins.hypergradients import amigo, saba, soba, stocbio
from blt_builtins.hypergradients.amigo import AmIGO
from blt_builtins.hypergradients.saba import SABA
from blt_builtins.hypergradients.soba import SOBA
from blt_builtins.hypergradients.stocbio import StocBiO
from blt_builtins.lower_solvers.gd import GradientDescent
from bltoolbox.bilevel.blocks import BlockDraws
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Ask, Batch, Counter, Steps
from bltoolbox.bilevel.roles import HypergradientEstimator
from bltoolbox.distributed.signals import Interrupted
from bltoolbox.errors import NumericalError
from bltoolbox.testing.finite_sum import SumTasks, make_sum_oracle, quadratic_sum

SEED = 3
ANY = Accuracy(0.1)


def drawn(purpose: str, blocks: int, count: int, call: int) -> list[int]:
    return BlockDraws(SEED, call, torch.tensor([0])).blocks(purpose, blocks, count)[:, 0].tolist()


State = dict[str, Any]


def stocbio_reference(p: Reference, s: State, theta: Array, call: int, random: bool = False) -> Array:
    for j in drawn("x", N, 3, call):
        s["x"] = s["x"] - 0.2 * p.gradient(j, s["x"], theta)
    r = p.slope(drawn("loss", M, 1, call)[0], s["x"])
    last = drawn("truncation", 5, 1, call)[0] if random else 4
    terms = [r]
    for j in drawn("hessian", N, last, call):
        r = r - 0.3 * p.product(j, s["x"], theta, r)
        terms.append(r)
    q = 0.3 * 5 * terms[-1] if random else 0.3 * np.sum(terms, axis=0)
    return -p.mixed(drawn("mixed", N, 1, call)[0], s["x"], theta, q)


def bsa_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    return stocbio_reference(p, s, theta, call, random=True)


def amigo_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    for j in drawn("x", N, 3, call):
        s["x"] = s["x"] - 0.2 * p.gradient(j, s["x"], theta)
    b = p.slope(drawn("loss", M, 1, call)[0], s["x"])
    for j in drawn("hessian", N, 4, call):
        s["q"] = s["q"] - 0.3 * (p.product(j, s["x"], theta, s["q"]) - b)
    return -p.mixed(drawn("mixed", N, 1, call)[0], s["x"], theta, s["q"])


def soba_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    j, k, x, q = drawn("step", N, 1, call)[0], drawn("loss", M, 1, call)[0], s["x"], s["q"]
    s["x"] = x - 0.3 * p.gradient(j, x, theta)
    s["q"] = q - 0.3 * (p.product(j, x, theta, q) - p.slope(k, x))
    return -p.mixed(j, x, theta, q)


def saba_reference(p: Reference, s: State, theta: Array, call: int) -> Array:
    j, k, x, q = drawn("step", N, 1, call)[0], drawn("loss", M, 1, call)[0], s["x"], s["q"]
    if "tables" not in s:
        s["tables"] = [
            [p.gradient(i, x, theta) for i in range(N)],
            [p.product(i, x, theta, q) for i in range(N)],
            [p.mixed(i, x, theta, q) for i in range(N)],
            [p.slope(i, x) for i in range(M)],
        ]
    news = [p.gradient(j, x, theta), p.product(j, x, theta, q), p.mixed(j, x, theta, q), p.slope(k, x)]
    reduced = []
    for table, block, new in zip(s["tables"], (j, j, j, k), news, strict=True):
        reduced.append(new - table[block] + np.mean(table, axis=0))
        table[block] = new
    s["x"] = x - 0.3 * reduced[0]
    s["q"] = q - 0.3 * (reduced[1] - reduced[3])
    return -reduced[2]


METHODS: dict[str, tuple[HypergradientEstimator, Callable[..., Array]]] = {
    "stocbio": (StocBiO(terms=5, step=0.3, lower_steps=3, lower_step=0.2), stocbio_reference),
    "bsa": (StocBiO(5, 0.3, lower_steps=3, lower_step=0.2, truncation="random"), bsa_reference),
    "amigo": (AmIGO(steps=4, step=0.3, lower_steps=3, lower_step=0.2), amigo_reference),
    "soba": (SOBA(step=0.3), soba_reference),
    "saba": (SABA(step=0.3), saba_reference),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("method", METHODS)
def test_first_steps_equal_a_reference_from_the_paper(method: str, name: str) -> None:
    estimator, reference = METHODS[method]
    problem = REFERENCES[name]()
    tasks = ToyTasks(cleaning=name == "data cleaning")
    oracle = BilevelOracle(Bare(), tasks, GradientDescent(), estimator, seed=SEED)
    theta = {problem.name: torch.tensor(problem.theta0)}
    state: State = {"x": problem.x0, "q": np.zeros_like(problem.x0)}
    moved = 0.0
    for call in range(6):
        z = oracle.on(Batch([0], [1.0])).hypergradient(theta, ANY, ANY).gradient[problem.name]
        expected = reference(problem, state, theta[problem.name].numpy(), call)
        assert np.allclose(z.numpy(), expected, rtol=1e-10, atol=1e-14)
        x = oracle.solutions.get([0], torch.zeros(1, *problem.x0.shape, dtype=torch.float64))[0]
        assert np.allclose(x.numpy(), state["x"], rtol=1e-10, atol=1e-14)
        theta = {problem.name: theta[problem.name] - 0.5 * z}
        moved += float(z.norm())
    assert moved > 1e-3


SUMS = quadratic_sum()
THETA = {"theta": torch.linspace(-0.4, 0.5, 5, dtype=torch.float64)}
ESTIMATORS = [StocBiO(), StocBiO(truncation="random"), AmIGO(), SOBA(), SABA()]


def names(estimator: object) -> str:
    random = getattr(estimator, "truncation", "") == "random"
    return "BSA" if random else type(estimator).__name__


def run_sum(
    estimator: HypergradientEstimator, ids: Sequence[int], calls: int, **options: Any
) -> list[Tensor]:
    oracle = make_sum_oracle(SUMS, GradientDescent(), estimator, seed=1, **options)
    batch = Batch(ids, [1.0] * len(ids))
    return [oracle.on(batch).hypergradient(THETA, ANY, ANY).gradient["theta"] for _ in range(calls)]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=names)
def test_batches_and_chunks_change_nothing(estimator: HypergradientEstimator) -> None:
    whole = run_sum(estimator, [0, 1, 2], 4)
    chunked = run_sum(estimator, [2, 0, 1], 4, chunk=2)
    alone = [run_sum(estimator, [i], 4) for i in range(3)]
    for call in range(4):
        assert torch.allclose(whole[call], chunked[call], rtol=1e-12, atol=1e-14)
        assert torch.allclose(whole[call], sum(one[call] for one in alone), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=names)
def test_the_next_call_follows_from_what_is_kept(estimator: HypergradientEstimator) -> None:
    """As after a resume: warm starts, memory and the ledger are all that a new oracle has."""
    batch = Batch([0, 1, 2], [1.0] * 3)
    first = make_sum_oracle(SUMS, GradientDescent(), estimator, seed=1)
    for _ in range(3):
        first.on(batch).hypergradient(THETA, ANY, ANY)
    second = make_sum_oracle(SUMS, GradientDescent(), type(estimator)(**options_of(estimator)), seed=1)
    second.cost = first.cost
    for name, store in first.stores.items():
        for part in store.everything():
            second.stores[name].restore(part)
    z = [oracle.on(batch).hypergradient(THETA, ANY, ANY).gradient["theta"] for oracle in (first, second)]
    assert torch.equal(z[0], z[1])


def options_of(estimator: object) -> dict[str, Any]:
    return {name: getattr(estimator, name) for name in inspect.signature(type(estimator)).parameters}


def test_a_step_of_soba_costs_one_block() -> None:
    oracle = make_sum_oracle(SUMS, GradientDescent(), SOBA())
    oracle.on(Batch([0, 1, 2], [1.0] * 3)).hypergradient(THETA, ANY, ANY)
    share = Fraction(3, 4)
    cost = oracle.cost
    assert cost.gradients == cost.hessian_products == cost.mixed_products == share
    assert cost.lower_iterations == cost.linear_iterations == share and cost.slowest == 2 * share
    assert cost.computations == 1.5


@pytest.mark.parametrize("method", [SOBA, SABA, AmIGO, StocBiO])
@pytest.mark.parametrize(
    "failure", [NumericalError("too late"), Interrupted(2)], ids=["fails", "interrupted"]
)
def test_a_call_that_fails_costs_what_it_computed(
    method: type[HypergradientEstimator], failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch([0, 1, 2], [1.0] * 3)
    whole = make_sum_oracle(SUMS, GradientDescent(), method())
    whole.on(batch).hypergradient(THETA, ANY, ANY)
    failing = make_sum_oracle(SUMS, GradientDescent(), method())
    estimate = method.estimate

    def fail(self: HypergradientEstimator, ask: Ask) -> None:
        estimate(self, ask)
        raise failure

    monkeypatch.setattr(method, "estimate", fail)
    with pytest.raises(type(failure)):
        failing.on(batch).hypergradient(THETA, ANY, ANY)
    spent = failing.interrupted if isinstance(failure, Interrupted) else failing.cost
    for name in ("gradients", "hessian_products"):
        assert getattr(spent, name) == getattr(whole.cost, name)
    # How many of its gradients a failed call would have called iterations, nobody knows: all of them count.
    assert spent.lower_iterations == spent.gradients >= whole.cost.lower_iterations > 0
    assert spent.linear_iterations == spent.hessian_products


def test_a_requested_number_of_iterations_is_used() -> None:
    for estimator in (StocBiO(), AmIGO()):
        oracle = make_sum_oracle(SUMS, GradientDescent(), estimator)
        oracle.on(Batch([0], [1.0])).hypergradient(THETA, Steps(6), Steps(3))
        products = 2 if isinstance(estimator, StocBiO) else 3
        assert oracle.cost.lower_iterations == Fraction(6, 4)
        assert oracle.cost.hessian_products == Fraction(products, 4)


@pytest.mark.parametrize(
    ("estimator", "calls"),
    [(StocBiO(terms=100, lower_steps=50), 2), (AmIGO(), 12), (SOBA(), 120), (SABA("auto"), 320)],
    ids=["StocBiO", "AmIGO", "SOBA", "SABA"],
)
def test_one_block_is_deterministic_and_exact_in_the_limit(
    estimator: HypergradientEstimator, calls: int
) -> None:
    sums = quadratic_sum(blocks=1, upper_blocks=1)
    oracles = [make_sum_oracle(sums, GradientDescent(), estimator, seed=seed) for seed in (0, 1)]
    for _ in range(calls):
        z = [
            o.on(Batch([0, 1, 2], [1.0] * 3)).hypergradient(THETA, ANY, ANY).gradient["theta"]
            for o in oracles
        ]
    assert torch.equal(z[0], z[1])
    assert torch.allclose(z[0], sums.value_gradient(THETA).mean(0), rtol=1e-4)


def test_saba_has_no_noise_in_the_limit_and_soba_has() -> None:
    expected = SUMS.value_gradient(THETA).mean(0)
    errors = {
        type(one): float((run_sum(one, [0, 1, 2], 500)[-1] - expected).norm() / expected.norm())
        for one in (SOBA(), SABA())
    }
    assert errors[SABA] < 1e-4 < 1e-2 < errors[SOBA]


def test_the_mean_over_blocks_of_stocbio_is_the_truncated_series() -> None:
    """By enumeration of all draws of a series of two terms, at the minimiser with a negligible step on x."""
    sums = quadratic_sum(tasks=1, blocks=2, upper_blocks=2)
    lower, upper = SumTasks(sums).at(THETA, Counter()).on([0])
    x, eta = sums.solution(THETA), 0.2
    one = torch.ones(1, dtype=torch.float64)

    def block(j: int) -> Tensor:
        return torch.tensor([j])

    total = {"series": torch.zeros(5, dtype=torch.float64), "random": torch.zeros(5, dtype=torch.float64)}
    for kind in total:
        for number in range(32):
            i, j, k, last = number & 1, number >> 1 & 1, number >> 2 & 1, number >> 3 & 1
            fixed = {"x": 0, "loss": k, "hessian": j, "mixed": i, "truncation": last}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    BlockDraws,
                    "blocks",
                    lambda self, purpose, blocks, count, fixed=fixed: torch.full((count, 1), fixed[purpose]),
                )
                ask = Ask(lower, upper, x, x, one, ANY)
                estimator = StocBiO(2, eta, 1, 1e-300, kind)  # type: ignore[arg-type]
                total[kind] += estimator.estimate(ask).gradient["theta"] / 32
    slope = upper.gradient(x)
    q = eta * (2 * slope - eta * lower.linearize(x).hvp(slope))
    expected = upper.theta_gradient(x, one)["theta"] - lower.mixed(x, q, one)["theta"]
    for kind, mean in total.items():
        assert torch.allclose(mean, expected, rtol=1e-12), kind


@pytest.mark.parametrize("module", [stocbio, amigo, soba, saba])
def test_a_method_is_short(module: Any) -> None:
    assert len(inspect.getsource(module).splitlines()) <= 150


def test_an_unknown_lipschitz_constant_is_an_error_with_a_remedy() -> None:
    lower, upper = SumTasks(SUMS).at(THETA, Counter()).on([0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(lower), "block_lipschitz", torch.tensor([torch.inf]))
        ask = Ask(lower, upper, lower.start(), lower.start(), torch.ones(1, dtype=torch.float64), ANY)
        with pytest.raises(NumericalError, match=r"soba .*set hypergradient\.step"):
            SOBA().estimate(ask)
