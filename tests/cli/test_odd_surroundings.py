"""Odd names, numbers, variables and memory, and what a killed run leaves: a sentence, and nothing half done."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import caller
from safetensors.torch import load

from bltoolbox import resume, run
from bltoolbox.bilevel.events import Listener
from bltoolbox.cli.processes import next_command
from bltoolbox.config.recipe import Recipe, recipe_from_dict
from bltoolbox.distributed.launch import may_restart, rank_timeout
from bltoolbox.errors import BltError, UsageError, explain
from bltoolbox.restoration.model import encode
from bltoolbox.runs import files
from bltoolbox.training.driver import run_in

BLT = [sys.executable, "-m", "bltoolbox"]
DIGITS = "9" * 5000
Blt = Callable[..., subprocess.CompletedProcess[str]]


def recipe(steps: int = 3, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "data": {"name": "dead-leaves", "count": 6, "size": 16},
        "regularizer": {"name": "foe", "filters": 2, "kernel_size": 3},
        "sampler": {"size": 4},
        "validation": {"count": 1},
        "checkpoint": {"every": 0, "keep_finished": True},
        "budget": {"steps": steps},
        "evaluation_tol": 1e-2,
    }
    return recipe_from_dict(settings | changes)


def call(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    done = caller("", capfd)(*arguments)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    run(recipe(), out=path)
    return path


OUTPUTS = {
    "run": ["run", "smoke", "-o"],
    "sweep": ["sweep", "smoke", "seed=1", "-o"],
    "report": ["report", "RUN", "-o"],
    "compare": ["compare", "RUN", "-o"],
    "apply": ["apply", "RUN", "RUN/images/restored.png", "-o"],
    "cp": ["cp", "smoke"],
    "new-plugin": ["new-plugin", "stars", "-o"],
    "schema": ["schema", "-o"],
}


@pytest.mark.parametrize("name", ["x" * 300, "ä" * 150, "bad\udcff", "folder/bad\udcff/x"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_no_file_system_takes_is_refused_before_anything_is_written(
    command: str,
    name: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("RUN", str(finished)) for word in OUTPUTS[command]]
    code, said = call([*words, f"{name}.png" if command in ("compare", "apply") else name], capfd)
    assert code == 2 and "choose" in said and "unexpected" not in said, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["resume", "watch", "report", "compare", "evaluate", "run", "validate"])
def test_an_input_with_too_long_a_name_is_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 300, "bad\udcff"):
        code, said = call([command, name], capfd)
        assert code in (2, 4) and "unexpected" not in said, said


def test_a_long_name_leaves_room_for_the_temporary_file(tmp_path: Path) -> None:
    files.write_text(tmp_path / ("x" * 255), "all of it")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["all of it"]


@pytest.mark.parametrize(
    "override",
    [f"seed={DIGITS}", f"seed=0x{DIGITS}", f"seed=0o{'7' * 5000}", f"budget.steps={DIGITS}", f"noise={DIGITS}/2",
     f"sampler={{size: {DIGITS}}}", f"data.paths=[{DIGITS}]", f"evaluation_tol=1e{DIGITS}", f"{DIGITS}=1"],
)  # fmt: skip
def test_a_number_of_thousands_of_digits_is_a_problem_of_the_recipe(
    override: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = call(["validate", "smoke", override], capfd)
    assert code == 3 and "unexpected" not in said, said
    key, _, value = override.partition("=")
    (tmp_path / "recipe.yaml").write_text(f"{key.partition('.')[0]}: {value}\n")
    code, said = call(["validate", str(tmp_path / "recipe.yaml")], capfd)
    assert code == 3 and "unexpected" not in said, said


@pytest.mark.parametrize("option", ["--seed", "--nproc"])
def test_an_option_of_thousands_of_digits_is_refused(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = call(["run", "smoke", option, DIGITS], capfd)
    assert code == 2 and "unexpected" not in said, said[:500]


@pytest.mark.parametrize("value", ["abc", "-1", "0", "nan", "inf", "1e300", DIGITS])
def test_a_time_limit_that_is_none_is_refused_once(value: str, tmp_path: Path, blt: Blt) -> None:
    with pytest.raises(UsageError, match="BLT_RANK_TIMEOUT"):
        rank_timeout({"BLT_RANK_TIMEOUT": value})
    if value == "abc":
        environment = os.environ | {"BLT_RANK_TIMEOUT": value}
        done = blt("run", "smoke", "-o", str(tmp_path / "run"), "--nproc", "2", env=environment)
        assert (done.returncode, done.stderr.count("BLT_RANK_TIMEOUT")) == (2, 1), done.stderr


def test_the_default_time_limit_is_half_an_hour() -> None:
    assert rank_timeout({}) == rank_timeout({"BLT_RANK_TIMEOUT": ""}) == 1800
    assert rank_timeout({"BLT_RANK_TIMEOUT": "2.5"}) == 2.5


def test_restarts_that_are_no_number_are_refused() -> None:
    assert not may_restart({}) and may_restart({"TORCHELASTIC_MAX_RESTARTS": "3"})
    for value in ("abc", "-1", DIGITS):
        with pytest.raises(UsageError, match="TORCHELASTIC_MAX_RESTARTS"):
            may_restart({"TORCHELASTIC_MAX_RESTARTS": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "abc"), ("LOCAL_RANK", DIGITS), ("WORLD_SIZE", "0"), ("COLUMNS", "abc"), ("BLT_CACHE", "/dev/null"),
     ("BLT_CACHE", "x" * 300), ("XDG_CACHE_HOME", "\udcff"), ("BLT_PLUGINS", ",,\udcff"), ("TERM", "\udcff"),
     ("BLT_LIFELINE", "abc"), ("BLT_NO_LOCK", "abc"), ("OMP_NUM_THREADS", "abc"), ("HOME", "/no/such")],
)  # fmt: skip
def test_a_variable_with_a_bad_value_is_no_bug(name: str, value: str, tmp_path: Path, blt: Blt) -> None:
    environment = {key: one for key, one in os.environ.items() if key != "BLT_CACHE"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1"} | {name: value}
    done = blt("run", "smoke", "--dry-run", env=environment, cwd=tmp_path)
    assert done.returncode in (0, 2, 3, 4) and "unexpected" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def exhaust(kind: str) -> None:
    if kind == "python":
        raise MemoryError
    if kind == "system":
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if kind == "numpy":
        np.empty(2**58)
    if kind == "cuda":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
    torch.empty(2**50)


@pytest.mark.parametrize("kind", ["python", "numpy", "torch", "cuda"])
def test_a_run_without_memory_fails_with_advice(kind: str, tmp_path: Path) -> None:
    class Trouble(Listener):
        def stepped(self, record: Any, seconds: float, fraction: float) -> None:
            exhaust(kind)

    with pytest.raises((MemoryError, RuntimeError)) as caught:
        run(recipe(), out=tmp_path / "run", listeners=[Trouble()])
    assert explain(caught.value).startswith("out of memory; lower `chunk`")
    status = json.loads((tmp_path / "run/status.json").read_text())["status"]
    assert status.startswith("failed: out of memory; lower `chunk`")


@pytest.mark.parametrize("kind", ["python", "system", "numpy", "torch", "cuda"])
def test_a_command_without_memory_exits_with_1(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bltoolbox.cli.run._assemble", lambda *arguments: exhaust(kind))
    code, said = call(["run", "smoke", "--dry-run"], capfd)
    assert code == 1 and said.startswith("error: out of memory; lower `chunk`") and "unexpected" not in said


def test_equal_thetas_are_equal_files() -> None:
    """The library writes metadata in an order that is another each time."""
    asked = recipe()
    theta = {name: torch.arange(6.0).view(2, 3) for name in ("regularizer.b", "regularizer.a")}
    written = {encode(theta, asked) for _ in range(30)}
    assert len(written) == 1
    content = written.pop()
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert all(torch.equal(value, theta[name]) for name, value in load(content).items())


def test_perfect_images_leave_valid_json(tmp_path: Path) -> None:
    """Their PSNR is infinite, for which JSON has no word."""
    path = tmp_path / "run"
    run(recipe(2, noise=0, evaluation={"name": "dead-leaves", "count": 1, "size": 16, "seed": 3}), out=path)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    found = [file for file in path.rglob("*") if file.suffix in (".json", ".jsonl")]
    assert len(found) > 5
    for file in found:
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)


LEFT = (
    ".status.json.0123456789ab.tmp",
    "checkpoints/.state-00000002.ckpt.0123456789ab.tmp",
    "checkpoints/warm-00000099-p0.ckpt",
    "checkpoints/own-00000099-1of2.ckpt",
    "checkpoints/warm-ab12cd_4.rows",
    "thetas/.000001.safetensors.0123456789ab.tmp",
    "images/.curves.png.0123456789ab.tmp",
)
KEPT = (
    ".gitignore",
    "notes.tmp",
    "checkpoints/warm-abc.ckpt",
    "checkpoints/.notes.tmp",
    "checkpoints/state-abc.ckpt",
)


def test_what_killed_runs_left_is_removed_when_the_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(recipe(), out=path)
    for name in (*LEFT, *KEPT):
        (path / name).write_bytes(b"x")
    resume(path, ["budget.steps=5"])
    assert not [name for name in LEFT if (path / name).exists()]
    assert all((path / name).read_bytes() == b"x" for name in KEPT)
    assert len(list((path / "checkpoints").glob("state-0*.ckpt"))) == 2, "files of others are no checkpoints"


def test_temporary_files_are_removed_by_the_run_that_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(recipe(1), out=path)
    for name in LEFT:
        (path / name).write_bytes(b"x")
    from bltoolbox.training.assemble import assemble
    from bltoolbox.training.run_dir import RunDirectory

    run_in(RunDirectory(path, overwrite=True), assemble(recipe(1)))
    assert not [name for name in LEFT if (path / name).exists()]


def test_a_file_is_in_its_folder_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is flushed to disk after the rename, not before."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(*arguments: Any, **options: Any) -> None:
        events.append("rename")
        replace(*arguments, **options)

    monkeypatch.setattr(files.os, "fsync", flushed)
    monkeypatch.setattr(files.os, "replace", renamed)
    files.write_text(tmp_path / "file", "text")
    assert events == ["file", "rename", "folder"]


def test_advice_names_only_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "blt resume" not in next_command(tmp_path, 1) and "--overwrite" in next_command(tmp_path, 1)
    real = os.fsync

    def full(descriptor: int) -> None:
        if "state-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(BltError, match=r"No space left.*start the run again with --overwrite"):
            run(recipe(), out=tmp_path / "run")
    run(recipe(), out=tmp_path / "whole")
    assert f"blt resume {tmp_path / 'whole'} --nproc 2" in next_command(tmp_path / "whole", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smoke", "seed=-1", "-o", "run"], "seed"),
        (["no-such-recipe", "-o", "run"], "no-such-recipe"),
        (["smoke", "-o", "file"], "is a file"),
        (["smoke", "sampler.size=5000", "-o", "run"], "sampler"),
    ],
)
def test_ranks_report_an_error_once(words: list[str], said: str, tmp_path: Path) -> None:
    """As torchrun starts them, without a process of ours that could check the recipe before."""
    (tmp_path / "file").write_text("")
    ranks = []
    for rank in range(2):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment |= {"BLT_RENDEZVOUS": f"file://{tmp_path}/ranks"}
        ranks.append(
            subprocess.Popen(
                [*BLT, "run", *words], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True
            )
        )
    told = [one.communicate(timeout=100)[1] for one in ranks]
    assert said in told[0] and not told[1], told
    assert {one.returncode for one in ranks} <= {2, 3, 4}
