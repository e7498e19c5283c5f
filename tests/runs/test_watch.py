"""``blt watch``: runs followed from their directories, whole or half written, by people and by scripts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Call, caller
from conftest import BLT
from test_compare import make_run

from bltoolbox.errors import UsageError
from bltoolbox.runs.history import glance
from bltoolbox.runs.logs import Tail
from bltoolbox.runs.watch import BLOCKS, Watched, newest, sparkline


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As a process that writes to the directory holds it."""
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def add_step(path: Path, step: int, **more: Any) -> None:
    record = {"step": step, "batch": 4, "computations": 100 * step, "loss": 10.0 / step, "tol": 0.5, **more}
    with (path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(record) + "\n")
    with (path / "timings.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, "seconds": 0.5 * step}) + "\n")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``blt watch`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller("watch", capfd)


# One look


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", (20.0, 25.0), finished=False)
    watched = Watched(path)
    with locked(path):
        add_step(path, 6, lower_iterations=3)
        one = watched.look()
    assert (one.state, one.step, one.computations, one.seconds) == ("running", 6, 600, 3.0)
    assert one.fraction == pytest.approx(0.6)
    assert one.left == pytest.approx(2.0), "four more steps of half a second"
    assert one.quality == {"test": [20.0, 25.0]} and one.last == {"batch": 4, "tol": 0.5}
    assert one.iterations == 25
    with locked(path):
        for step in range(7, 11):
            add_step(path, step)
        (path / "log.txt").write_text("    0.02 s  started\n   12.50 s  tuning the baseline\n")
        one = watched.look()
        assert (one.fraction, one.left, one.phase) == (1.0, None, "tuning the baseline")
    assert watched.look().state == "killed", "nobody holds it any more"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("interrupted", "interrupted"),
        ("failed: step 3: a NaN", "failed"),
        ("running", "killed"),
        (None, "unknown"),
    ],
)
def test_how_runs_end(tmp_path: Path, said: str | None, state: str) -> None:
    path = make_run(tmp_path / "run", finished=False)
    (path / "status.json").write_text(json.dumps({"status": said}) if said else "{")
    assert Watched(path).look().state == state


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.look() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.look() == [{"step": 1}]
    with path.open("a") as log:
        log.write('ep": 2}\nnothing\n[3]\n{"step": 4}\n')
    assert tail.look() == [{"step": 1}, {"step": 2}, {"step": 4}]
    # A resumed run cuts its logs and writes on.
    os.truncate(path, len('{"step": 1}\n'))
    assert tail.look() == [{"step": 1}]
    path.unlink()
    path.write_text('{"step": 7}\n' * 9)
    assert len(tail.look()) == 9


def test_hardly_anything_is_there(tmp_path: Path, here: Call) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").write_text("budget: 7\n")
    with locked(tmp_path / "run"):
        one = Watched(tmp_path / "run").look()
        assert (one.state, one.step, one.fraction, one.left) == ("starting", 0, 0.0, None)
        done = here("run", "--once")
    assert done.returncode == 0 and "run: starting, step 0, 0 %" in done.stdout


def test_sparklines() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == BLOCKS
    assert sparkline([3.0, 3.0], 8) == BLOCKS[3] * 2
    assert sparkline(list(range(800)), 8) == BLOCKS
    assert sparkline([1, 10, 100], 3, log=True) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert sparkline([-1, 0, 1], 3, log=True) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]


# The command


def test_a_finished_run_is_told_once(tmp_path: Path, here: Call) -> None:
    path = make_run(tmp_path / "run")
    (path / "images").mkdir()
    variants = [{"key": "measured", "psnr": 20.0}, {"key": "learned", "psnr": 27.5}]
    (path / "images" / "evaluation.json").write_text(json.dumps([{"label": "cat", "variants": variants}]))
    done = here("run")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.endswith("run: budget spent, step 10, 1,000 computations, 5.0 s, loss 1, test PSNR 27.00 dB")
    assert second == "  cat: 20.00 dB -> 27.50 dB"
    assert here("run", "--once").stdout == done.stdout


def test_json_is_one_look(tmp_path: Path, here: Call) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", finished=False)
    found = json.loads(here("one", "--json").stdout)
    assert (found["state"], found["fraction"], found["psnr_test"], found["loss"]) == (
        "finished",
        1.0,
        27.0,
        1.0,
    )
    assert found["summary"]["psnr_after"] == 27.0
    both = json.loads(here("one", "two", "--json").stdout)
    assert [one["state"] for one in both] == ["finished", "killed"]


def test_a_run_that_ended_badly_is_told(tmp_path: Path, here: Call) -> None:
    path = make_run(tmp_path / "run", finished=False)
    (path / "status.json").write_text('{"status": "failed: step 3: a NaN"}')
    done = here("run")
    assert done.returncode == 1 and done.stderr.endswith("run: failed: step 3: a NaN\n")
    assert here("run", "--once").returncode == 0


def test_without_a_name_the_newest_run_is_meant(tmp_path: Path, here: Call) -> None:
    assert here().returncode == 2
    with pytest.raises(UsageError, match="no run found under runs"):
        newest(Path("runs"))
    old, new = (make_run(tmp_path / "runs" / "denoise" / name) for name in ("b-old", "a-new"))
    for path in old.iterdir():
        os.utime(path, (1, 1))
    assert newest(tmp_path / "runs") == new
    with locked(old):
        assert newest(tmp_path / "runs") == old, "it goes on"
    assert "a-new" in here().stdout
    sweep = tmp_path / "runs" / "denoise" / "sweep"
    cell = make_run(sweep / "cell")
    (sweep / "sweep.json").write_text('{"cells": [{"name": "cell"}, {"name": "waiting"}]}')
    with locked(sweep), locked(cell):
        assert newest(tmp_path / "runs") == sweep
    assert here("runs/denoise/sweep").returncode == 0


def test_what_is_no_run_is_refused(tmp_path: Path, here: Call) -> None:
    assert here("nothing").returncode == 2
    assert "neither a run directory nor a sweep" in here(str(tmp_path)).stderr


def test_no_torch_is_imported(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    script = (
        "import sys; from bltoolbox.cli import main\n"
        "try: main(['watch', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "budget spent" in done.stdout


# Following


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", (20.0, 25.0), finished=False)
    command = [*BLT, "watch", str(path), "--every", "0.1"]
    with locked(path):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "running, step 5, 50 %" in process.stdout.readline()
        add_step(path, 6)
        with (path / "checks.jsonl").open("a") as log:
            log.write('{"step": 6, "computations": 600, "evaluation_psnr": 26.5}\n')
        assert "test PSNR 26.50 dB" in process.stdout.readline()
        (path / "status.json").write_text('{"status": "budget spent", "finished": true, "seconds": 3}')
    rest, complaints = process.communicate(timeout=30)
    assert process.returncode == 0 and complaints == ""
    assert "run: budget spent, step 6" in rest


def _read(terminal: int, until: str, seconds: float = 30) -> str:
    text, end = "", time.monotonic() + seconds
    while until not in text:
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 1 << 16).decode("utf-8", "replace")
            except OSError:
                break
    return text


def test_a_terminal_shows_curves_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one", finished=False), make_run(tmp_path / "two")
    for paths in ([one], [one, two]):
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        with locked(one):
            process = subprocess.Popen(
                [*BLT, "watch", *map(str, paths), "--every", "0.1"],
                stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            )  # fmt: skip
            os.close(theirs)
            text = _read(ours, "last step" if len(paths) == 1 else "2 runs: 1 running, 1 finished")
            assert "running" in text and BLOCKS[7] in text and "27.00" in text
            process.send_signal(signal.SIGINT)
            # Read before waiting: a terminal holds a few kilobytes, and the last picture may be larger.
            assert "Traceback" not in _read(ours, "\x1b[?25h"), "the cursor is shown again"
            assert process.wait(30) == 130
        os.close(ours)


@pytest.mark.parametrize("budget", ["much", 7, [1], None])
def test_a_budget_of_another_form_is_no_share(tmp_path: Path, budget: object) -> None:
    assert glance(tmp_path, {"budget": budget}).fraction == 0
