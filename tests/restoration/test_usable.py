"""A θ that cannot be used is never a result, and is refused wherever one is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import caller
from safetensors.torch import save_file
from torch import Tensor

from bltoolbox import Model, load_recipe, resume, run
from bltoolbox.config.block import Block
from bltoolbox.config.recipe import Recipe
from bltoolbox.errors import BltError, NumericalError, RecipeError
from bltoolbox.restoration.model import read_theta
from bltoolbox.training.assemble import assemble
from bltoolbox.training.checkpoint import read_checked, write_checked

TINY = [
    "data={name: dead-leaves, count: 4, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler={name: epoch, size: 2}",
    "device=cpu",
    "checkpoint={every: 0, keep_finished: true}",
]


def recipe(*words: str) -> Recipe:
    return load_recipe("smoke", [*TINY, "budget={steps: 3}", *words])


@pytest.mark.parametrize("step", ["1e38", "1e300"])
def test_a_run_whose_step_is_far_too_long_fails_in_a_sentence(
    step: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [
        "smoke",
        "budget.steps=1",
        f"upper_optimizer.step={step}",
        "validation.count=0",
        "evaluation=null",
    ]
    done = caller("run", capfd)(*words, "-q", "-o", str(tmp_path / "run"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "θ that cannot be used" in done.stderr, done.stderr
    assert not (tmp_path / "run" / "theta.safetensors").exists()


@pytest.mark.parametrize("policy", ["shrink-step", "skip-batch"])
def test_such_a_step_is_recovered_from_as_the_recipe_says(policy: str, tmp_path: Path) -> None:
    words = ["upper_optimizer={name: isgd, step: 1e4, tol: 0.1}", f"on_divergence={policy}"]
    if policy == "skip-batch":
        with pytest.raises(NumericalError, match=r"θ that cannot be used.*attempts to recover"):
            run(recipe(*words))
        return
    result = run(recipe(*words))
    assert result.history[-1]["recoveries"] >= 1
    assert all(bool(torch.isfinite(value).all()) for value in result.theta.values())


#: What can be wrong with a θ, done to the entries of a good one.
FLAWS = {
    "a NaN": lambda theta: _first(
        theta, lambda value: value.index_put((torch.tensor(0),), torch.tensor(torch.nan))
    ),
    "an infinity": lambda theta: _first(theta, lambda value: value + torch.inf),
    "an infinite exponential": lambda theta: {name: value + 1000 for name, value in theta.items()},
    "another shape": lambda theta: _first(theta, lambda value: torch.cat([value, value])),
    "whole numbers": lambda theta: {name: value.long() for name, value in theta.items()},
    "another name": lambda theta: {f"{name}x": value for name, value in theta.items()},
    "an entry missing": lambda theta: dict(list(theta.items())[1:]),
}


def _first(theta: dict[str, Tensor], change: object) -> dict[str, Tensor]:
    name = next(iter(theta))
    return theta | {name: change(theta[name])}  # type: ignore[operator]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    run(recipe(), out=path)
    return path


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_θ_file_is_refused(
    flaw: str, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theta, metadata = read_theta(trained)
    path = tmp_path / "theta.safetensors"
    save_file({name: value.contiguous() for name, value in FLAWS[flaw](theta).items()}, path, metadata)
    with pytest.raises(BltError, match="θ cannot be used"):
        Model.load(path)
    with pytest.raises(RecipeError, match=r"init: the θ of .* cannot be used"):
        assemble(recipe(f"init={path}"))
    done = caller("evaluate", capfd)(str(path))
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("longer") / "run"
    run(recipe("budget.steps=4"), out=path)
    return path


def spoil(path: Path, flaw: str) -> None:
    """Write a flaw into the θ of a checkpoint that is otherwise whole."""
    manifest = read_checked(path)
    run_ = manifest["content"]["run"]
    run_["theta"] = FLAWS[flaw](run_["theta"])
    write_checked(path, manifest)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_checkpoint_with_it_is_passed_over(flaw: str, longer: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(recipe(), out=path)
    newest = sorted(path.glob("checkpoints/state-*.ckpt"))[-1]
    spoil(newest, flaw)
    result = resume(path, ["budget.steps=4"])
    metrics = [(one / "metrics.jsonl").read_bytes() for one in (path, longer)]
    assert result.steps == 4 and metrics[0] == metrics[1]


def test_without_a_usable_checkpoint_there_is_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    run(recipe(), out=path)
    for one in path.glob("checkpoints/state-*.ckpt"):
        spoil(one, "a NaN")
    done = caller("resume", capfd)(str(path), "budget.steps=4")
    assert done.returncode == 1 and "no usable checkpoint" in done.stderr and "NaN" in done.stderr


def test_a_model_whose_components_need_a_missing_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = Model.load("denoise-gray-foe", "cpu")
    weights = Block("data_term", "least-squares", {"weights": str(tmp_path / "gone.npy")})
    Model(model.problem, model.solver, model.theta, replace(model.recipe, data_term=weights)).save(
        tmp_path / "m.safetensors"
    )
    with pytest.raises(BltError, match=r"m\.safetensors: .*there is no file .*gone\.npy"):
        Model.load(tmp_path / "m.safetensors", "cpu")
