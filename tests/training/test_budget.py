"""What a budget covers, and the noise that a recipe may ask for."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch
from commands import caller
from torch import Tensor

from blt_builtins.lower_solvers.agd import AGD
from blt_builtins.regularizers.tv import TotalVariation
from bltoolbox import load_recipe, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.bilevel.problem import Lower
from bltoolbox.bilevel.records import Theta
from bltoolbox.bilevel.roles import LowerSolver
from bltoolbox.bilevel.tensors import keyed_generator
from bltoolbox.config.block import Block
from bltoolbox.errors import RecipeError
from bltoolbox.restoration.data_loading import Samples
from bltoolbox.restoration.metrics import METRICS
from bltoolbox.restoration.theta import join
from bltoolbox.restoration.variational import Variational
from bltoolbox.testing import make_oracle, smooth_images
from bltoolbox.training.baseline import search_around, tune

TINY = [
    "data={name: dead-leaves, count: 4, size: 16}",
    "evaluation={name: dead-leaves, count: 2, size: 16, seed: 7}",
    "validation.count=0",
    "baseline={name: tv}",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler={name: epoch, size: 2}",
    "device=cpu",
]


class Slow(AGD):
    """A solver whose iterations take a while."""

    def step(self, lower: Lower, state: object) -> object:  # type: ignore[override]
        time.sleep(0.02)
        return super().step(lower, state)  # type: ignore[arg-type]


def test_tuning_the_baseline_ends_with_the_seconds_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tune
    spent: list[float] = []

    def measured(
        problem: Variational, theta: Theta, samples: Samples, solver: LowerSolver, **options: object
    ) -> object:
        began = time.perf_counter()
        try:
            return original(problem, theta, samples, Slow(), **options)  # type: ignore[arg-type]
        finally:
            spent.append(time.perf_counter() - began)

    monkeypatch.setattr("bltoolbox.training.experiment.tune", measured)
    recipe = load_recipe("smoke", [*TINY, "budget={seconds: 4}", "evaluation_tol=1e-5"])
    began = time.perf_counter()
    result = run(recipe, out=tmp_path / "run")
    assert time.perf_counter() - began < 60
    # A fifth is reserved, and an iteration may be under way. Left alone it would take minutes.
    assert 0 < spent[0] <= 4 * 0.2 + 1.0
    assert (
        "budget.seconds was spent before the baseline was tuned" in (tmp_path / "run" / "log.txt").read_text()
    )
    assert result.evaluation is not None


def search(trials: float) -> tuple[object, dict[str, Tensor]]:
    tv = TotalVariation()
    oracle = make_oracle(smooth_images(2, (1, 8, 8)), tv, AGD(), None, noise=0.1)  # type: ignore[arg-type]
    theta = join(regularizer=tv.init_params((1, 16, 16), keyed_generator(0)))
    left = [trials]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    options = {"tol": 1e-2, "chunk": 2, "limit": 500, "stop": stop, "metric": METRICS["psnr"]}
    return tune(oracle.problem, theta, oracle.tasks.samples, AGD(), **options), theta  # type: ignore[arg-type]


def test_a_search_that_is_stopped_keeps_its_best_trial() -> None:
    whole, theta = search(float("inf"))
    assert whole.complete and whole.iterations > 0  # type: ignore[attr-defined]
    early, _ = search(0)
    assert not early.complete and early.trials == 0  # type: ignore[attr-defined]
    assert all(torch.equal(early.theta[name], theta[name]) for name in theta)  # type: ignore[attr-defined]
    some, _ = search(whole.iterations // 4)  # type: ignore[attr-defined]
    assert not some.complete and 0 < some.trials < whole.trials  # type: ignore[attr-defined]


class Fractions(Listener):
    """How much of the budget is used, relative to the time of training."""

    def __init__(self) -> None:
        self.pace: list[float] = []

    def stepped(self, record: object, seconds: float, fraction: float) -> None:
        if fraction < 1:
            self.pace.append(fraction / seconds)


def test_a_fifth_of_the_seconds_is_reserved_for_a_baseline() -> None:
    heard = Fractions()
    run(load_recipe("smoke", [*TINY, "budget={seconds: 2}"]), listeners=[heard])
    # The median, since a busy machine may wait between the two readings of the clock.
    assert statistics.median(heard.pace) >= 0.99 / (0.8 * 2)
    # Checks are part of the two seconds, but not of the time of training.
    assert run(load_recipe("smoke", [*TINY, "baseline=null", "budget={seconds: 2}"])).seconds > 0.9 * 2


@pytest.mark.parametrize(("noise", "meant"), [("25", "25/255"), ("2.5", "2.5/255"), ("6553", "6553/65535")])
def test_noise_of_pixel_values_is_refused(
    noise: str, meant: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecipeError, match=f"did you mean {meant}"):
        load_recipe("smoke", [f"noise={noise}"])
    path = tmp_path / "recipe.yaml"
    path.write_text(load_recipe("smoke").text.replace("25/255", noise))
    done = caller("validate", capfd)(str(path))
    line = path.read_text().splitlines().index(f"noise:           {noise}") + 1
    assert done.returncode == 3 and f"recipe.yaml:{line}:18: noise:" in done.stderr
    assert meant in done.stderr


def test_the_largest_noise_is_that_of_the_range() -> None:
    assert load_recipe("smoke", ["noise=1"]).noise == Block("noise", "gaussian", {"level": 1.0})
    with pytest.raises(RecipeError, match="noise"):
        load_recipe("smoke", ["noise=300/255"])


@pytest.mark.parametrize("minimiser", [-7.3, -1.2, 0.0, 0.9, 7.9])
def test_the_search_follows_a_minimiser_outside_its_first_interval(minimiser: float) -> None:
    found = search_around(lambda t: 1 + (t - minimiser) ** 2, 0.0, 2.0)
    assert found == pytest.approx(minimiser, abs=0.05)
