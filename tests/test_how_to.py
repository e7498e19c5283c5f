"""The how-to pages: their files are written and their commands run as they stand, each page in an empty folder."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from guides import BLT, add_script, blocks, follow

PAGES = sorted(path for path in (ROOT / "docs" / "how-to").glob("*.md") if path.stem != "index")
#: Lines of a page beyond which it is no longer one task.
LONGEST = 90


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``blt`` and ``python``."""
    folder = tmp_path_factory.mktemp("bin")
    add_script(folder / "blt", BLT, sys.executable)
    add_script(folder / "python", '#!/bin/sh\nexec "{python}" "$@"\n', sys.executable)
    return folder


def psnr_rises(output: str) -> None:
    values = re.search(r"PSNR from ([0-9.]+) to ([0-9.]+) dB", output)
    assert values and float(values[2]) > float(values[1]) + 3, output


def learned_is_ahead(output: str) -> None:
    values = {
        name: float(value) for name, value in re.findall(r"^([\w -]+): ([0-9.]+) dB$", output, re.MULTILINE)
    }
    assert values["denoise-gray-foe"] > values["my method"] > values["noisy"], output


#: What the output of a page must show, beyond that every command succeeded.
CLAIMS: dict[str, Callable[[str], None]] = {
    "prior-elsewhere": psnr_rises,
    "compare-with-my-method": learned_is_ahead,
}


@pytest.mark.skipif(os.name == "nt", reason="the pages speak to a POSIX shell")
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_works_as_it_stands(page: Path, tools: Path, tmp_path: Path) -> None:
    output = follow(page, tools, tmp_path, sys.executable)
    CLAIMS.get(page.stem, lambda output: None)(output)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_and_nothing_of_it_is_overlooked(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST
    shown = blocks(page)
    assert [block for block in shown if block.language == "sh" and not block.skipped], "something is run"
    for block in shown:
        assert block.title or block.language == "sh", f"{page.name}:{block.line} is neither run nor written"
        # Only what needs a download or a cluster is shown without being run.
        if block.skipped:
            assert re.search(r"download|slurm|cuda|nproc", block.text), f"{page.name}:{block.line} is not run"
