"""Commands that are forked from a process with everything imported behave like those that start by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
from preloaded import BLT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")

PLUGIN = """
import os, sys
from pathlib import Path
def seen(path):
    return [part.decode() for part in Path(path).read_bytes().rstrip(b"\\0").split(b"\\0")]
def _open():
    return sorted(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}"))
own = sorted(line for line in seen("/proc/self/environ") if line.startswith("OWN="))
print(os.getcwd(), sys.argv[1:], sys.orig_argv[1:], seen("/proc/self/cmdline")[1:], own, os.environ["OWN"])
print(os.getppid(), os.getpgid(0) == os.getpid(), sys.stdin.read(), _open(), sys.path[0], file=sys.stderr)
def bltoolbox_components():
    return []
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["forked", "new"])
def popen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways; a command that is not forked where it should be fails."""
    if request.param == "new":
        request.getfixturevalue("new_processes")
    else:
        monkeypatch.setattr(preloaded, "_START", None, raising=False)
    return request.param


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
