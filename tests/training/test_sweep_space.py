"""The syntax of searches and of resources on a cluster: what is meant, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bltoolbox.errors import UsageError
from bltoolbox.training.sweep.resources import Resources, array_script, further_options, minutes_of
from bltoolbox.training.sweep.space import Range, parse_space


class Suggest:
    """A trial that always suggests the given fraction of a range."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def suggest_float(self, key: str, low: float, high: float, log: bool) -> float:
        return low * (high / low) ** self.fraction if log else low + self.fraction * (high - low)

    def suggest_int(self, key: str, low: int, high: int, log: bool) -> int:
        return round(self.suggest_float(key, low, high, log))

    def suggest_categorical(self, key: str, choices: list[str]) -> str:
        return choices[int(self.fraction * (len(choices) - 1))]


def test_ranges_choices_and_plain_overrides() -> None:
    space = parse_space(
        [
            "upper_optimizer.step=log:1e-4..1e-1",
            "sampler.size=2..8",
            "noise=5/255..50/255",
            "seed=0,1",
            "color=gray",
        ]
    )
    assert space.ranges == {
        "upper_optimizer.step": Range(1e-4, 1e-1, log=True, whole=False),
        "sampler.size": Range(2, 8, log=False, whole=True),
        "noise": Range(5 / 255, 50 / 255, log=False, whole=False),
    }
    assert space.choices == {"seed": ["0", "1"]} and space.fixed == {"color": "gray"}
    cell = space.ask(Suggest(1 / 3))
    assert cell.overrides == [
        "color=gray",
        "upper_optimizer.step=0.001",
        "sampler.size=4",
        "noise=0.07843",
        "seed=0",
    ]
    assert cell.name == "step=0.001,size=4,noise=0.07843,seed=0"


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_rounding_never_leaves_the_range(fraction: float) -> None:
    space = parse_space(["a=0.123456..0.654321"])
    (text,) = space.ask(Suggest(fraction)).settings.values()
    assert 0.123456 <= float(text) <= 0.654321


def test_corners_have_both_ends_and_every_choice() -> None:
    cells = parse_space(["a=1..9", "b=x,y,z"]).corners()
    values = [cell.settings for cell in cells]
    assert {value["a"] for value in values} == {"1", "9"} and {value["b"] for value in values} == {
        "x",
        "y",
        "z",
    }


def test_variants_are_choices() -> None:
    assert parse_space(["a=1..2"], ["isgd", "maid"]).choices == {"variant": ["isgd", "maid"]}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("a=1e-4", "needs a range or choices"),
        ("a=2..1", "the first end must be below"),
        ("a=log:0..1", "positive ends"),
        ("a=log:-1..1", "positive ends"),
        ("a=x..y", "is not a range; write LOW..HIGH"),
        ("a=1..", "is not a range"),
        ("a=log:3", "is not a range"),
        ("a=1/0..2", "is not a range"),
        ("a=.nan..2", "is not a range"),
        ("a=1..2,3..4", "a range stands alone"),
    ],
)
def test_mistakes_are_refused(argument: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_space([argument])


def test_times_as_sbatch_reads_them() -> None:
    texts = {"90": 90, "1:30": 2, "1:30:00": 90, "1-0": 1440, "1-2:30": 1590, "1-2:30:01": 1591, "0:30": 1}
    assert {text: minutes_of(text) for text in texts} == texts
    for wrong in ("0", "x", "1:2", "1:00:00:00", "-5", ""):
        with pytest.raises(UsageError, match="--time"):
            minutes_of(wrong)


def test_further_options_cannot_break_out_of_a_line() -> None:
    assert further_options(["account=imaging"]) == {"account": "imaging"}
    for wrong in ("account", "=x", "a b=c", "comment=x\nrm -rf /"):
        with pytest.raises(UsageError, match="--slurm"):
            further_options([wrong])


def test_the_array_script_runs_and_resumes_its_cell(tmp_path: Path) -> None:
    """With a command that only prints its arguments."""
    out = tmp_path / "step=1 o'clock"
    cells = [(tmp_path / "other", ["run", "x"]), (out, ["run", "r.yaml", "a={b: 'c d'}", "--out", str(out)])]
    resources = Resources("gpu", 30, 1, 4, 2, {"account": "imaging"})
    directives = resources.directives("name", 2, "log")
    assert "#SBATCH --array=0-1%2" in directives and "#SBATCH --gpus-per-node=1" in directives
    assert "#SBATCH --signal=B:TERM@120" in directives and "#SBATCH --account=imaging" in directives
    script = tmp_path / "array.sh"
    script.write_text(array_script(directives, cells, ["printf", "%s|"], ["--plugin", "p.py"]))

    def task() -> list[str]:
        answer = subprocess.run(
            ["bash", str(script)],
            env={"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return answer.stdout.split("|")[:-1]

    more = ["--verbose", "--plugin", "p.py"]
    assert task() == [*cells[1][1], *more]
    out.mkdir()
    (out / "resolved.yaml").touch()
    assert task() == [*cells[1][1], "--overwrite", *more], "stopped before its first checkpoint"
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "state-00000001.ckpt").touch()
    assert task() == ["resume", str(out), *more]
