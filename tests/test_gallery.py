"""The gallery: every page is that of its script, with small pictures; the scripts themselves are run with -m slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from docs.generate.gallery import FOLDER, LARGEST, cells, index, run, scripts

SCRIPTS = scripts()
FENCE = re.compile(r"^```python\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def test_there_are_enough_and_the_tutorial_is_one() -> None:
    assert len(SCRIPTS) >= 8
    assert "tutorial" in {script.stem for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_shows_its_script(script: Path) -> None:
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    shown = cells(script.read_text(encoding="utf-8"))
    assert FENCE.findall(page) == [cell.text for cell in shown if cell.is_code], "run make gallery"
    for cell in shown:
        assert cell.is_code or cell.text in page, "run make gallery"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_its_pictures_are_there_and_small(script: Path) -> None:
    page = script.with_suffix(".md").read_text(encoding="utf-8")
    named = re.findall(r"\]\(([\w-]+\.png)\)", page)
    assert named, "a picture"
    assert sorted(named) == sorted(path.name for path in FOLDER.glob(f"{script.stem}-*.png"))
    for name in named:
        assert (FOLDER / name).stat().st_size <= LARGEST, name


def test_the_index_names_them_all() -> None:
    assert (FOLDER / "index.md").read_text(encoding="utf-8") == index(), "run make gallery"
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *(script.stem for script in SCRIPTS)}


def test_a_script_becomes_a_page(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(
        "# %% [markdown]\n# # Small\n#\n# Some text.\n# %%\nprint(6 * 7)\n"
        "# %%\nfrom matplotlib.figure import Figure\n\nFigure()\n"
    )
    page = run(script, tmp_path)
    assert "# Small\n\nSome text.\n\n```python\nprint(6 * 7)\n```\n\n```text\n42\n```\n" in page
    assert page.endswith("![Small](small-1.png)\n")
    assert (tmp_path / "small-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs(script: Path, tmp_path: Path) -> None:
    assert "```python" in run(script, tmp_path)
    assert list(tmp_path.glob("*.png"))


def test_make_runs_them() -> None:
    assert "docs.generate.gallery" in (ROOT / "Makefile").read_text()
