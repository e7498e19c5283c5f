"""The oracle: bounds, weights, chunks, ledger, warm starts and the samples behind it."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    REGULARIZERS,
    SOLVERS,
    initial,
    kept,
    lower_level,
    measured,
    oracle_for,
    relative_error,
    small_foe,
)
from torch import Tensor

from blt_builtins.operators.blur import Blur
from bltoolbox.bilevel.bounds import RITZ_STEPS
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.bilevel.oracle import BilevelOracle
from bltoolbox.bilevel.records import Accuracy, Batch
from bltoolbox.bilevel.tensors import norm
from bltoolbox.bilevel.warm_starts import Store
from bltoolbox.errors import NumericalError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import VariationalTasks
from bltoolbox.testing import Gain, Images, Tikhonov, White, full_batch, smooth_images


def foe_oracle(**options: object) -> tuple[BilevelOracle, dict[str, Tensor]]:
    oracle = oracle_for(small_foe(), **options)  # type: ignore[arg-type]
    return oracle, join(regularizer=initial(small_foe()))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("prior", REGULARIZERS)
def test_bounds_of_a_value_contain_the_true_f(prior: str, solver: str) -> None:
    theta, weights = join(regularizer=initial(REGULARIZERS[prior]())), (0.4, 1.7, 0.9)
    exact = (
        oracle_for(REGULARIZERS[prior](), solver)
        .on(Batch(range(3), weights))
        .value(theta, Accuracy(1e-12))
        .value
    )
    widths = []
    for tol in (3.0, 1.0, 0.1, 1e-3):
        value = (
            oracle_for(REGULARIZERS[prior](), solver).on(Batch(range(3), weights)).value(theta, Accuracy(tol))
        )
        assert 0 <= value.lower <= exact <= value.upper
        assert value.lower <= value.value <= value.upper
        assert value.certified and not value.short
        widths.append(value.upper - value.lower)
    assert widths[-1] < 1e-2 * widths[0]


def test_value_is_the_weighted_mean_over_all_samples_whatever_the_batch() -> None:
    """f_v = 1/m Σ v_i f_i: no hidden division by the size of the batch or of a chunk."""
    oracle, theta = foe_oracle(count=4)
    each = [oracle.on(Batch([i], [4.0])).value(theta, Accuracy(1e-10)).value for i in range(4)]
    pair = oracle.on(Batch([3, 1], [2.0, 0.5])).value(theta, Accuracy(1e-10)).value
    assert pair == pytest.approx((2.0 * each[3] + 0.5 * each[1]) / 4, rel=1e-9)
    assert oracle.on(full_batch(oracle)).value(theta, Accuracy(1e-10)).value == pytest.approx(
        sum(each) / 4, rel=1e-9
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_chunks_change_neither_value_nor_cost_nor_warm_starts(solver: str) -> None:
    results = []
    for chunk in (1, 2, 5, 32):
        oracle, theta = foe_oracle(count=5, solver=solver, chunk=chunk)
        value = oracle.on(full_batch(oracle)).value(theta, Accuracy(1e-3))
        result = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-3), Accuracy(1e-3))
        results.append((value, result, oracle.cost.computations, kept(oracle.solutions, range(5))))
    for value, result, computations, x in results[1:]:
        first = results[0]
        assert value.value == pytest.approx(first[0].value, rel=1e-12)
        assert value.upper == pytest.approx(first[0].upper, rel=1e-9)
        assert relative_error(result.gradient, first[1].gradient) < 1e-9
        assert computations == first[2]
        torch.testing.assert_close(x, first[3], rtol=0, atol=1e-11)


def test_a_sample_s_solution_does_not_depend_on_its_batch() -> None:
    alone, theta = foe_oracle(count=5)
    together, _ = foe_oracle(count=5)
    together.on(Batch([4, 2, 0], [1.0] * 3)).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))
    for i in (0, 2, 4):
        alone.on(Batch([i], [1.0])).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))
    for store in ("solutions", "memory.adjoint"):
        a, b = (kept(o.stores[store], [0, 2, 4]) for o in (alone, together))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_solutions_are_as_accurate_as_asked() -> None:
    loose, theta = foe_oracle()
    tight, _ = foe_oracle()
    tight.on(full_batch(tight)).hypergradient(theta, Accuracy(1e-12), Accuracy(1e-12))
    exact = kept(tight.solutions, range(3))
    for tol in (1.0, 1e-2, 1e-5):
        loose.on(full_batch(loose)).hypergradient(theta, Accuracy(tol), Accuracy(tol))
        found = kept(loose.solutions, range(3))
        assert (norm(found - exact) <= tol).all()


def test_only_first_solves_start_from_the_estimate() -> None:
    oracle, theta = foe_oracle(estimates=True)
    _, y = measured(oracle)
    lower = lower_level(small_foe(), y)
    estimate = lower.estimate()
    assert not torch.equal(estimate, lower.start())
    # With such a tolerance the start is the solution.
    loose = Accuracy(1e9)
    oracle.on(Batch([1], [1.0])).hypergradient(theta, loose, loose)
    assert torch.equal(kept(oracle.solutions, [1]), estimate[1:2])
    oracle.on(Batch([1], [1.0])).hypergradient(theta, Accuracy(1e-3), loose)
    warm = kept(oracle.solutions, [1])
    oracle.on(full_batch(oracle)).hypergradient(theta, loose, loose)
    assert torch.equal(kept(oracle.solutions, [1]), warm)
    assert torch.allclose(kept(oracle.solutions, [0, 2]), estimate[[0, 2]], rtol=0, atol=1e-14)
    assert not oracle.solutions.missing(range(3))


class TestLedger:
    def test_counts_what_the_solver_reports(self) -> None:
        oracle, theta = foe_oracle(solver="agd")
        _, y = measured(oracle)
        lower = lower_level(small_foe(), y)
        expected = solve(SOLVERS["agd"](), lower, lower.start(), 1e-4).iterations
        value = oracle.on(full_batch(oracle)).value(theta, Accuracy(1e-4))
        spent = int(expected.sum())
        cost = oracle.cost
        assert cost.lower_iterations == cost.computations == cost.line_search == spent
        assert cost.slowest == 3 * int(expected.max())
        assert (cost.linear_iterations, cost.values, cost.hypergradients) == (0, 1, 0)
        assert value.iterations == pytest.approx(spent / 3)

    def test_counts_the_linear_solver_and_nothing_twice(self) -> None:
        oracle, theta = foe_oracle()
        first = oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))
        cost = oracle.cost
        assert cost.linear_iterations == round(3 * first.iterations) > 0
        assert cost.lower_iterations == round(3 * first.value.iterations) > 0
        assert cost.computations == cost.lower_iterations + cost.linear_iterations <= cost.slowest
        assert (cost.hypergradients, cost.values, cost.line_search, cost.power_iterations) == (1, 0, 0, 0)
        oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))  # warm: free
        assert oracle.cost.computations == cost.computations and oracle.cost.hypergradients == 2

    def test_power_iterations_are_counted_apart(self) -> None:
        """Where no strong convexity is known, the bound asks Lanczos for it."""
        theta = join(regularizer=initial(small_foe()))
        with_bound, plain = (oracle_for(small_foe(), operator=Blur(size=3, sigma=1)) for _ in range(2))
        with_bound.on(full_batch(with_bound)).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4), bound=True)
        plain.on(full_batch(plain)).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))
        assert with_bound.cost.power_iterations == RITZ_STEPS * 3 and plain.cost.power_iterations == 0
        assert with_bound.cost.computations == plain.cost.computations

    def test_an_empty_batch_costs_nothing_and_is_zero(self) -> None:
        oracle, theta = foe_oracle()
        result = oracle.on(Batch([], [])).hypergradient(theta, Accuracy(1e-4), Accuracy(1e-4))
        assert oracle.cost.computations == 0
        assert result.value.value == 0
        assert all(not part.any() for part in result.gradient.values())


class TestWarmStarts:
    def test_a_value_s_solutions_become_warm_starts_only_when_accepted(self) -> None:
        oracle, theta = foe_oracle()
        batch = oracle.on(full_batch(oracle))
        batch.hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6))
        before = kept(oracle.solutions, range(3))
        trial = batch.value({name: value + 0.1 for name, value in theta.items()}, Accuracy(1e-6))
        assert torch.equal(kept(oracle.solutions, range(3)), before)
        batch.accept(trial)
        after = kept(oracle.solutions, range(3))
        assert not torch.equal(after, before)
        assert (
            batch.value({name: value + 0.1 for name, value in theta.items()}, Accuracy(1e-6)).iterations == 0
        )

    @pytest.mark.parametrize("fraction", [1.0, 0.25])
    def test_a_value_may_start_on_the_way_to_an_earlier_one(self, fraction: float) -> None:
        oracle, theta = foe_oracle()
        batch, further = (
            oracle.on(full_batch(oracle)),
            {name: value + 0.1 for name, value in theta.items()},
        )
        batch.hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6))
        before = kept(oracle.solutions, range(3))
        trial = batch.value(further, Accuracy(1e-6))
        ((_, reached),) = trial.trial
        # So loose an accuracy that the start is the solution.
        ((_, start),) = batch.value(further, Accuracy(1e6), towards=trial, fraction=fraction).trial
        expected = before + fraction * (reached["solutions"] - before)
        torch.testing.assert_close(start["solutions"], expected, rtol=0, atol=1e-14)
        assert torch.equal(kept(oracle.solutions, range(3)), before), "the warm starts are those of before"
        assert not oracle.solutions.guests and oracle.solutions.changes == 3
        again = batch.value(further, Accuracy(1e-6), towards=trial)
        assert again.iterations == 0 and again.value == pytest.approx(trial.value, rel=1e-12)

    def test_a_value_towards_one_that_failed_starts_from_the_warm_starts(self) -> None:
        oracle, theta = foe_oracle()
        batch = oracle.on(full_batch(oracle))
        batch.hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6))
        broken = dict(theta) | {"regularizer.log_scale": torch.full((1,), float("nan"), dtype=torch.float64)}
        failed = batch.value(broken, Accuracy(1e-6))
        assert failed.trial is None
        assert batch.value(theta, Accuracy(1e-6), towards=failed).iterations == 0

    def test_a_failed_call_leaves_no_trace_but_its_cost(self) -> None:
        oracle, theta = foe_oracle()
        batch = oracle.on(full_batch(oracle))
        batch.hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6))
        before, cost = kept(oracle.solutions, range(3)), oracle.cost
        broken = dict(theta) | {"regularizer.log_scale": torch.full((1,), float("nan"), dtype=torch.float64)}
        with pytest.raises(NumericalError, match="samples 0, 1, 2"):
            batch.hypergradient(broken, Accuracy(1e-6), Accuracy(1e-6))
        assert torch.equal(kept(oracle.solutions, range(3)), before)
        assert oracle.cost.gradients > cost.gradients

    def test_a_store_gives_what_was_put_and_the_cold_start_elsewhere(self) -> None:
        store, cold = Store(4), torch.full((2, 3), -1.0)
        assert torch.equal(store.get([1, 2], cold), cold)
        store.put([2, 0], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        assert torch.equal(store.get([2, 1], cold), torch.tensor([[1.0, 2.0, 3.0], [-1.0, -1.0, -1.0]]))
        store.put([2], torch.tensor([[7.0, 8.0, 9.0]]))
        assert store.get([0, 2], cold).tolist() == [[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]

    def test_a_store_does_not_share_memory_with_what_was_put_or_given(self) -> None:
        store, rows = Store(2), torch.ones(2, 3)
        store.put([0, 1], rows)
        rows += 1
        store.get([0, 1], torch.zeros(2, 3)).mul_(5)
        assert torch.equal(store.get([0, 1], torch.zeros(2, 3)), torch.ones(2, 3))


def samples(**options: object) -> Samples:
    settings: dict[str, object] = {"noise": White(0.2), "seed": 3, "dtype": torch.float64} | options
    return Samples(Images(smooth_images(5)), Gain(), **settings)  # type: ignore[arg-type]


class TestNoise:
    def noise(self, positions: list[int], **options: object) -> Tensor:
        sample = samples(**options).batch(positions)
        assert sample.truth is not None
        return (sample.y - sample.truth).double()

    def test_a_sample_has_the_same_noise_in_any_order_and_batch(self) -> None:
        whole = self.noise([0, 1, 2, 3, 4])
        for positions in ([3], [4, 0], [2, 2], [4, 3, 2, 1, 0]):
            assert torch.equal(self.noise(positions), whole[positions])

    def test_it_depends_on_the_id_not_on_the_place_in_a_split(self) -> None:
        assert torch.equal(self.noise([1], ids=[2, 4]), self.noise([4]))

    def test_it_is_the_same_in_both_precisions(self) -> None:
        single = self.noise([0, 1], dtype=torch.float32)
        torch.testing.assert_close(single, self.noise([0, 1]), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("other", [{"seed": 4}, {"stream": "evaluation"}])
    def test_another_seed_or_stream_has_other_noise(self, other: dict[str, object]) -> None:
        a, b = self.noise([0]).flatten(), self.noise([0], **other).flatten()
        assert abs(float(a @ b) / float(a.norm() * b.norm())) < 0.2  # 5 standard errors for 504 pixels

    def test_ids_have_unrelated_noise_of_the_given_deviation(self) -> None:
        n = self.noise([0, 1, 2, 3, 4]).flatten(1)
        correlation = torch.corrcoef(n) - torch.eye(5, dtype=torch.float64)
        assert correlation.abs().max() < 0.25
        assert abs(float(n.std()) - 0.2) < 0.2 * 5 / (2 * n.numel()) ** 0.5
        assert abs(float(n.mean())) < 0.2 * 5 / n.numel() ** 0.5

    def test_it_is_not_clipped_and_does_not_touch_the_global_generator(self) -> None:
        state = torch.random.get_rng_state()
        y = samples(noise=White(1.0)).batch([0, 1]).y
        assert y.min() < 0 and y.max() > 1
        assert torch.equal(torch.random.get_rng_state(), state)


def test_gray_is_the_luma_of_the_colours_and_keeps_gray_images() -> None:
    sample = samples(color="gray").batch([0, 1])
    x_true, y = sample.truth, sample.y
    assert x_true is not None
    r, g, b = smooth_images(2).double().unbind(1)
    torch.testing.assert_close(x_true[:, 0], 0.299 * r + 0.587 * g + 0.114 * b, rtol=1e-6, atol=0)
    assert x_true.shape == y.shape == (2, 1, 12, 14) and samples(color="gray").shape == (1, 12, 14)
    gray = Samples(Images(smooth_images(2, (1, 8, 8))), Gain(), color="gray")
    truth = gray.batch([0]).truth
    assert truth is not None and torch.equal(truth, smooth_images(1, (1, 8, 8)))


def test_bad_data_is_an_error_that_names_the_samples() -> None:
    images = smooth_images(4)
    images[2, 0, 0, 0] = float("nan")
    oracle, theta = (
        oracle_for(Tikhonov(), count=4),
        {"regularizer.log_weight": torch.zeros(3, dtype=torch.float64)},
    )
    assert isinstance(oracle.tasks, VariationalTasks)
    oracle.tasks.samples.data = Images(images)
    with pytest.raises(NumericalError, match="samples 2: a NaN or Inf"):
        oracle.on(full_batch(oracle)).hypergradient(theta, Accuracy(1e-6), Accuracy(1e-6))
