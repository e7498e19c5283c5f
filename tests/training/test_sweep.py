"""``blt sweep``: grids, names, refusals, and what happens when a run or the sweep itself is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Call, Result, caller
from conftest import BLT

from bltoolbox.config.recipe import load_recipe
from bltoolbox.errors import UsageError
from bltoolbox.runs.history import RunHistory, glance
from bltoolbox.runs.settings import differing, labels
from bltoolbox.training.sweep.grid import MAX_NAME, parse_grid, readable, short_keys, split_values

TINY = [
    "data={name: dead-leaves, count: 6, size: 16}",
    "evaluation={name: dead-leaves, count: 2, size: 16, seed: 1}",
    "regularizer={name: foe, filters: 2, kernel_size: 3}",
    "sampler.size=2",
    "validation={count: 2, checks: 2}",
    "device=cpu",
    "checkpoint.every=0.1",
]
QUICK = [*TINY, "budget={steps: 2}"]
#: Long enough to be stopped on the way.
STEPS = 40
LONG = [*TINY, f"budget={{steps: {STEPS}}}"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``blt`` in this process, in an empty folder; the runs of a sweep have processes of their own anyway."""
    monkeypatch.chdir(tmp_path)
    return caller("", capfd)


# Grids


VALUES = {
    "a": ["a"],
    "": [""],
    "a,b,c": ["a", "b", "c"],
    " 1e-3 , 1e-2 ": ["1e-3", "1e-2"],
    "{name: isgd, step: 1}": ["{name: isgd, step: 1}"],
    "{name: isgd, step: 1},maid": ["{name: isgd, step: 1}", "maid"],
    "[1, 2],[3]": ["[1, 2]", "[3]"],
    "{a: [1, {b: 2, c: 3}]},{}": ["{a: [1, {b: 2, c: 3}]}", "{}"],
    "'a,b',\"c,d\"": ["'a,b'", '"c,d"'],
    "{a: 'x]}', b: 1},2": ["{a: 'x]}', b: 1}", "2"],
    "it's,that's": ["it's", "that's"],
    "[1,2": ["[1,2"],
}


@pytest.mark.parametrize("text", VALUES)
def test_commas_separate_values_unless_something_holds_them_together(text: str) -> None:
    assert split_values(text) == VALUES[text]


def test_a_grid_is_every_combination_and_single_values_are_plain_overrides() -> None:
    cells = parse_grid(["noise=0.1", "upper_optimizer.step=1e-3,1e-2", "seed=0,1"]).cells()
    assert [cell.name for cell in cells] == [
        "step=0.001,seed=0",
        "step=0.001,seed=1",
        "step=0.01,seed=0",
        "step=0.01,seed=1",
    ]
    assert cells[1].overrides == ["noise=0.1", "upper_optimizer.step=1e-3", "seed=1"]
    assert cells[1].settings == {"upper_optimizer.step": "1e-3", "seed": "1"}
    assert [cell.name for cell in parse_grid(["upper_optimizer={name: isgd, step: 1}"]).cells()] == ["run"]
    assert [cell.overrides for cell in parse_grid([]).cells()] == [[]]


def test_names_are_short_safe_and_unique() -> None:
    assert short_keys(["a.step", "b.step", "seed"]) == {
        "a.step": "a.step",
        "b.step": "b.step",
        "seed": "seed",
    }
    assert short_keys(["size", "sampler.size"]) == {"size": "size", "sampler.size": "sampler.size"}
    assert readable("{name: isgd, step: 1}") == "isgd+step=1"
    assert readable("../../etc/*?") == "..-..-etc"
    assert readable("'/'") == "empty"
    cells = parse_grid(["init=a/b,a b,A-B,ä", "evaluation.names=[astronaut, coffee],[rocket]"]).cells()
    names = [cell.name for cell in cells]
    assert len({name.casefold() for name in names}) == len(cells) == 8
    assert not any(letter in name for name in names for letter in "/\\ ä*?'\"")
    long = parse_grid([f"init={'x' * 300}1,{'x' * 300}2"]).cells()
    assert len({cell.name for cell in long}) == 2 and all(len(cell.name) <= MAX_NAME for cell in long)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["seed=1,,2"], "empty value"),
        (["seed=1,2,"], "empty value"),
        (["seed=1,2,1"], "1 is given twice"),
        (["noise=0.1,1e-1"], "1e-1 is given twice, first as 0.1"),
        (["seed=1,2", "seed=3"], "seed is given twice"),
        (["=1,2"], "not of the form"),
        (["a..b=1,2"], "not of the form"),
        ([f"{key}={','.join(map(str, range(30)))}" for key in "abc"], "27,000 cells"),
    ],
)
def test_grids_that_cannot_be_meant(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_grid(words)


def test_labels_name_what_differs_and_no_options_of_other_components() -> None:
    isgd: dict[str, Any] = {
        "upper_optimizer": {"name": "isgd", "step": 0.01, "tol": 0.1},
        "noise": 0.1,
        "init": None,
    }
    shorter = isgd | {"upper_optimizer": {"name": "isgd", "step": 0.001, "tol": 0.1}}
    maid = isgd | {"upper_optimizer": {"name": "maid", "eps": 1.0}}
    assert labels([isgd, shorter]) == ["upper_optimizer.step=0.01", "upper_optimizer.step=0.001"]
    assert labels([isgd, maid]) == ["upper_optimizer=isgd", "upper_optimizer=maid"]
    assert labels([isgd, shorter, maid]) == [
        "upper_optimizer=isgd, upper_optimizer.step=0.01",
        "upper_optimizer=isgd, upper_optimizer.step=0.001",
        "upper_optimizer=maid",
    ]
    assert labels([isgd, isgd]) == ["", ""]
    assert labels([isgd, isgd | {"init": "x"}]) == ["init=null", "init=x"]
    assert differing([isgd, maid]) == [f"upper_optimizer.{name}" for name in ("name", "step", "tol", "eps")]


def test_tab_offers_another_value_behind_a_comma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace
    from typing import cast

    from bltoolbox.cli.completion import complete_grid

    monkeypatch.chdir(tmp_path)

    def offered(*arguments: str, begun: str) -> list[str]:
        context = cast(Any, SimpleNamespace(params={"arguments": list(arguments)}))
        return [word for word, _ in complete_grid(context, begun)]

    assert offered(begun="smo") == ["smoke"]
    assert "lower_solver=" in offered("smoke", begun="lower_")
    assert offered("smoke", begun="lower_solver=ag") == ["lower_solver=agd"]
    assert offered("smoke", begun="lower_solver=mm,ag") == ["lower_solver=mm,agd"]
    assert offered("smoke", "lower_solver", "=", begun="mm,ag") == ["mm,agd"], "as bash cuts it"


# Refusals


def test_all_problems_of_all_cells_are_told_and_nothing_is_written(here: Call, tmp_path: Path) -> None:
    done = here("sweep", "smoke", *QUICK, "lower_solver=agd,adg", "regularizer.filters=2,none", "-o", "out")
    assert done.returncode == 3 and done.stdout == ""
    told = done.stderr.splitlines()
    assert len(told) == 2
    assert told[0].startswith("lower_solver=agd,filters=none; lower_solver=adg,filters=none: <override>:")
    assert "regularizer.filters" in told[0]
    assert told[1].startswith("lower_solver=adg,filters=2; lower_solver=adg,filters=none: ")
    assert "did you mean 'agd'" in told[1]
    # What only the built parts and the data can tell.
    settings = [*(one for one in QUICK if not one.startswith("sampler")), "sampler.size=2,5"]
    done = here("sweep", "smoke", *settings)
    assert done.returncode == 3
    assert "size=5: " in done.stderr and "5 is larger than the 4 training samples" in done.stderr
    done = here("sweep", "smoke", *QUICK, "noise=a", "seed=0,1")
    assert done.returncode == 3 and done.stderr.startswith("all 2 cells: ")
    assert list(tmp_path.iterdir()) == []


def test_other_refusals(here: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "sweep.json").write_text("{")
    for words, code, sentence in (
        (["seed=1,2"], 2, "takes one recipe"),
        (["nowhere", "seed=1,2"], 2, "nowhere does not exist"),
        (["smoke", *QUICK, "seed=1,2", "-o", "mine"], 2, "not empty and not a sweep"),
        (["smoke", *QUICK, "seed=1,2", "-o", "mine/notes.txt"], 2, "is a file"),
        (["smoke", *QUICK, "seed=1,2", "-o", "damaged"], 1, "cannot be read"),
        (["smoke", *QUICK, "regularizer=foe,tv"], 2, "regularizer is given twice"),
        (["smoke", *QUICK, "lower_solver=agd,{name: agd}"], 2, "are the same run"),
    ):
        done = here("sweep", *words)
        assert done.returncode == code, done.stderr
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_dry_run_prints_commands_and_writes_nothing(here: Call, tmp_path: Path) -> None:
    settings = [one for one in QUICK if not one.startswith("regularizer")]
    done = here("sweep", "smoke", *settings, "regularizer=foe,tv", "seed=0,1", "-o", "out", "--dry-run")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("blt run smoke ") and "regularizer=tv seed=1 -o " in lines[3]
    done = here("sweep", "smoke", *settings, "regularizer=foe,tv", "--dry-run", "--json")
    facts = json.loads(done.stdout)
    assert [cell["status"] for cell in facts["cells"]] == ["waiting", "waiting"]
    assert Path(facts["directory"]).parent == Path("runs/smoke")
    assert Path(facts["directory"]).name.startswith("sweep-")
    assert list(tmp_path.iterdir()) == []


# Sweeps


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A finished sweep of two cells, both at a time."""
    folder = tmp_path_factory.mktemp("swept")
    return folder / "out", sweep(folder, *QUICK, "upper_optimizer.step=1e-2,1e-1", "--jobs", "2", "--json")


def command(*words: str) -> list[str]:
    return [*BLT, "sweep", "smoke", *words, "-o", "out"]


def sweep(folder: Path, *words: str) -> Result:
    """A sweep in a process of its own."""
    done = subprocess.run(
        command(*words), cwd=folder, text=True, encoding="utf-8", capture_output=True, timeout=180
    )
    assert "Traceback" not in done.stderr
    return done


def test_each_cell_is_a_run_like_any_other(swept: tuple[Path, Result]) -> None:
    path, done = swept
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert [cell["name"] for cell in facts["cells"]] == ["step=0.01", "step=0.1"]
    for cell, step in zip(facts["cells"], ("1e-2", "1e-1"), strict=True):
        assert cell["status"] == "finished" and cell["reason"] is None
        assert cell["settings"] == {"upper_optimizer.step": step}
        assert cell["steps"] == 2 and cell["computations"] > 0 and cell["seconds"] > 0
        assert cell["psnr_validation"] > 10 and cell["psnr_test"] > 10
        run = path / cell["name"]
        expected = load_recipe("smoke", [*QUICK, f"upper_optimizer.step={step}"])
        assert load_recipe(run / "resolved.yaml") == expected
        assert "blt run" in (run / "recipe.yaml").read_text(), "with its comments"
        history = RunHistory.read(run)
        assert history.finished and not history.notes and [one.step for one in history.steps] == [1, 2]
        assert history.checks[0].step == 0 and history.checks[0].seconds == 0
        assert history.checks[-1].seconds == history.steps[-1].seconds
        assert history.tested(history.metric) == cell["psnr_test"]
        assert (glance(run, history.recipe).step, glance(run, history.recipe).fraction) == (2, 1.0)
    best = max(facts["cells"], key=lambda cell: cell["psnr_validation"])
    assert facts["best"] == facts["best_validation"] == best["name"]


def test_the_same_again_skips_grows_and_never_mixes(
    swept: tuple[Path, Result], here: Call, tmp_path: Path
) -> None:
    shutil.copytree(swept[0], tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*.jsonl")}
    again = here("sweep", "smoke", *QUICK, "upper_optimizer.step=0.1,0.01", "-o", "out")
    assert again.returncode == 0, "the same values, written in another way and order"
    lines = again.stdout.splitlines()
    assert lines[0].split()[:2] == ["cell", "status"]
    assert [line.split()[0] for line in lines[1:]] == ["step=0.1", "step=0.01"]
    assert again.stdout.count("*") == 2, "the best of each column"
    grown = here(
        "sweep", "smoke", *QUICK, "upper_optimizer.step=1e-2,1e-1", "seed=0,1", "-o", "out", "--dry-run"
    )
    assert grown.returncode == 0
    told = [line.partition("  # ")[2] for line in grown.stdout.splitlines()]
    assert told == ["finished", "", "finished", ""], "known cells keep their names and results"
    other = here("sweep", "smoke", *QUICK, "upper_optimizer.step=1e-2,1e-1", "noise=0.2", "-o", "out")
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1
    assert "contains another sweep" in other.stderr and "noise" in other.stderr
    fewer = here("sweep", "smoke", *QUICK, "upper_optimizer.step=1e-2", "-o", "out")
    assert fewer.returncode == 2 and "step=0.1 is not in this grid" in fewer.stderr
    recipe = tmp_path / "out" / "step=0.1" / "resolved.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0\n", "seed: 5\n", 1))
    stranger = here("sweep", "smoke", *QUICK, "upper_optimizer.step=1e-2,1e-1", "-o", "out")
    assert stranger.returncode == 2 and "a run of another recipe" in stranger.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_cell_that_fails_does_not_stop_the_others_and_is_begun_anew(here: Call, tmp_path: Path) -> None:
    words = ["smoke", *QUICK, "upper_optimizer.step=1e30,1e-2", "-o", "out"]
    done = here("sweep", *words, "--json")
    assert done.returncode == 1
    facts = json.loads(done.stdout)
    failed, fine = facts["cells"]
    assert facts["best"] == facts["best_test"] == fine["name"]
    assert (failed["status"], fine["status"]) == ("failed", "finished")
    assert "not finite" in failed["reason"]
    assert Path(failed["log"]).read_text().count("$ blt run") == 1
    (tmp_path / "out" / "step=1e+30" / "mine.txt").write_text("mine")
    done = here("sweep", *words)
    assert done.returncode == 1
    assert "restarted" in done.stderr and f"({failed['log']})" in done.stderr
    assert (tmp_path / "out" / "set-aside" / "step=1e+30" / "mine.txt").read_text() == "mine"
    assert "resume" not in Path(failed["log"]).read_text()
    assert "$ blt run" in Path(fine["log"]).read_text()


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int = 4) -> None:
    """Until a run is on its way and has a checkpoint to go on from; those are written by the clock, not by steps."""
    patience = time.monotonic() + 90
    while glance(run, {}).step < count or not any(run.glob("checkpoints/state-*.ckpt")):
        assert process.poll() is None and time.monotonic() < patience
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def hold(process: subprocess.Popen[str], run: Path) -> int:
    """Stop a run on its way, so that it cannot finish before the test has done what it is about to do."""
    wait_for_steps(process, run)
    (child,) = [pid for pid in children(process) if run.name in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(child, signal.SIGSTOP)
    return child


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="needs /proc to find the children"
)


def whole(run: Path) -> None:
    """A run that lost nothing and did nothing twice."""
    history = RunHistory.read(run)
    assert history.finished and not history.notes
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


@needs_proc
def test_a_run_that_is_killed_does_not_stop_the_others_and_is_resumed(tmp_path: Path) -> None:
    words = [*LONG, "seed=0,1"]
    process = start(tmp_path, *words, "--json")
    os.kill(hold(process, tmp_path / "out" / "seed=0"), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    cells = json.loads(out)["cells"]
    assert process.returncode == 1
    assert [cell["status"] for cell in cells] == ["killed", "finished"]
    assert cells[0]["reason"] == "killed by SIGKILL" and cells[0]["steps"] >= 4
    assert RunHistory.read(tmp_path / "out" / "seed=0").status == "killed"
    done = sweep(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "$ blt resume" in (tmp_path / "out" / "logs" / "seed=0.log").read_text()
    assert "$ blt resume" not in (tmp_path / "out" / "logs" / "seed=1.log").read_text()
    whole(tmp_path / "out" / "seed=0")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_leaves_checkpoints_and_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    words = [*LONG, "seed=0,1,2", "--jobs", "2"]
    process = start(tmp_path, *words)
    held = [hold(process, tmp_path / "out" / name) for name in ("seed=0", "seed=1")]
    process.send_signal(number)
    for child in held:
        os.kill(child, signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err and "to continue, repeat the command" in err
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["interrupted", "interrupted", "waiting"]
    assert not (tmp_path / "out" / "seed=2").exists()
    for name in ("seed=0", "seed=1"):
        assert RunHistory.read(tmp_path / "out" / name).status == "interrupted"
    if number == signal.SIGINT:
        done = sweep(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        for name in ("seed=0", "seed=1", "seed=2"):
            whole(tmp_path / "out" / name)


@needs_proc
def test_the_runs_of_a_killed_sweep_are_waited_for(tmp_path: Path) -> None:
    words = [*LONG, "seed=0,1"]
    process = start(tmp_path, *words)
    child = hold(process, tmp_path / "out" / "seed=0")
    process.kill()
    again = start(tmp_path, *words)
    assert again.stderr is not None
    assert again.stderr.readline().startswith("seed=0: still running in another process")
    os.kill(child, signal.SIGCONT)
    # The child holds the pipes of the sweep that was killed.
    process.communicate(timeout=60)
    _, told = again.communicate(timeout=180)
    assert again.returncode == 0, told
    for name in ("seed=0", "seed=1"):
        whole(tmp_path / "out" / name)
        assert (tmp_path / "out" / "logs" / f"{name}.log").read_text().count("$ blt") == 1


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = sweep(tmp_path, *QUICK, "seed=0,1")
    assert done.returncode == 2 and "in use by another sweep" in done.stderr


def test_processors_are_divided_unless_the_user_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace
    from typing import cast

    from bltoolbox.training.sweep import jobs as sweep_jobs

    def threads(jobs: int, cells: int) -> str | None:
        sweep = SimpleNamespace(cells=[SimpleNamespace(state=None)] * cells)
        made = sweep_jobs.Jobs(cast(Any, sweep), jobs, (), cast(Any, None))
        return made._environment().get("OMP_NUM_THREADS")

    monkeypatch.setattr(sweep_jobs, "processors", lambda: 8)
    assert threads(2, 9) == "1", "as the user says"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads(2, 9), threads(3, 9), threads(16, 9), threads(4, 2)) == ("4", "2", "1", "4")
    assert threads(1, 9) is None and threads(4, 1) is None


def test_a_terminal_gets_a_line_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from bltoolbox.cli.display.sweep import Display
    from bltoolbox.training.sweep.grid import Cell
    from bltoolbox.training.sweep.plan import Planned, State

    budget = {"budget": {"steps": 10}}
    cells = [Planned(Cell(f"seed={k}", {}, []), budget, tmp_path / str(k)) for k in range(30)]
    cells[7].state = State.RUNNING
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "metrics.jsonl").write_text(
        '{"step": 5, "computations": 9, "validation_psnr": 27.125}\n{"st'
    )
    display = Display(quiet=False)
    display.height = 12
    stream = io.StringIO()
    Console(file=stream, width=80).print(display._picture(cells))
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["seed=7", "running", "50", "%", "step", "5", "27.12", "dB"]
    assert lines[-1] == "30 cells: 29 waiting, 1 running" and len(lines) == 10
