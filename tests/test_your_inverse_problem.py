"""The guide for an inverse problem of one's own: its files are written and its commands run as they stand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from guides import BLT, add_script, blocks, follow

from bltoolbox.config.recipe import load_recipe

GUIDE = ROOT / "docs" / "your-inverse-problem.md"


@pytest.mark.skipif(os.name == "nt", reason="the guide speaks to a POSIX shell")
def test_the_guide_works_as_it_stands(tmp_path: Path) -> None:
    tools, folder = tmp_path / "bin", tmp_path / "an empty folder"
    tools.mkdir()
    folder.mkdir()
    add_script(tools / "blt", BLT, sys.executable)
    add_script(tools / "python", '#!/bin/sh\nexec "{python}" "$@"\n', sys.executable)
    output = follow(GUIDE, tools, folder, sys.executable)
    assert "operator/motion" in output and "1 of 1 components conform" in output
    status = json.loads((folder / "run" / "status.json").read_text())
    assert status["psnr_after"] > status["psnr_before"] + 3, "the learned regularizer deblurs"
    assert status["psnr_after"] > status["psnr_initial"] + 1, "and learning is what makes the difference"
    assert len(list((folder / "restored").iterdir())) == 2
    assert "restored (1, 24, 24)" in output and "(0.0, 4095.0)" in output
    load_recipe(folder / "masks.yaml")


def test_nothing_of_the_guide_is_overlooked() -> None:
    for block in blocks(GUIDE):
        assert not block.skipped
        assert block.title or block.language == "sh", f"line {block.line} would be neither run nor written"


def test_the_operator_is_short() -> None:
    text = next(block.text for block in blocks(GUIDE) if block.title == "motion.py")
    methods = text[text.index("    def apply") : text.index("@hookimpl")]
    assert len([line for line in methods.splitlines() if line.strip()]) < 10
