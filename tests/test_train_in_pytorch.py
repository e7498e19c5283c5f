"""The guide for loops of one's own: its files are written and run as they stand, and end where `iadam` ends."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from guides import BLT, add_script, blocks, follow

GUIDE = ROOT / "docs" / "train-in-pytorch.md"


@pytest.mark.skipif(os.name == "nt", reason="the guide speaks to a POSIX shell")
def test_both_loops_reach_what_iadam_reaches(tmp_path: Path) -> None:
    tools, folder = tmp_path / "bin", tmp_path / "an empty folder"
    tools.mkdir()
    folder.mkdir()
    add_script(tools / "blt", BLT, sys.executable)
    add_script(tools / "python", '#!/bin/sh\nexec "{python}" "$@"\n', sys.executable)
    output = follow(GUIDE, tools, folder, sys.executable)
    errors = {name: float(value) for name, value in re.findall(r"(\w+): squared error ([0-9.]+) per", output)}
    assert set(errors) == {"run", "oracle", "layer"}, output
    assert errors["oracle"] == pytest.approx(errors["run"], abs=2e-4), "the same steps"
    assert errors["layer"] == pytest.approx(errors["run"], rel=5e-3)
    noise = 256 * 0.1**2
    assert errors["run"] < 0.4 * noise, "there is something to reach"
    for name, most in (("network", 0.9), ("inpainting", 0.4)):
        found = re.search(rf"{name}: .*error from ([0-9.]+) to ([0-9.]+)", output)
        assert found and float(found[2]) < most * float(found[1]), output


def test_nothing_of_the_guide_is_overlooked() -> None:
    for block in blocks(GUIDE):
        assert block.title or block.language == "sh" or block.skipped, f"line {block.line} is not run"
    assert [block.line for block in blocks(GUIDE) if block.skipped] == [
        block.line for block in blocks(GUIDE) if "deepinv" in block.text
    ], "what needs deepinv is tested in tests/restoration/test_for_deepinv.py"
