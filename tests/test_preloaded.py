"""Commands that are forked from a process with everything imported behave like those that start by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preloaded
import pytest
from preloaded import BLT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")

PLUGIN = """
import os, sys
from pathlib import Path
def seen(path):
    return [part.decode() for part in Path(path).read_bytes().rstrip(b"\\0").split(b"\\0")]
def numbers():
    return sorted(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}"))
own = sorted(line for line in seen("/proc/self/environ") if line.startswith("OWN="))
print(os.getcwd(), sys.argv[1:], sys.orig_argv[1:], seen("/proc/self/cmdline")[1:], own, os.environ["OWN"])
print(os.getppid(), os.getpgid(0) == os.getpid(), sys.stdin.read(), numbers(), sys.path[0], file=sys.stderr)
def bltoolbox_components():
    return []
"""


def test_a_fork_sees_what_a_new_process_sees(tmp_path: Path) -> None:
    (tmp_path / "spy.py").write_text(PLUGIN)
    said = []
    for start in (preloaded.Popen, preloaded.Popen.__base__):
        assert start is not None
        process: subprocess.Popen[str] = start(
            [*BLT, "list", "--plugin", "spy.py", "--json"],
            cwd=tmp_path,
            env=os.environ | {"OWN": "mine"},
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said.append((*process.communicate("input", timeout=60), process.returncode))
    forked, new = said
    assert forked == new
    assert forked[2] == 0 and str(os.getpid()) in forked[1] and "input" in forked[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_fork_is_a_child_that_signals_reach(number: signal.Signals, tmp_path: Path) -> None:
    command = [
        *BLT,
        "run",
        "smoke",
        "budget={steps: 100000}",
        "evaluation=",
        "-q",
        "-o",
        str(tmp_path / "run"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = tmp_path / "run" / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -number)


def test_what_is_read_while_python_starts_needs_a_new_process() -> None:
    server = preloaded._server(sys.executable)
    assert server is not None
    streams = [0, 1, 2]
    assert server.can(os.environ | {"BLT_CACHE": "other", "PYTHONPATH": "other"}, streams)
    for variables in (
        {"OMP_NUM_THREADS": "2"},
        {"PYTHONUTF8": "0"},
        {"LC_ALL": "C"},
        {"MALLOC_ARENA_MAX": "1"},
    ):
        assert not server.can(os.environ | variables, streams)
    ours, theirs = os.openpty()
    assert not server.can(os.environ, [ours, 1, 2])
    os.close(ours)
    os.close(theirs)
