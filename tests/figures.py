"""Figures of runs in tests: files with the right names, since drawing takes longer than most runs of tests."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bltoolbox.runs.files import write_bytes

if TYPE_CHECKING:
    from bltoolbox.restoration.results import RunResult


@cache
def _picture() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (99, 120, 140)).save(buffer, "PNG")
    return buffer.getvalue()


def sketch(result: RunResult, folder: Path) -> list[Path]:
    """In place of ``bltoolbox.reports.figures.draw``, which ``drawn`` restores."""
    written = [folder / name for name in ("restored.png", "curves.png", "filters.png")]
    for path in written:
        write_bytes(path, _picture(), within=folder.parent)
    return written


@contextlib.contextmanager
def drawn() -> Iterator[None]:
    """Figures as users get them, for runs in this process."""
    from bltoolbox.reports.figures import draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bltoolbox.reports.writer.draw", draw)
        yield
