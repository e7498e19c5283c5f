"""iadam and hoag: the known minimiser of a closed-form problem, states that can be saved, and the rules they follow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import flat, initial, measured, small_foe
from torch import Tensor

from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.hypergradients.one_step import OneStep
from blt_builtins.hypergradients.unrolled import Unrolled
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.samplers.epoch import Epoch
from blt_builtins.upper_optimizers.hoag import HOAG
from blt_builtins.upper_optimizers.iadam import IAdam
from blt_builtins.upper_optimizers.isgd import ISGD
from blt_builtins.upper_optimizers.schedule import power_decay
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch, HypergradientResult, Step, Theta, Value
from bltoolbox.bilevel.roles import HypergradientEstimator, UpperOptimizer
from bltoolbox.restoration.theta import join, split
from bltoolbox.testing import Tikhonov, full_batch, make_oracle, smooth_images

every_optimizer = pytest.mark.parametrize(
    "optimizer",
    [IAdam(step=0.05), HOAG(step=0.1), HOAG(step=0.1, decay="quadratic"), HOAG(step=0.1, decay="cubic")],
    ids=["iadam", "hoag", "hoag quadratic", "hoag cubic"],
)
START = {"regularizer.log_weight": torch.tensor([-2.0, -1.0, 0.0], dtype=torch.float64)}


def tikhonov_oracle(estimator: HypergradientEstimator | None = None) -> BilevelOracle:
    return make_oracle(smooth_images(6, (3, 8, 8)), Tikhonov(), AGD(), estimator or CGIFT(), noise=0.3)


def minimiser(oracle: BilevelOracle) -> Tensor:
    x_true, y = measured(oracle)
    return Tikhonov().minimiser(y, x_true)["log_weight"]


def run(
    optimizer: UpperOptimizer,
    oracle: BilevelOracle,
    steps: int,
    theta: Theta = START,
    batch: Batch | None = None,
) -> tuple[dict[str, Tensor], list[Step]]:
    theta, state, history = dict(theta), optimizer.init(theta), []
    for _ in range(steps):
        step = optimizer.step(theta, oracle.on(batch or full_batch(oracle)), state)
        history.append(step)
        if step.finished:
            break
        theta, state = step.theta, step.state
    return theta, history


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives back."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


class Parabola:
    """An oracle of f(θ) = ½Σ c θ² that is wrong by as much as it is allowed to be."""

    def __init__(self, curvature: float = 1.0, error: float = 0.0) -> None:
        self.curvature = curvature
        self.error = error
        self.asked: list[tuple[str, float]] = []
        self.accepted = 0

    def _value(self, theta: Theta, tol: float) -> Value:
        exact = 0.5 * self.curvature * float(theta["a"].square().sum())
        wrong = exact + self.error * tol
        return Value(wrong, wrong - abs(self.error) * tol, wrong + abs(self.error) * tol, True, tol, 1.0)

    def value(
        self,
        theta: Theta,
        effort: Accuracy,
        *,
        bound: bool = False,
        towards: Value | None = None,
        fraction: float = 1.0,
    ) -> Value:
        self.asked.append(("value", effort.tol))
        return self._value(theta, effort.tol)

    def hypergradient(
        self, theta: Theta, effort: Accuracy, adjoint: Accuracy, *, bound: bool = False
    ) -> HypergradientResult:
        self.asked.append(("hypergradient", effort.tol))
        gradient = {"a": self.curvature * theta["a"] + self.error * adjoint.tol}
        return HypergradientResult(gradient, self._value(theta, effort.tol), adjoint.tol, 1.0)

    def accept(self, value: Value) -> None:
        self.accepted += 1

    def project(self, theta: Theta) -> dict[str, Tensor]:
        return dict(theta)


def parabola_start() -> dict[str, Tensor]:
    return {"a": torch.tensor([3.0, -2.0], dtype=torch.float64)}


def test_iadam_reaches_the_known_minimiser() -> None:
    oracle = tikhonov_oracle()
    theta, history = run(IAdam(step=0.2, step_decay=0.5, tol=1e-3, tol_decay=1.0), oracle, 300)
    torch.testing.assert_close(theta["regularizer.log_weight"], minimiser(oracle), rtol=0, atol=5e-3)
    assert history[-1].loss < history[0].loss


@pytest.mark.parametrize("decay", ["geometric", "quadratic", "cubic"])
def test_hoag_reaches_the_known_minimiser(decay: str) -> None:
    oracle = tikhonov_oracle()
    theta, history = run(HOAG(step=0.1, tol=0.1, decay=decay), oracle, 150)  # type: ignore[arg-type]
    torch.testing.assert_close(theta["regularizer.log_weight"], minimiser(oracle), rtol=0, atol=1e-3)
    assert float(history[-1].metrics["gradient_norm"]) < 1e-3 * float(history[0].metrics["gradient_norm"])


@pytest.mark.parametrize("estimator", [Unrolled(30), OneStep()], ids=["unrolled", "one-step"])
def test_hoag_needs_no_error_bound(estimator: HypergradientEstimator) -> None:
    """One curvature a channel leaves the one-step direction right up to its length, channel by channel."""
    oracle = tikhonov_oracle(estimator)
    theta, history = run(HOAG(step=0.1), oracle, 150)
    assert float(history[-1].metrics["tol"]) < 1e-6, "what the estimator leaves out is no floor"
    torch.testing.assert_close(theta["regularizer.log_weight"], minimiser(oracle), rtol=0, atol=1e-2)


@every_optimizer
def test_descends_on_a_field_of_experts(optimizer: UpperOptimizer) -> None:
    foe = small_foe()
    oracle = make_oracle(smooth_images(3, (3, 9, 9)), foe, AGD(), CGIFT())
    start = join(regularizer=initial(foe))
    theta, _ = run(optimizer, oracle, 10, start)
    before, after = (oracle.on(full_batch(oracle)).value(t, Accuracy(1e-6)) for t in (start, theta))
    assert after.upper < before.lower
    # The kernels keep their zero mean.
    assert float(foe.kernels(split(theta, "regularizer")).mean((2, 3)).abs().max()) < 1e-12


@every_optimizer
def test_a_restored_state_continues_as_if_never_stopped(optimizer: UpperOptimizer) -> None:
    def go(interrupted: bool) -> dict[str, Tensor]:
        oracle, theta = tikhonov_oracle(), dict(START)
        state: dict[str, Any] = optimizer.init(theta)
        for k in range(8):
            if interrupted and k == 4:
                theta, state = saved(theta), saved(state)
            step = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
            theta, state = step.theta, step.state
        return theta

    assert torch.equal(flat(go(True)), flat(go(False)))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_dtype_and_its_arguments(optimizer: UpperOptimizer, dtype: torch.dtype) -> None:
    oracle = make_oracle(smooth_images(2, (3, 8, 8)), Tikhonov(), AGD(), CGIFT(), dtype=dtype)
    theta = {name: value.to(dtype) for name, value in START.items()}
    state = optimizer.init(theta)
    first = optimizer.step(theta, oracle.on(full_batch(oracle)), state)
    kept, kept_state = flat(first.theta), saved(first.state)
    second = optimizer.step(first.theta, oracle.on(full_batch(oracle)), first.state)
    assert torch.equal(flat(first.theta), kept)
    assert torch.equal(theta["regularizer.log_weight"], START["regularizer.log_weight"].to(dtype))
    for name, value in kept_state.items():
        assert torch.equal(torch.as_tensor(first.state[name]), torch.as_tensor(value))
    assert all(value.dtype == dtype for value in second.theta.values())
    assert all(value.dtype == dtype for value in second.state.values() if isinstance(value, Tensor))


def test_iadam_takes_mini_batches() -> None:
    oracle = tikhonov_oracle()
    sampler, optimizer = Epoch(size=2), IAdam(step=0.1, step_decay=0.5, tol=1e-2)
    draw, theta = sampler.init(6, 0), dict(START)
    state = optimizer.init(theta)
    for _ in range(300):
        batch, draw = sampler.next(draw)
        step = optimizer.step(theta, oracle.on(batch), state)
        theta, state = step.theta, step.state
    torch.testing.assert_close(theta["regularizer.log_weight"], minimiser(oracle), rtol=0, atol=0.1)


def test_the_first_step_of_iadam_has_its_length_in_every_parameter() -> None:
    """Bias correction: m̂/√v̂ = ±1 at once, whatever the size of z."""
    for curvature in (1e-3, 1.0, 1e3):
        theta, _ = run_on(Parabola(curvature), IAdam(step=0.1), 1)
        torch.testing.assert_close(
            theta["a"], torch.tensor([2.9, -1.9], dtype=torch.float64), rtol=0, atol=1e-4
        )


def run_on(oracle: Parabola, optimizer: UpperOptimizer, steps: int) -> tuple[dict[str, Tensor], list[Step]]:
    theta, history = parabola_start(), []
    state = optimizer.init(theta)
    for _ in range(steps):
        history.append(optimizer.step(theta, oracle, state))
        theta, state = history[-1].theta, history[-1].state
    return theta, history


def test_iadam_agrees_with_torch() -> None:
    settings = {"step": 0.03, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}
    theta, _ = run_on(Parabola(2.0), IAdam(**settings), 25)
    leaf = parabola_start()["a"].requires_grad_()
    reference = torch.optim.Adam([leaf], lr=0.03, betas=(0.8, 0.95), eps=1e-6)
    for _ in range(25):
        reference.zero_grad()
        (0.5 * 2.0 * leaf.square().sum()).backward()
        reference.step()
    torch.testing.assert_close(theta["a"], leaf.detach(), rtol=1e-12, atol=1e-12)


def test_a_step_that_is_held_decays_afterwards() -> None:
    oracle, optimizer = tikhonov_oracle(), IAdam(step=0.1, step_decay=2.0, step_hold=3)
    _, history = run(optimizer, oracle, 6)
    sizes = [step.metrics["step_size"] for step in history]
    assert sizes[:3] == [0.1, 0.1, 0.1]
    assert sizes[3:] == pytest.approx([0.1 * (3 / k) ** 2 for k in (4, 5, 6)])


def test_an_empty_batch_moves_nothing_but_the_schedule() -> None:
    oracle, optimizer = tikhonov_oracle(), IAdam(step_decay=0.5, tol_decay=0.5)
    theta, history = run(optimizer, oracle, 3)
    before = history[-1].state
    step = optimizer.step(theta, oracle.on(Batch([], [])), before)
    assert torch.equal(flat(step.theta), flat(theta))
    assert step.state["k"] == before["k"] + 1
    for name, value in before.items():
        if name != "k":
            assert torch.equal(torch.as_tensor(step.state[name]), torch.as_tensor(value))


@pytest.mark.parametrize("kind", [ISGD, IAdam])
def test_the_schedules_are_powers(kind: type[ISGD] | type[IAdam]) -> None:
    optimizer = kind(step=0.2, step_decay=0.5, tol=0.1, tol_decay=0.75, adjoint_tol=0.3)
    oracle = Parabola()
    _, history = run_on(oracle, optimizer, 5)
    for k, step in enumerate(history):
        assert step.metrics["step_size"] == pytest.approx(0.2 * (k + 1) ** -0.5)
        assert step.metrics["tol"] == pytest.approx(0.1 * (k + 1) ** -0.75)
        assert step.metrics["adjoint_tol"] == pytest.approx(0.3 * (k + 1) ** -0.75)
    assert power_decay(2.0, 0.0, 7) == 2.0


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("geometric", [0.1, 0.08, 0.064]),
        ("quadratic", [0.1, 0.1 / 4, 0.1 / 9]),
        ("cubic", [0.1, 0.1 / 8, 0.1 / 27]),
    ],
)
def test_hoag_tightens_as_told(decay: str, expected: list[float]) -> None:
    oracle = Parabola()
    run_on(oracle, HOAG(step=0.1, tol=0.1, ratio=0.8, decay=decay), 3)  # type: ignore[arg-type]
    assert [tol for what, tol in oracle.asked if what == "hypergradient"] == pytest.approx(expected)


def test_hoag_finds_a_step_that_decreases() -> None:
    """From one that is a hundred times too long, by refusing it; from one far too short, by lengthening."""
    oracle = Parabola(curvature=10.0)
    theta, history = run_on(oracle, HOAG(step=10.0, tol=1e-6), 60)
    assert float(theta["a"].norm()) < 1e-3
    assert int(history[0].metrics["trials"]) > 5
    losses = [step.loss for step in history]
    assert all(after <= before + 1e-5 for before, after in pairwise(losses))
    assert oracle.accepted == len(history)
    _, history = run_on(Parabola(), HOAG(step=1e-4, grow=1.5, tol=1e-6), 20)
    assert float(history[-1].metrics["step_size"]) == pytest.approx(1e-4 * 1.5**19)


def test_hoag_refuses_what_no_tolerance_can_explain() -> None:
    """A step across the valley is refused at a tight tolerance and let through where values may be that wrong."""
    for tol, passes in ((1e-9, False), (10.0, True)):
        _, history = run_on(Parabola(curvature=1.0, error=1.0), HOAG(step=2.05, tol=tol, adjoint_tol=1e-9), 1)
        assert (history[0].metrics["trials"] == 1) is passes


@pytest.mark.parametrize("error", [-1.0, 1.0])
def test_hoag_converges_with_inexact_values_and_gradients(error: float) -> None:
    theta, _ = run_on(Parabola(curvature=2.0, error=error), HOAG(step=0.1, tol=0.5), 120)
    assert float(theta["a"].norm()) < 1e-3


def test_hoag_stops_tightening_at_the_floor_and_ends() -> None:
    oracle = make_oracle(
        smooth_images(2, (3, 8, 8)), Tikhonov(), AGD(), CGIFT(), noise=0.3, dtype=torch.float32
    )
    start = {name: value.float() for name, value in START.items()}
    _, history = run(HOAG(step=0.1, tol=1e-4, ratio=0.3), oracle, 400, start)
    tols = [float(step.metrics["tol"]) for step in history]
    assert min(tols) > 1e-9, "the sequence went on below what float32 can reach"
    assert history[-1].finished is None or history[-1].finished.startswith("converged")


def test_hoag_says_when_there_is_nothing_left() -> None:
    class Flat(Parabola):
        """Lies about its gradient: no step helps."""

        def hypergradient(
            self, theta: Theta, effort: Accuracy, adjoint: Accuracy, **_: bool
        ) -> HypergradientResult:
            uphill = {"a": -theta["a"]}
            return HypergradientResult(uphill, self._value(theta, 0.0), 0.0, 1.0)

    theta = parabola_start()
    optimizer = HOAG(step=1.0, tol=1e-12)
    state, finished = optimizer.init(theta), None
    for _ in range(20):
        step = optimizer.step(theta, Flat(), state)
        assert torch.equal(step.theta["a"], theta["a"])
        state, finished = step.state, step.finished
        if finished:
            break
    assert finished is not None and finished.startswith("converged-to-precision")
