"""What a run says while it works: lines, carets, and an answer to Ctrl-C."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_report import TINY

from bltoolbox import load_recipe, run
from bltoolbox.cli.display.problems import described
from bltoolbox.config.registry import load_registry
from bltoolbox.errors import BltError, Problem, RecipeError
from bltoolbox.reports import progress
from bltoolbox.reports.progress import Log, Progress, clock
from bltoolbox.training.rehearsal import rehearse

QUICK = [*TINY, "baseline=null", "checkpoint.every=0"]


def test_lines_begin_with_the_run_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Log(verbose=False) as log:
        run(load_recipe("smoke", QUICK), out=tmp_path / "run", listeners=[log])
    lines = [line.split(maxsplit=1)[1] for line in capfd.readouterr().err.splitlines()]
    assert lines == [
        f"run directory: {tmp_path / 'run'}",
        "started: smoke on cpu, 4 training images",
        "budget spent after 4 steps",
    ]


def test_a_sign_of_life_while_a_step_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT", 0.1)
    recipe = load_recipe("smoke", QUICK)
    train = type("Four", (), {"__len__": lambda self: 4, "device": "cpu"})()
    with Log(verbose=False) as log:
        log.started(SimpleNamespace(recipe=recipe, run_dir=None, train=train))  # type: ignore[arg-type]
        log.stepped({"step": 3, "loss": 2.0, "computations": 50}, 1.0, 0.25)
        time.sleep(0.25)
        log.phase("evaluating the learned θ")
        time.sleep(0.25)
    said = capfd.readouterr().err
    assert "step 3, 25 % of the budget; loss 2  50 computations" in said
    assert "evaluating the learned θ; step 3" in said
    assert log.thread is not None and not log.thread.is_alive(), "nothing is said after the end"


def test_the_bar_fits_into_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(width=80, force_terminal=True, stderr=stderr)
    )
    bar = Progress()
    recipe = SimpleNamespace(budget=SimpleNamespace(computations=1e6))
    bar.started(SimpleNamespace(recipe=recipe, run_dir=None))  # type: ignore[arg-type]
    bar.quality = "PSNR 30.75 dB"
    bar.began -= 4000
    bar.stepped({"step": 1000, "loss": 12.3456, "computations": 123456}, 1.0, 0.1)
    bar.stepped({"step": 1001, "loss": 12.3456, "computations": 123456}, 1.0, 0.2)
    page = Console(width=300, record=True, file=io.StringIO())
    page.print(bar.bar.get_renderable())
    line = page.export_text().rstrip()
    assert "step 1001" in line and "left" in line and "PSNR 30.75 dB" in line and "\n" not in line
    assert len(line) <= 80, line


def test_times() -> None:
    assert [clock(seconds) for seconds in (4.6, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_carets_point_at_the_mistake() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("smoke", ["budget={steps: -3}"])
    message, source, caret = described(error.value).splitlines()
    assert message == str(error.value)
    assert source.strip() == "budget={steps: -3}" and source[caret.index("^")] == "-"
    assert caret.strip() == "^"


@pytest.mark.parametrize("column", [1, 50, 200])
def test_long_lines_are_cut_around_the_caret(column: int) -> None:
    text = "".join(chr(97 + k % 26) for k in range(200)) + "!"
    lines = described(RecipeError([Problem("wrong", "r.yaml", 1, column, text)])).splitlines()
    assert len(lines[1]) <= 80 and lines[1][lines[2].index("^")] == text[column - 1]


def test_a_position_that_is_not_in_the_line_has_no_caret() -> None:
    problem = Problem("wrong", "r.yaml", 3, 17, "short")
    assert described(RecipeError([problem])) == "r.yaml:3:17: wrong"
    assert "\x1b" not in described(RecipeError([Problem("wrong", column=4, source="\x1b[31mred")]))


def test_deep_validation_computes_a_sample(tmp_path: Path) -> None:
    facts = rehearse(load_recipe("smoke", QUICK), load_registry())
    assert facts["training"] == "4 images of 3×16×16" and facts["held out"] == "2 images of 3×16×16"
    assert facts["batches"] == "2 of 4 images per step, computed in 1 chunk"
    with pytest.raises(RecipeError, match="larger than"):
        rehearse(load_recipe("smoke", [*QUICK, "sampler.size=50"]), load_registry())
    plugin = tmp_path / "wide.py"
    plugin.write_text(
        "from bltoolbox.plugin import Component, Operator, hookimpl\n"
        "class Wide(Operator):\n"
        "    def apply(self, x, *_): return x\n"
        "    def adjoint(self, y, *_): return y[..., 1:]\n"
        "@hookimpl\n"
        "def blt_components(): return [Component('operator', 'wide', f'{__name__}:Wide', 'Wide.')]\n"
    )
    registry = load_registry([plugin])
    with pytest.raises(BltError):
        rehearse(load_recipe("smoke", [*QUICK, "operator=wide"], registry), registry)


def test_a_component_from_a_file_is_suggested() -> None:
    with pytest.raises(RecipeError, match=r"regularizer; .* add --plugin FILE.py \(blt list regularizer\)"):
        load_recipe("smoke", ["regularizer=xyz"])


def test_ctrl_c_is_acknowledged_and_a_second_one_does_not_wait() -> None:
    script = (
        "import time\n"
        "from bltoolbox.distributed.signals import handled\n"
        "with handled(answers=True):\n"
        "    print('ready', flush=True)\n"
        "    end = time.monotonic() + 60\n"
        "    while time.monotonic() < end: time.sleep(0.05)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert process.poll() is None, "it waits for a safe place"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.splitlines() == [
        "interrupting at the next safe place; Ctrl-C again stops at once",
        "interrupted at once",
    ]
