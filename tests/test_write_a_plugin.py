"""The guide for authors of plugins: its files are written and its commands run, in order, exactly as they stand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import ROOT
from environments import Environment, make_environment
from guides import BLT, add_script, blocks, follow

GUIDE = ROOT / "docs" / "write-a-plugin.md"

#: ``pip`` as the reader has it, but it builds with what is there and downloads nothing.
PIP = """#!/bin/sh
[ "$1 $2" = "install -e" ] || {{ echo "pip: only install -e PATH is known here" >&2; exit 2; }}
exec "{python}" -m pip install --quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check "$3"
"""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = make_environment(tmp_path / "env", with_toolbox=True)
    for name, script in (("blt", BLT), ("pip", PIP)):
        add_script(Path(made.python).with_name(name), script, made.python)
    return made


@pytest.mark.skipif(os.name == "nt", reason="the guide speaks to a POSIX shell")
@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_guide_works_as_it_stands(forked: bool, environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "an empty folder"
    folder.mkdir()
    tools = Path(environment.python).parent
    output = follow(GUIDE, tools, folder, environment.python, forked=forked)
    assert "exit code 3" in output, "the recipe that is wrong on purpose is refused"
    assert "regularizer.nu: expected a number greater than 0" in output
    assert re.search(r"curvature-prior\s+ok\s+regularizer/curvature", output), output
    assert "[project.entry-points.bltoolbox]\ncurvature-prior" in (
        folder / "curvature-prior" / "pyproject.toml"
    ).read_text(encoding="utf-8")


def test_nothing_of_the_guide_is_overlooked() -> None:
    found = blocks(GUIDE)
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
    first = next(block for block in blocks(GUIDE) if block.title == "curvature.py")
    assert len(first.text.partition('"""\n\n')[2].splitlines()) < 45
