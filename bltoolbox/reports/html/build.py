"""Writes ``report.html``: for a run that has just finished, or for run directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bltoolbox.config.names import REPORT_FILE, refuse_unusable_name
from bltoolbox.errors import BltError, UsageError
from bltoolbox.runs.files import write_text
from bltoolbox.runs.history import RunHistory, expand
from bltoolbox.runs.labels import given_labels

if TYPE_CHECKING:
    from bltoolbox.config.registry import Registry
    from bltoolbox.restoration.results import RunResult

#: Evaluation images of each run on a page, and runs beyond which there are none.
IMAGES = 4
_MAX_RUNS = 24


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    force: bool = False,
    images: int = IMAGES,
    registry: Registry | None = None,
    labels: Sequence[str] = (),
) -> list[str]:
    """Write the page about some runs or sweeps to ``out``; returns notes for its readers."""
    from bltoolbox.reports.html.facts import gather
    from bltoolbox.reports.html.page import build_page
    from bltoolbox.reports.html.pictures import Pictures, collect

    refuse_unusable_name(out)
    if out.exists() and not force:
        raise UsageError(f"{out} exists; choose another file with -o or add --force")
    paths, missing = expand(directories)
    if not paths:
        raise UsageError("nothing to report: none of the runs has been started")
    runs = gather([RunHistory.read(path) for path in paths], given_labels(labels, paths))
    if len(runs) > _MAX_RUNS:
        missing.append(f"images and filters are shown for at most {_MAX_RUNS} runs; there are {len(runs)}")
        pictures = [Pictures() for _ in runs]
    else:
        pictures = [collect(facts.run, images, registry) for facts in runs]
    _save(out, build_page(runs, pictures, missing))
    several = len(runs) > 1
    notes = [
        f"{facts.label}: {note}" if several else note
        for facts, seen in zip(runs, pictures, strict=True)
        for note in [*facts.notes(), *seen.notes]
    ]
    return [*missing, *notes]


def report_result(path: Path, result: RunResult) -> None:
    """The page of a run that has just finished, from its result: nothing is computed for it."""
    from bltoolbox.reports.html.facts import gather
    from bltoolbox.reports.html.page import build_page
    from bltoolbox.reports.html.pictures import collect, keep_scenes
    from bltoolbox.restoration.model import Model

    keep_scenes(result, path)
    runs = gather([RunHistory.read(path)])
    model = result.model if isinstance(result.model, Model) else None
    _save(path / REPORT_FILE, build_page(runs, [collect(runs[0].run, IMAGES, model=model)], []))


def _save(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise BltError(f"cannot write {path}: {error.strerror or error}") from error
