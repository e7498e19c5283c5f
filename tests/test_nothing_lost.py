"""What is not the toolbox's is not deleted, and odd beginnings neither hang nor crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import caller
from helpers import initial

from blt_regularizers.foe import FieldOfExperts, Planes
from bltoolbox import load_recipe, run
from bltoolbox.assemble import pick_device
from bltoolbox.errors import MissingError

TINY = [
    "data={name: dead-leaves, count: 4, size: 16}",
    "evaluation=null",
    "validation.count=0",
    "baseline=null",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler={name: epoch, size: 2}",
    "budget={steps: 3}",
    "device=cpu",
    "checkpoint.every=0",
]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that was never a run, with files of its own."""
    for name in ("images/holiday.jpg", "checkpoints/mine.pt"):
        (tmp_path / "proj" / name).parent.mkdir(parents=True)
        (tmp_path / "proj" / name).write_text("mine")
    return tmp_path / "proj"


def kept(folder: Path) -> bool:
    return (folder / "images" / "holiday.jpg").is_file() and (folder / "checkpoints" / "mine.pt").is_file()


def test_overwriting_deletes_only_what_a_run_left(foreign: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["smoke", *TINY, "-o", str(foreign), "-q"]
    assert caller("run", capfd)(*words).returncode == 2 and kept(foreign)
    assert caller("run", capfd)(*words, "--overwrite").returncode == 0 and kept(foreign)


def test_a_restart_deletes_nothing_of_others(
    foreign: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bltoolbox.cli import run as command
    from bltoolbox.errors import UsageError
    from bltoolbox.launch import Place
    from bltoolbox.ranks import ALONE

    monkeypatch.setattr(Place, "here", classmethod(lambda cls: Place(0, 1, 0, 1)))
    with pytest.raises(UsageError, match="not empty"):
        command._directory(foreign, False, ALONE)
    (foreign / "resolved.yaml").write_text("")
    command._directory(foreign, False, ALONE)


def test_a_damaged_checkpoint_is_passed_over_by_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    run(load_recipe("smoke", TINY), out=path)
    newest = sorted(path.glob("checkpoints/state-*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    done = caller("resume", capfd)(str(path), "budget.steps=4")
    assert done.returncode == 0, done.stderr
    assert "falling back to the checkpoint before it" in done.stderr


@pytest.mark.parametrize("optimizer", ["isgd-ls", "maid", "{name: isgd, step: auto}"])
def test_theta_may_begin_at_zero(optimizer: str, tmp_path: Path) -> None:
    words = [
        *TINY,
        "regularizer={name: tikhonov, weight: 1}",
        "sampler={name: full}",
        f"upper_optimizer={optimizer}",
    ]
    result = run(load_recipe("smoke", words), out=tmp_path / "run")
    assert any(float(value.abs().max()) > 0 for value in result.theta.values()), "it learns"


@pytest.mark.parametrize("name", ["mps", "meta", "xla"])
def test_devices_that_are_not_here(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is here")
    with pytest.raises(MissingError, match=name):
        pick_device(name)


def test_planes_are_kept_for_a_few_sizes_only() -> None:
    planes = Planes(torch.rand(3))
    for side in range(4, 40):
        found = planes.at(torch.zeros(1, 3, side, side))
        assert found.shape == (1, 3, side, side)
    assert len(planes._made) <= 4


def test_inference_mode_leaves_nothing_behind() -> None:
    foe = FieldOfExperts(filters=2, kernel_size=3)
    theta, x = initial(foe), torch.rand(1, 3, 8, 8, dtype=torch.float64)
    expected = foe.gradient(theta, x)
    with torch.inference_mode():
        inside = {name: value.clone() for name, value in theta.items()}
        torch.testing.assert_close(foe.gradient(inside, x), expected)
    torch.testing.assert_close(foe.gradient(theta, x), expected)
