"""Commands called in this process, for tests that read what they say."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from bltoolbox.cli import main

Result = subprocess.CompletedProcess[str]
Call = Callable[..., Result]


def caller(command: str, capfd: pytest.CaptureFixture[str]) -> Call:
    """Calls ``blt command …``, or ``blt …`` if it is empty: its exit code and output, which is never a traceback."""

    def call(*arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as done:
            main([command, *arguments] if command else arguments)
        result = subprocess.CompletedProcess(arguments, int(done.value.code or 0), *capfd.readouterr())
        assert "Traceback" not in result.stdout + result.stderr
        return result

    return call
