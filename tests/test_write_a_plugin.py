"""The guide for authors of plugins: its files are written and its commands run, in order, exactly as they stand."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT
from environments import Environment, make_environment
from preloaded import is_serving, serving

GUIDE = ROOT / "docs" / "write-a-plugin.md"
FENCE = re.compile(
    r"(<!-- not run -->\n)?^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)

#: ``blt`` and ``pip`` as the reader has them; this pip builds with what is there and downloads nothing.
BLT = '#!/bin/sh\nexec "{python}" -m bltoolbox "$@"\n'
PIP = """#!/bin/sh
[ "$1 $2" = "install -e" ] || {{ echo "pip: only install -e PATH is known here" >&2; exit 2; }}
exec "{python}" -m pip install --quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check "$3"
"""


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    title: str
    text: str
    skipped: bool


def blocks() -> list[Block]:
    guide = GUIDE.read_text(encoding="utf-8")
    return [
        Block(guide.count("\n", 0, found.start()) + 1, found[2], found[3] or "", found[4], bool(found[1]))
        for found in FENCE.finditer(guide)
    ]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = make_environment(tmp_path / "env", with_toolbox=True)
    for name, script in (("blt", BLT), ("pip", PIP)):
        path = Path(made.python).with_name(name)
        path.write_text(script.format(python=made.python))
        path.chmod(0o755)
    return made


def variables(environment: Environment) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BLT_"))}
    return inherited | {
        "PATH": f"{Path(environment.python).parent}{os.pathsep}{os.environ['PATH']}",
        "BLT_CACHE": os.environ["BLT_CACHE"],
        "OMP_NUM_THREADS": "1",
    }


def commands(block: Block, environment: Environment) -> list[list[str]]:
    """A block as one script for the shell, or line by line, so that what is simply ``blt …`` can be forked."""
    shell = ["bash", "-euo", "pipefail", "-c"]
    if not is_serving(environment.python) or "\\\n" in block.text:
        return [[*shell, block.text]]
    return [
        [environment.python, "-m", "bltoolbox", *shlex.split(line)[1:]]
        if re.match(r"blt [^|&;<>$`*?~]+$", line)
        else [*shell, line]
        for line in block.text.splitlines()
    ]


def run(block: Block, environment: Environment, folder: Path) -> str:
    """A block of commands, each of which must succeed; what they say."""
    said = ""
    for command in commands(block, environment):
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables(environment),
            text=True,
            encoding="utf-8",
            capture_output=True,
            timeout=300,
        )
        said += done.stdout + done.stderr
        assert done.returncode == 0, (
            f"{GUIDE.name}:{block.line}: exit code {done.returncode}\n{block.text}\n{said}"
        )
    return said


@pytest.mark.skipif(os.name == "nt", reason="the guide speaks to a POSIX shell")
@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_guide_works_as_it_stands(forked: bool, environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "an empty folder"
    folder.mkdir()
    said = ""
    with contextlib.ExitStack() as stack:
        if forked:
            stack.enter_context(serving(environment.python, variables(environment)))
        for block in blocks():
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "sh" and not block.skipped:
                if "pip install" in block.text:
                    stack.close()  # what is installed now is seen by new processes only
                said += run(block, environment, folder)
    assert "exit code 3" in said, "the recipe that is wrong on purpose is refused"
    assert "regularizer.nu: expected a number greater than 0" in said
    assert re.search(r"curvature-prior\s+ok\s+regularizer/curvature", said), said
    assert "[project.entry-points.bltoolbox]\ncurvature-prior" in (
        folder / "curvature-prior" / "pyproject.toml"
    ).read_text(encoding="utf-8")


def test_nothing_of_the_guide_is_overlooked() -> None:
    found = blocks()
    assert {block.language for block in found} <= {"python", "sh", "yaml", "toml"}, (
        "of a language that is not run"
    )
    for block in found:
        assert block.title or block.language in ("sh", "toml"), (
            f"line {block.line} would be neither run nor written"
        )
    skipped = [block.text for block in found if block.skipped]
    assert len(skipped) == 1 and "twine upload" in skipped[0], "only the upload is left out"


def test_the_first_plugin_is_short() -> None:
    first = next(block for block in blocks() if block.title == "curvature.py")
    assert len(first.text.partition('"""\n\n')[2].splitlines()) < 45
