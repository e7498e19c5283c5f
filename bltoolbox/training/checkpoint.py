"""Checkpoints: files that are either intact or refused, and the folder with the last two of them.

A file is a line of magic, a line with the SHA-256 of the rest, and a `torch.save` payload that is loaded with
``weights_only=True``: nothing in it can execute. A checkpoint is a manifest; the warm starts, which are most of its
bytes, are in segments that contain only the rows changed since the previous checkpoint. Two checkpoints are kept with
all segments they need, so that a damaged newest one costs at most the work between the two.

On several ranks each writes its own segments, and rank 0 the manifest once all are on disk. The name of a segment says
which rank of how many wrote it: the same number of ranks read their own; any other number read all and keep the rows
that belong to them.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bltoolbox.bilevel.warm_starts import MAPPED, Part, Stores
from bltoolbox.config.names import CHECKPOINT_NAME, is_component
from bltoolbox.config.reading import CHECKPOINT, FileRefused, file_size, open_file
from bltoolbox.distributed.ranks import ALONE, Ranks
from bltoolbox.errors import BltError, refusing_misfits
from bltoolbox.runs.files import remove, write_bytes
from bltoolbox.training.payload import PayloadError, check_payload

MAGIC = b"bltoolbox checkpoint\n"
#: Version of the content. A newer one is refused, an older one is read.
FORMAT = 3
_KEPT = 2
#: Length of the checksum in characters.
_DIGEST = 64
#: Segments are merged when they contain more than this many times the existing rows.
_SLACK = 3


#: Files that belong to a checkpoint: segments, data of single ranks, and rows being loaded.
_PART = re.compile(r"(warm|own)-[0-9]{8,18}(-p[0-9]+)?(-[0-9]+of[0-9]+)?\.ckpt|warm-[a-z0-9_]{8}\.rows")
#: Stores that have another name in older checkpoints.
_RENAMED = {"adjoints": "memory.adjoint"}


class DamagedCheckpoint(BltError):
    """A file is truncated, altered or not a checkpoint."""


def write_checked(path: Path, content: Mapping[str, Any], within: Path | None = None) -> None:
    """Write ``content`` (tensors and plain data) with its checksum, atomically."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    payload = buffer.getvalue()
    digest = hashlib.sha256(payload).hexdigest().encode()
    write_bytes(path, MAGIC + digest + b"\n" + payload, within)


def read_checked(path: Path) -> dict[str, Any]:
    """The content that ``write_checked`` wrote, or DamagedCheckpoint."""
    payload = _read_payload(path)
    try:
        check_payload(payload)
    except PayloadError as error:
        raise DamagedCheckpoint(f"{path.name} is refused: {error}") from error
    try:
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{path.name} contains something other than plain data ({reason})") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path.name} contains no checkpoint")
    return content


def _read_payload(path: Path) -> bytes:
    """The payload after the first two lines, if its checksum is right."""
    try:
        with open_file(path, follow=False) as file:
            head = file.readline(len(MAGIC)), file.readline(_DIGEST + 1)
            if head[0] != MAGIC or len(head[1]) != _DIGEST + 1:
                raise DamagedCheckpoint(f"{path.name} is not a checkpoint or was truncated")
            CHECKPOINT.check(path, file_size(file))
            payload = file.read()
    except FileRefused as error:
        raise DamagedCheckpoint(str(error)) from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(payload).hexdigest().encode() + b"\n" != head[1]:
        raise DamagedCheckpoint(f"{path.name} does not match its checksum")
    return payload


def _segments(
    changed: Mapping[str, Iterator[Part]],
) -> Iterator[tuple[dict[str, Part], int]]:
    """The content of the files of one checkpoint."""
    parts: dict[str, Part] = {}
    count, size = 0, 0
    for name, pieces in changed.items():
        for piece in pieces:
            nbytes = piece["rows"].nbytes
            if parts and (name in parts or size + nbytes > MAPPED):
                yield parts, count
                parts, count, size = {}, 0, 0
            parts[name] = piece
            count, size = count + len(piece["ids"]), size + nbytes
    if parts:
        yield parts, count


def _names_segment(entry: Any) -> bool:
    """Whether an entry of a manifest is the name of a file beside it and a number of rows."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    name, count = entry
    return is_component(name) and isinstance(count, int)


@dataclass(frozen=True)
class _Attempt:
    """The content of a checkpoint, or why it is skipped."""

    manifest: Mapping[str, Any] = field(default_factory=dict)
    #: The data of single ranks.
    own: Sequence[Any] = ()
    problem: str | None = None


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, stores: Stores, ranks: Ranks = ALONE) -> None:
        self.folder = folder
        self.stores = stores
        self.ranks = ranks
        stores.lie_in(folder)
        #: Those of all ranks, the same on each.
        self.segments: list[tuple[str, int]] = []
        self.number = 0

    def save(self, content: Mapping[str, Any], warm_starts: bool = True) -> None:
        """Write the changes, then the manifest that makes them valid, then delete files that are no longer needed.

        ``content`` is that of rank 0, except for its entry ``own``, which differs between ranks. Without
        ``warm_starts`` this checkpoint is the only one, and no file of them is left.
        """
        ranks, number = self.ranks, self.number + 1
        changed = {name: store.changed() for name, store in self.stores.items()}
        rows = sum(store.changes for store in self.stores.values())
        present = sum(int(store.present.sum()) for store in self.stores.values())
        counts = ranks.gather("checkpoint", [rows, present])
        held = sum(count for _, count in self.segments) + sum(new for new, _ in counts)
        segments = self.segments
        many = sum(new for new, _ in counts) and held > _SLACK * max(sum(all_ for _, all_ in counts), 1)
        if many or self.stores.forgotten:
            changed = {name: store.everything() for name, store in self.stores.items()}
            segments, rows = [], present
        if not warm_starts:
            changed, segments = {}, []
        rest = dict(content)
        own = rest.pop("own", None)

        def write_own() -> dict[str, Any]:
            written: dict[str, Any] = {"segments": []}
            for place, (parts, count) in enumerate(_segments(changed)):
                written["segments"].append([self._name("warm", number, f"-p{place}"), count])
                self._write(written["segments"][-1][0], parts)
            if own and ranks.size > 1:
                written["own"] = self._name("own", number)
                self._write(written["own"], {"own": own})
            return written

        written = ranks.each("checkpoint, segments", write_own)
        segments = segments + [(name, count) for files in written for name, count in files["segments"]]
        manifest = {
            "format": FORMAT,
            "segments": [list(segment) for segment in segments],
            "own": [own] if ranks.size == 1 else [files["own"] for files in written if "own" in files],
            "content": rest,
        }
        name = f"state-{number:08d}.ckpt"
        ranks.each("checkpoint, manifest", lambda: self._write(name, manifest) if ranks.first else None)
        self.number, self.segments = number, segments
        if warm_starts:
            self.stores.mark_saved()
        else:
            self.stores.forgotten = True
        if ranks.first:
            self._prune(_KEPT if warm_starts else 1)

    def load(
        self, find_flaw: Callable[[Mapping[str, Any]], str | None] = lambda content: None
    ) -> tuple[dict[str, Any], list[str]]:
        """Load the newest usable checkpoint with its warm starts; also returns a sentence for each checkpoint
        skipped.

        A checkpoint is usable if it is intact and ``find_flaw`` finds no flaw in its content.
        The entry ``own`` of its content is a list with the data of each rank.
        """
        passed: list[str] = []
        names = [path.name for path in reversed(self._manifests())]
        names, last = self.ranks.gather("checkpoints", [names, max(self._numbers())])[0]
        for name in names:
            attempt = self.ranks.in_step(
                f"reading {name}", partial(self._attempt, self.folder / name, find_flaw)
            )
            problems = [
                sentence for sentence in self.ranks.gather(f"judging {name}", attempt.problem) if sentence
            ]
            if problems:
                passed.append(problems[0])
                continue
            self._restore(attempt.manifest)
            self.number = last
            self.ranks.gather("restored")
            if self.ranks.first:
                self._remove_orphans()
            return attempt.manifest["content"] | {"own": [entry for entry in attempt.own if entry]}, passed
        raise BltError(
            f"{self.folder} contains no usable checkpoint"
            + (f": {'; '.join(passed)}" if passed else "; start the run again with --overwrite")
        )

    def _attempt(self, path: Path, find_flaw: Callable[[Mapping[str, Any]], str | None]) -> _Attempt:
        """Read a checkpoint, and verify all of it before any of it is used."""
        try:
            manifest = self._read_manifest(path)
            if (flaw := find_flaw(manifest["content"])) is not None:
                raise DamagedCheckpoint(f"{path.name} {flaw}")
            for segment in self._own_segments(manifest):
                read_checked(segment)  # one at a time in memory
            return _Attempt(manifest, [self._read_own(entry) for entry in manifest.get("own", [])])
        except DamagedCheckpoint as error:
            return _Attempt(problem=f"{error}; falling back to the checkpoint before it")

    def _restore(self, manifest: Mapping[str, Any]) -> None:
        """Restore the warm starts."""
        for segment in self._own_segments(manifest):
            with refusing_misfits(segment.name):
                for kind, held in read_checked(segment).items():
                    self.stores[_RENAMED.get(kind, kind)].restore(held)
        self.stores.mark_saved()
        self.segments = [(str(segment), int(count)) for segment, count in manifest["segments"]]

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        write_checked(self.folder / name, content, within=self.folder.parent)

    def _name(self, kind: str, number: int, suffix: str = "") -> str:
        """The name of a file that this rank writes."""
        writer = f"-{self.ranks.rank}of{self.ranks.size}" if self.ranks.size > 1 else ""
        return f"{kind}-{number:08d}{suffix}{writer}.ckpt"

    def _own_segments(self, manifest: Mapping[str, Any]) -> list[Path]:
        return [self.folder / name for name, _ in manifest["segments"] if self._concerns(name)]

    def _concerns(self, name: str) -> bool:
        """Whether a segment may contain rows of this rank."""
        match = re.search(r"-(\d+)of(\d+)\.ckpt$", name)
        rank, size = (int(match[1]), int(match[2])) if match else (0, 1)
        return size != self.ranks.size or rank == self.ranks.rank

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        """A manifest with everything that ``load`` needs."""
        manifest = read_checked(path)
        kind, state = manifest.get("format"), manifest.get("content")
        if isinstance(kind, int):
            self._refuse_newer(path, kind)
        segments, own = manifest.get("segments"), manifest.get("own", [])
        lengths = state.get("lengths") if isinstance(state, dict) else None
        if not (
            isinstance(kind, int)
            and isinstance(state, dict)
            and isinstance(state.get("run"), dict)
            and isinstance(lengths, dict)
            and all(isinstance(length, int) and length >= 0 for length in lengths.values())
            and isinstance(segments, list)
            and all(_names_segment(segment) for segment in segments)
            and isinstance(own, list)
        ):
            raise DamagedCheckpoint(f"{path.name} does not have the content of a checkpoint")
        return manifest

    def _read_own(self, entry: Any) -> Any:
        """The data of one rank, in the manifest or in its own file."""
        if isinstance(entry, str):
            if not is_component(entry):
                raise DamagedCheckpoint(f"{entry} is not in the folder of the checkpoints")
            entry = read_checked(self.folder / entry).get("own")
        if not isinstance(entry, dict | None):
            raise DamagedCheckpoint("the data of a rank are not plain data")
        return entry

    def _refuse_newer(self, path: Path, kind: int) -> None:
        if kind > FORMAT:
            raise BltError(
                f"{path.name} was written by a newer bltoolbox (format {kind}, this one reads up to"
                f" {FORMAT}); update bltoolbox to resume this run"
            )

    def _manifests(self) -> list[Path]:
        """The files of checkpoints, the newest last; other files are ignored."""
        paths = [
            path
            for path in self.folder.glob("state-*.ckpt")
            if CHECKPOINT_NAME.fullmatch(path.name) and path.is_file()
        ]
        return sorted(paths, key=lambda path: int(path.stem.partition("-")[2]))

    def _numbers(self) -> list[int]:
        matches = (
            re.match(r"(?:state|warm|own)-([0-9]{8,18})[-.]", path.name)
            for path in self.folder.glob("*.ckpt")
        )
        return [int(match[1]) for match in matches if match] or [0]

    def _prune(self, kept: int) -> None:
        """Keep the last manifests and the segments that they name."""
        for path in self._manifests()[:-kept]:
            remove(path, within=self.folder.parent)
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """Delete the files that no checkpoint names, such as those of an incomplete one."""
        needed: set[str] = set()
        for path in self._manifests():
            try:
                manifest = self._read_manifest(path)
            except DamagedCheckpoint:
                continue
            needed |= {name for name, _ in manifest["segments"]}
            needed |= {name for name in manifest.get("own", []) if isinstance(name, str)}
        for path in self.folder.iterdir():
            if _PART.fullmatch(path.name) and path.name not in needed and not path.is_dir():
                remove(path, within=self.folder.parent)
