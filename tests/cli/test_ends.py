"""However a command is ended from outside (a signal at any moment, a reader that goes away), it ends quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bltoolbox.distributed import signals

BLT = [sys.executable, "-m", "bltoolbox"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
pytestmark = pytest.mark.usefixtures("new_processes")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """A command that has come to its first line: before it, signals are Python's own business."""
    process = subprocess.Popen(
        [*BLT, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1):  # Python itself does not catch this one
            break
        time.sleep(0.001)
    return process


def check_end(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Send a signal; whether it came in time."""
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert "Traceback" not in said and "rror" not in said, said
    # Once Python has put its signal handlers away, it is the signal that ends the process; a shell calls it the same.
    assert process.returncode in (0, CODES[number], -number), said
    assert not said or "interrupted" in said
    return process.returncode != 0


COMMANDS = (["list"], ["validate", "smoke"], ["run", "smoke", "-o", "run", "--overwrite", "--quiet"])
DELAYS = ([0.0, 0.1], [0.0, 0.2], [0.5, 1.0])


@linux
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(("command", "delays"), list(zip(COMMANDS, DELAYS, strict=True)))
def test_a_signal_during_start_up_ends_quietly(
    command: list[str], delays: list[float], number: signal.Signals, tmp_path: Path
) -> None:
    for delay in delays:
        process = start(*command, cwd=tmp_path)
        time.sleep(delay)
        check_end(process, number)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_signal_at_any_moment_ends_quietly(
    command: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    stopped = 0
    for tenth in range(31):
        process = start(*command, cwd=tmp_path)
        time.sleep(tenth / 10)
        stopped += check_end(process, number)
    assert stopped > 1


def test_a_signal_that_comes_with_the_handlers_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def installed(number: int, handler: Callable[..., object]) -> object:
        before = install(number, handler)
        if number == signal.SIGTERM and callable(handler):
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    monkeypatch.setattr(signals.signal, "signal", installed)
    with signals.handled(), pytest.raises(signals.Interrupted), signals.allowed():
        pass


def test_a_signal_after_the_last_computation_is_not_forgotten() -> None:
    """The results are complete, and what follows in a script does not start."""
    finished = False
    with pytest.raises(signals.Interrupted) as stop, signals.handled():
        with signals.allowed():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        finished = True
    assert finished and stop.value.exit_code == 130


def shell(line: str, **options: object) -> subprocess.CompletedProcess[str]:
    blt = f"'{sys.executable}' -m bltoolbox"
    return subprocess.run(
        ["bash", "-c", line.replace("blt ", f"{blt} ")],
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    """The exit code is that of any program whose output is not read."""
    done = shell("blt list | true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("line", ["blt list >/dev/full", "blt list --json >/dev/full"])
def test_output_that_cannot_be_written_is_an_error(line: str) -> None:
    done = shell(line)
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("blt list >&-", 0),
        ("blt list 2>&-", 0),
        ("blt list <&- >&- 2>&-", 0),
        ("blt validate no-such 2>&-", 2),
        pytest.param(
            "blt validate no-such 2>/dev/full",
            2,
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full"),
        ),
    ],
)
def test_closed_streams_change_nothing(line: str, code: int) -> None:
    done = shell(line)
    assert (done.returncode, done.stderr) == (code, "")
