"""Which files ``blt apply`` restores, and where the results go. Without torch."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bltoolbox.config.names import refuse_unusable_name
from bltoolbox.errors import UsageError
from bltoolbox.restoration.pictures.files import FORMATS, is_picture
from bltoolbox.restoration.pictures.images import SUFFIXES, ImageError, opened

#: What the name of a result ends with.
MARK = "-restored"


@dataclass(frozen=True)
class Job:
    """One file and its result; ``trouble`` says why nothing can be done, ``refused`` that a file is in the way."""

    source: Path
    target: Path
    trouble: str = ""
    refused: bool = False


def plan(inputs: Sequence[str], out: str | None, force: bool) -> tuple[list[Job], list[str]]:
    """A job for each picture, in the order of the inputs, and notes for the user."""
    sources, troubles, notes = _expand(inputs)
    target = _target(out, len(sources) + len(troubles))
    jobs = [_job(source, target, force) for source in sources]
    jobs += [Job(Path(name), Path(name), trouble) for name, trouble in troubles]
    taken: dict[Path, Path] = {}
    for job in jobs:
        if not job.trouble and (other := taken.setdefault(job.target, job.source)) != job.source:
            raise UsageError(
                f"{other} and {job.source} would both become {job.target}; restore them one by one"
            )
    if not jobs:
        raise UsageError(f"there is no picture in {', '.join(inputs)}")
    return jobs, notes


def _expand(inputs: Sequence[str]) -> tuple[list[Path], list[tuple[str, str]], list[str]]:
    pictures: list[Path] = []
    troubles: list[tuple[str, str]] = []
    notes: list[str] = []
    for name in inputs:
        if not name:
            raise UsageError("an empty name is not a picture; check for an unset shell variable")
        path = Path(name).expanduser()
        if os.path.isdir(path):
            if not os.access(path, os.R_OK | os.X_OK):
                troubles.append((name, f"{name} cannot be read"))
                continue
            some = sorted(match for match in path.iterdir() if match.is_file() and is_picture(match))
        elif not os.path.exists(path) and glob.has_magic(name):
            matches = (Path(match) for match in glob.glob(str(path), recursive=True))
            some = sorted(match for match in matches if match.is_file() and is_picture(match))
            if not some:
                troubles.append((name, f"no picture matches {name}"))
        else:
            pictures.append(path)
            continue
        results = [match for match in some if match.stem.endswith(MARK)]
        if results:
            notes.append(f"{len(results)} files in {name} are already results ({MARK}) and are skipped")
        pictures += [match for match in some if match not in results]
    once: dict[str, Path] = {}
    for path in pictures:
        once.setdefault(os.path.realpath(path), path)
    return list(once.values()), troubles, notes


def _target(out: str | None, count: int) -> Path | None:
    """The file or the folder that was asked for."""
    if out is None:
        return None
    path = Path(out).expanduser()
    refuse_unusable_name(path)
    if os.path.isdir(path) or out.endswith(("/", os.sep)):
        return path
    suffix = path.suffix.lower()
    if suffix in SUFFIXES and suffix not in FORMATS:
        raise UsageError(f"{out}: {suffix} files cannot be written; use {', '.join(sorted(FORMATS))}")
    if suffix in FORMATS and count > 1:
        raise UsageError(f"{out} is one file, but there are {count} pictures; give a folder")
    if suffix not in FORMATS and os.path.exists(path):
        raise UsageError(f"{out} is a file but not a picture; give a folder or a picture")
    return path


def _job(source: Path, out: Path | None, force: bool) -> Job:
    try:
        return _planned(source, out, force)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        return Job(source, source, f"{source}: {error.strerror or error}")


def _planned(source: Path, out: Path | None, force: bool) -> Job:
    if out is not None and out.suffix.lower() in FORMATS and not out.is_dir():
        target = out
    else:
        suffix = source.suffix if source.suffix.lower() in FORMATS else ".png"
        target = (source.parent if out is None else out) / f"{source.stem}{MARK}{suffix}"
    if not source.exists():
        return Job(source, target, f"there is no file {source}")
    if target.is_dir():
        return Job(source, target, f"{target} is a folder", refused=True)
    if target.exists() and not force:
        return Job(source, target, f"{target} exists; choose another name, or replace it with --force", True)
    return Job(source, target)


def find_truth(source: Path, truth: Path) -> Path | None:
    """The picture to compare with: the file itself, or the one in a folder with the same name, or stem."""
    if not truth.is_dir():
        return truth
    if (same := truth / source.name).is_file():
        return same
    alike = sorted(path for path in truth.iterdir() if path.stem == source.stem and is_picture(path))
    return alike[0] if alike else None


def count_pixels(path: Path) -> int:
    """Of a picture, from the first bytes of its file; 0 if they cannot be read, which is reported later."""
    with contextlib.suppress(ImageError), opened(path) as image:
        return image.width * image.height
    return 0
