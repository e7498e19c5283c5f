"""Budgets of a GPU that need no clock: kernels launched and times that the host waits, counted on a stand-in.

What counts is defined in ``cuda_stand_in``: a launch is one operator of ATen with a tensor of the device that is not a
view or an allocation; a wait is a number read by the host, an index of unknown size or a copy through pageable memory.
The model is the paper's: ten filters of 7×7 on mirrored colour images, without preconditioner unless it is named.
A step is one call of ``LowerSolver.step`` or ``LinearMethod.step``.
"""

from __future__ import annotations

from typing import Any

import cuda_stand_in as stand_in
import pytest
import torch
from helpers import initial, noisy
from torch import Tensor

from blt_builtins.borders import extended, folded
from blt_builtins.hypergradients.cg_ift import CGIFT
from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.lower_solvers.mm import MemoryGradient
from blt_builtins.operators.blur import Blur
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe import FieldOfExperts
from bltoolbox.bilevel.linear import ConjugateGradients, solve_linear
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.records import Steps
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.restoration.image_lower import ImageLower
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.testing import full_batch, make_oracle, smooth_images, variational

SHAPE = (3, 16, 18)
OPERATORS = {"identity": Identity, "blur": Blur}
every_operator = pytest.mark.parametrize("operator", OPERATORS)
#: Launches of one iteration, by method; blurring may take half as many again.
BUDGET = {"agd": 25, "mm": 36, "cg": 18}


def level(operator: str, count: int = 4) -> ImageLower:
    """h on the stand-in, in float32."""
    regularizer = FieldOfExperts()
    theta = join(regularizer=initial(regularizer, SHAPE))
    problem = variational(OPERATORS[operator](), regularizer)
    there = stand_in.move({name: value.float() for name, value in theta.items()})
    return problem.at(there, SHAPE).on(stand_in.move(noisy(count, SHAPE).float()))


def solvers() -> dict[str, LowerSolver]:
    return {"agd": AGD(), "mm": MemoryGradient(preconditioner="none")}


@every_operator
@pytest.mark.parametrize("name", ["agd", "mm"])
def test_a_step_of_the_lower_level(name: str, operator: str) -> None:
    solver = solvers()[name]
    with stand_in.device() as device, torch.no_grad():
        lower = level(operator)
        state = solver.step(lower, solver.init(lower, lower.start(), {}))
        device.reset()
        solver.step(lower, state)
    assert device.total <= BUDGET[name] * (1.5 if operator == "blur" else 1), device.launches
    assert not device.waits.total(), device.waits


@every_operator
def test_a_step_of_conjugate_gradients(operator: str) -> None:
    method = ConjugateGradients()
    with stand_in.device() as device, torch.no_grad():
        lower = level(operator)
        system, rhs = lower.linearize(lower.start()), lower.y
        state = method.init(system, rhs, torch.zeros_like(rhs), torch.zeros_like(lower.mu))
        state = method.step(system, state)
        device.reset()
        method.step(system, state)
    assert device.total <= BUDGET["cg"] * (1.5 if operator == "blur" else 1), device.launches
    assert not device.waits.total(), device.waits


@pytest.mark.parametrize("name", ["agd", "mm"])
def test_the_loop_waits_once_per_check(name: str) -> None:
    """Of two solves with 8 and 24 iterations, the second has four checks more."""
    counts = {}
    for limit in (8, 24):
        with stand_in.device() as device:
            lower = level("identity")
            device.reset()
            solve(solvers()[name], lower, lower.start(), 0.0, limit=limit)
            counts[limit] = device.total, device.waits.total()
    launches, waits = (b - a for a, b in zip(counts[8], counts[24], strict=True))
    assert waits == 4
    # A check copies the residuals since the last one: two launches.
    assert launches <= 16 * BUDGET[name] + 2 * waits


def test_conjugate_gradients_wait_once_in_four_iterations() -> None:
    counts = {}
    for limit in (4, 20):
        with stand_in.device() as device, torch.no_grad():
            lower = level("identity")
            system, zeros = lower.linearize(lower.start()), torch.zeros_like(lower.y)
            device.reset()
            solve_linear(ConjugateGradients(), system, lower.y, zeros, torch.zeros_like(lower.mu), limit)
            counts[limit] = device.waits.total()
    assert counts[20] - counts[4] == 4


@pytest.mark.parametrize("name", ["agd", "mm"])
def test_samples_that_finish_at_different_times_end_as_on_a_cpu(name: str) -> None:
    """Batches shrink to certain sizes only, filled up with finished samples, whose results stay as they were."""
    tol = torch.tensor([1e-1, 1e-3, 1e-2, 1e-4, 1e-3, 1e-1, 1e-4], dtype=torch.float64)
    regularizer = FieldOfExperts(filters=2, kernel_size=3)
    problem = variational(Identity(), regularizer)
    theta, y = join(regularizer=initial(regularizer, SHAPE)), noisy(7, SHAPE)
    lower = problem.at(theta, SHAPE).on(y)
    expected = solve(solvers()[name], lower, lower.start(), tol, check_every=4)
    sizes: list[int] = []

    class Watched(type(solvers()[name])):  # type: ignore[misc]
        def step(self, lower: ImageLower, state: Any) -> Any:
            sizes.append(len(state.x))
            return super().step(lower, state)

    with stand_in.device():
        there = problem.at(stand_in.move(theta), SHAPE).on(stand_in.move(y))
        solver = Watched() if name == "agd" else Watched(preconditioner="none")
        solution = solve(solver, there, there.start(), tol)
    assert set(sizes) <= {7, 6, 4, 3, 2, 1} and len(set(sizes)) > 1
    assert solution.status == expected.status
    assert solution.iterations.tolist() == expected.iterations.tolist()
    torch.testing.assert_close(stand_in.back(solution.x), expected.x, rtol=0, atol=1e-10)
    torch.testing.assert_close(solution.residual, expected.residual, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("boundary", ["symmetric", "periodic"])
@pytest.mark.parametrize("size", [(3, 3), (7, 4), (5, 2)])
def test_extension_and_its_adjoint_by_gathering(boundary: Any, size: tuple[int, int]) -> None:
    x = noisy(2, (2, 6, 9))
    wide = extended(x, size, boundary)
    t = torch.randn(wide.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    framed = torch.nn.functional.pad(t, (1, 1, 1, 1))
    assert wide.shape[2:] == (6 + size[0] - 1, 9 + size[1] - 1)
    before = [(length - 1) // 2 for length in size]
    inside = wide[:, :, before[0] : before[0] + 6, before[1] : before[1] + 9]
    torch.testing.assert_close(inside, x, rtol=0, atol=0)
    pairings: list[Tensor] = [(wide * t).sum(), (x * folded(framed, size, boundary)).sum()]
    torch.testing.assert_close(*pairings, rtol=1e-12, atol=1e-12)


#: Launches of a warm oracle call of eight images with four iterations of solver and CG each. P adds 114: 48 in eight
#: iterations (each four products with cosines, and two for the blocks between them), 53 for making it twice, and 13 for
#: inner products that are norms without it.
WHOLE = {"agd": 350, "mm": 370, "mm, preconditioned": 480}


def call(name: str) -> tuple[LowerSolver, CGIFT]:
    if name == "mm, preconditioned":
        return MemoryGradient(preconditioner="spectral"), CGIFT(preconditioner="spectral")
    return solvers()[name], CGIFT(preconditioner="none")


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_oracle_call(name: str) -> None:
    """From θ to the hypergradient, warm starts included; it gives what a CPU gives."""
    regularizer, results = FieldOfExperts(), {}
    for place in ("cpu", "cuda"):
        with stand_in.device() as device:
            theta = join(regularizer=initial(regularizer, SHAPE))
            theta = {key: value.float() for key, value in theta.items()}
            theta = theta if place == "cpu" else stand_in.move(theta)
            images, (solver, estimator) = smooth_images(8, SHAPE), call(name)
            oracle = make_oracle(images, regularizer, solver, estimator, Identity(), dtype=torch.float32)
            assert isinstance(oracle.tasks, VariationalTasks)
            oracle.tasks.samples.device = torch.device(place)
            batch = oracle.on(full_batch(oracle))
            batch.hypergradient(theta, Steps(4), Steps(4))
            device.reset()
            moved = {key: 1.01 * value for key, value in theta.items()}
            results[place] = batch.hypergradient(moved, Steps(4), Steps(4))
    assert device.total <= WHOLE[name], device.launches
    assert device.waits.total() <= 15, device.waits
    for key, expected in results["cpu"].gradient.items():
        torch.testing.assert_close(
            stand_in.back(results["cuda"].gradient[key]), expected, rtol=1e-3, atol=1e-4
        )
