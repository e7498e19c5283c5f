"""Restores one picture file: what ``blt apply`` does to each file."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bltoolbox.errors import BltError
from bltoolbox.restoration.layout import LUMA
from bltoolbox.restoration.metrics import UNIT, ImageMetric
from bltoolbox.restoration.noise_choice import correlation_note
from bltoolbox.restoration.pictures.files import FORMATS, Picture, read_picture, write_picture
from bltoolbox.restoration.pictures.images import ImageError
from bltoolbox.restoration.pictures.jobs import Job, find_truth
from bltoolbox.restoration.tiles import Progress, Report, Restorer


@dataclass
class Outcome:
    """The outcome for a file; unknown values are None."""

    input: str
    output: str
    status: str = "failed"
    error: str | None = None
    height: int | None = None
    width: int | None = None
    kind: str | None = None
    noise: float | None = None
    noise_estimated: bool | None = None
    tiles: int | None = None
    overlap: int | None = None
    seam: float | None = None
    iterations: int | None = None
    #: The certified root mean square distance to the exact minimiser.
    distance: float | None = None
    seconds: float | None = None
    #: Each metric by name, of the picture as it was and as it is restored.
    before: dict[str, float | None] = field(default_factory=dict)
    after: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        facts = {key: value for key, value in asdict(self).items() if key not in ("before", "after")}
        return facts | {f"{name}_before": value for name, value in self.before.items()} | self.after


def apply_to(
    job: Job,
    restorer: Restorer,
    noise: float | str | None,
    truth: Path | None,
    metrics: Sequence[ImageMetric],
    progress: Progress | None = None,
) -> Outcome:
    """Restore one file; any problem is reported in the outcome."""
    unknown = dict.fromkeys(metric.name for metric in metrics)
    outcome = Outcome(str(job.source), str(job.target), before={**unknown}, after={**unknown})
    if job.trouble:
        outcome.error = job.trouble
        return outcome
    started = time.perf_counter()
    try:
        if progress:
            progress(0.0, "reading")
        picture = read_picture(job.source)
        height, width = picture.colours.shape[:2]
        outcome.height, outcome.width, outcome.kind = height, width, picture.kind
        colours, reports = _restored(restorer, picture, noise, progress)
        if picture.alpha is not None and colours.shape[:2] != (height, width):
            raise BltError("the operator changes the size, so the transparency of the picture does not fit")
        outcome.height, outcome.width = colours.shape[:2]
        _note(outcome, picture, reports)
        if progress:
            progress(1.0, "writing")
        job.target.parent.mkdir(parents=True, exist_ok=True)
        outcome.notes += write_picture(job.target, replace(picture, colours=colours))
        if job.source.suffix.lower() not in FORMATS:
            outcome.notes.append(f"{job.source.suffix or 'its format'} cannot be written, so it becomes PNG")
        outcome.status = "restored"
        outcome.seconds = time.perf_counter() - started
        if truth is not None:
            _compare(outcome, picture, colours, truth, metrics)
    except ImageError as error:
        outcome.error = str(error)
    except BltError as error:
        outcome.error = f"{job.source}: {error}"
    except (MemoryError, torch.OutOfMemoryError):
        outcome.error = f"{job.source} does not fit into memory"
    except OSError as error:
        outcome.error = f"{error.filename or job.target}: {error.strerror or error}"
    return outcome


def _restored(
    restorer: Restorer, picture: Picture, noise: float | str | None, progress: Progress | None
) -> tuple[NDArray[Any], list[Report]]:
    colours = picture.colours
    if picture.kind != "cmyk" or restorer.channels == 1:
        restored, report = restorer.run(colours, noise, progress)
        return restored, [report]
    # Three inks are an image in three colours, and black is one in gray; so inks are never mixed.
    inks, report = restorer.run(np.ascontiguousarray(colours[..., :3]), noise, _half(progress, 0))
    black = np.ascontiguousarray(colours[..., 3:])
    if black.min() == black.max() and inks.shape[:2] == black.shape[:2]:
        return np.concatenate([inks, black], axis=2), [report]
    black, other = restorer.run(black, noise, _half(progress, 1))
    return np.concatenate([inks, black], axis=2), [report, replace(other, notes=())]


def _half(progress: Progress | None, number: int) -> Progress | None:
    """The progress of one of two halves of the work."""
    return None if progress is None else lambda part, phase: progress((number + part) / 2, phase)


def _note(outcome: Outcome, picture: Picture, reports: Sequence[Report]) -> None:
    outcome.noise, outcome.noise_estimated = reports[0].noise, reports[0].estimated
    outcome.tiles = reports[0].tiles
    outcome.overlap = reports[0].overlap
    outcome.seam = max(report.seam for report in reports)
    outcome.iterations = sum(report.iterations for report in reports)
    distances = [report.distance for report in reports if report.distance is not None]
    outcome.distance = max(distances) if len(distances) == len(reports) else None
    outcome.notes += [*picture.notes, *(note for report in reports for note in report.notes)]
    if picture.format == "JPEG" and reports[0].estimated and reports[0].noise is not None:
        note = correlation_note(picture.colours, reports[0].noise)
        outcome.notes += [] if note is None else [note]


def _compare(
    outcome: Outcome,
    picture: Picture,
    colours: NDArray[Any],
    truth: Path,
    metrics: Sequence[ImageMetric],
) -> None:
    path = find_truth(picture.path, truth)
    if path is None:
        outcome.error = f"{truth} contains no picture named {picture.path.stem} to compare with"
        return
    other = read_picture(path)
    if "cmyk" in (picture.kind, other.kind) and picture.kind != other.kind:
        outcome.error = f"{path} cannot be compared: one of the two pictures is CMYK"
        return
    expected = _alike(other.colours, colours.shape[2])
    if expected.shape != colours.shape:
        sizes = ["×".join(map(str, image.shape[1::-1])) for image in (expected, colours)]
        outcome.error = f"{path} cannot be compared: it is {sizes[0]} and the result {sizes[1]}"
        return
    for metric in metrics:
        if picture.colours.shape == expected.shape:
            outcome.before[metric.name] = _finite_or_none(metric.of(picture.colours, expected, UNIT))
        outcome.after[metric.name] = _finite_or_none(metric.of(colours, expected, UNIT))


def _alike(truth: NDArray[Any], channels: int) -> NDArray[Any]:
    """Gray in all channels, or the luma of colours, where the other picture has it so."""
    if truth.shape[2] == channels or truth.shape[2] not in (1, 3):
        return truth
    if truth.shape[2] == 1:
        return np.repeat(truth, channels, axis=2)
    top = np.iinfo(truth.dtype).max if truth.dtype.kind == "u" else 1
    return (truth @ np.array(LUMA) / top)[..., None]


def _finite_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
