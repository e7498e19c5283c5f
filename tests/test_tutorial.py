"""The tutorial: its regularizer works as it stands on the page, and so does what it does from Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from bltoolbox import load_recipe
from bltoolbox.config.registry import load_registry
from bltoolbox.testing.conformance import check_component
from bltoolbox.training.assemble import assemble

TUTORIAL = ROOT / "docs" / "tutorial.md"


def snippet(title: str) -> str:
    pattern = rf'^```python title="{re.escape(title)}"\n(.*?)^```$'
    found = re.search(pattern, TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def test_the_regularizer_of_the_tutorial_trains_and_passes(tmp_path: Path) -> None:
    (tmp_path / "smooth.py").write_text(snippet("smooth.py"), encoding="utf-8")
    registry = load_registry([tmp_path / "smooth.py"])
    failed = [
        one
        for one in check_component(registry.get("regularizer", "smooth"), registry)
        if one.status == "failed"
    ]
    assert not failed
    settings = [
        "regularizer=smooth",
        "evaluation=null",
        "budget.steps=2",
        "data.count=8",
        "validation.count=2",
    ]
    result = assemble(load_recipe("smoke", [*settings, "sampler.size=2"], registry), registry).run()
    assert result.steps == 2


def test_its_picture_is_small() -> None:
    picture = ROOT / "docs" / "images" / "report.png"
    if not picture.is_file():
        pytest.fail("the picture of the report is missing")
    assert picture.stat().st_size < 400_000
