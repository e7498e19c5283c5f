"""Guides in the documentation, whose files are written and whose commands are run exactly as they stand."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from preloaded import is_serving, serving

FENCE = re.compile(
    r"(<!-- not run -->\n)?^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
#: ``blt`` as the reader has it.
BLT = '#!/bin/sh\nexec "{python}" -m bltoolbox "$@"\n'


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str
    text: str
    skipped: bool


def blocks(guide: Path) -> list[Block]:
    text = guide.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start()) + 1, match[2], match[3] or "", match[4], bool(match[1]))
        for match in FENCE.finditer(text)
    ]


def follow(guide: Path, tools: Path, folder: Path, python: str, *, forked: bool = True) -> str:
    """Write the files of a guide and run its commands, in order; ``tools`` has blt, python and pip. What they say.

    Lines that are simply ``blt …`` are forked from a process of ``python`` that has imported torch, if ``forked``.
    Where ``python`` is that of the tests, it is the one that forks their commands.
    """
    output = ""
    with contextlib.ExitStack() as stack:
        if forked and python != sys.executable:
            stack.enter_context(serving(python, variables(tools)))
        for block in blocks(guide):
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "sh" and not block.skipped:
                if "pip install" in block.text:
                    stack.close()  # only new processes see what is installed from here on
                output += _run(guide, block, tools, folder, python)
    return output


def add_script(path: Path, script: str, python: str) -> None:
    """A script that calls ``python``."""
    path.write_text(script.format(python=python))
    path.chmod(0o755)


def _run(guide: Path, block: Block, tools: Path, folder: Path, python: str) -> str:
    """A block of commands, each of which must succeed."""
    output = ""
    for command in _commands(block, python):
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables(tools),
            text=True,
            encoding="utf-8",
            capture_output=True,
            timeout=300,
        )
        output += done.stdout + done.stderr
        assert done.returncode == 0, (
            f"{guide.name}:{block.line}: exit code {done.returncode}\n{block.text}\n{output}"
        )
    return output


def _commands(block: Block, python: str) -> list[list[str]]:
    """A block as one script for the shell, or line by line where commands can be forked."""
    shell = ["bash", "-euo", "pipefail", "-c"]
    if not is_serving(python) or re.search(r"\\\n|<<|^\s", block.text, re.MULTILINE):
        return [[*shell, block.text]]
    names = {"blt": [python, "-m", "bltoolbox"], "python": [python]}
    return [
        [*names[line.split()[0]], *shlex.split(line)[1:]]
        if re.fullmatch(r"(blt|python) [^|&;<>$`*?~#]+", line)
        else [*shell, line]
        for line in block.text.splitlines()
    ]


def variables(tools: Path) -> dict[str, str]:
    """The environment of a reader, with ``tools`` first on the path."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BLT_"))}
    return inherited | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "BLT_CACHE": os.environ["BLT_CACHE"],
        "OMP_NUM_THREADS": "1",
    }
