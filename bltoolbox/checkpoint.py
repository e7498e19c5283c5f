"""Checkpoints: files that are either whole or refused, and the folder that holds the last two of them.

A file is a line of magic, a line with the SHA-256 of the rest, and a `torch.save` payload that is loaded with
``weights_only=True``: nothing in it can execute. A checkpoint is a manifest; the warm starts, which are most of its
bytes, lie in segments that hold only the rows changed since the checkpoint before. Two checkpoints are kept with all
segments they need, so that a damaged newest one costs at most the work between the two.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bltoolbox.errors import BltError
from bltoolbox.files import write_bytes
from bltoolbox.store import Store

MAGIC = b"bltoolbox checkpoint\n"
#: Version of the content. A newer one is refused, an older one is read.
FORMAT = 1
_KEPT = 2
#: Segments are rewritten as one when they hold more rows than this many times the rows there are.
_SLACK = 3


class DamagedCheckpoint(BltError):
    """A checkpoint is truncated, altered or not one at all."""


def write_checked(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` (tensors and plain data) with its checksum, atomically."""
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    payload = buffer.getvalue()
    digest = hashlib.sha256(payload).hexdigest().encode()
    write_bytes(path, MAGIC + digest + b"\n" + payload)


def read_checked(path: Path) -> dict[str, Any]:
    """What ``write_checked`` wrote, or DamagedCheckpoint."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror or error}") from error
    head, newline, payload = raw[len(MAGIC) :].partition(b"\n")
    if not raw.startswith(MAGIC) or not newline:
        raise DamagedCheckpoint(f"{path.name} is not a checkpoint or was cut short")
    if hashlib.sha256(payload).hexdigest().encode() != head:
        raise DamagedCheckpoint(f"{path.name} does not match its checksum")
    try:
        content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise DamagedCheckpoint(f"{path.name} holds something that is not plain data ({reason})") from error
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path.name} holds no checkpoint")
    return content


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, stores: Mapping[str, Store]) -> None:
        self.folder = folder
        self.stores = stores
        self.segments: list[tuple[str, int]] = []
        self.number = 0

    def save(self, content: Mapping[str, Any]) -> None:
        """Write what changed, then the manifest that makes it count, then forget what nobody needs."""
        self.number += 1
        changed = {name: store.changed() for name, store in self.stores.items()}
        rows = sum(len(ids) for ids, _ in changed.values())
        if rows:
            held = sum(count for _, count in self.segments) + rows
            known = sum(int(store.known.sum()) for store in self.stores.values())
            if held > _SLACK * max(known, 1):
                changed = {name: store.everything() for name, store in self.stores.items()}
                self.segments, rows = [], known
            name = f"warm-{self.number:08d}.ckpt"
            parts = {store: {"ids": ids, "rows": values} for store, (ids, values) in changed.items()}
            write_checked(self.folder / name, parts)
            self.segments.append((name, rows))
        manifest = {
            "format": FORMAT,
            "segments": [list(one) for one in self.segments],
            "content": dict(content),
        }
        write_checked(self.folder / f"state-{self.number:08d}.ckpt", manifest)
        for store in self.stores.values():
            store.settle()
        self._prune()

    def load(self) -> tuple[dict[str, Any], list[str]]:
        """The newest whole checkpoint, its warm starts put back, and a sentence for each one that was passed over."""
        passed: list[str] = []
        for path in sorted(self.folder.glob("state-*.ckpt"), reverse=True):
            try:
                manifest = read_checked(path)
                self._refuse_newer(path, manifest)
                segments = [(str(name), int(count)) for name, count in manifest["segments"]]
                parts = [read_checked(self.folder / name) for name, _ in segments]
            except DamagedCheckpoint as error:
                passed.append(f"{error}; falling back to the checkpoint before it")
                continue
            for part in parts:
                for name, held in part.items():
                    if len(held["ids"]):
                        self.stores[name].put(held["ids"].tolist(), held["rows"])
            for store in self.stores.values():
                store.settle()
            self.segments = segments
            self.number = max(self._numbers())
            return manifest["content"], passed
        raise BltError(
            f"{self.folder} holds no usable checkpoint"
            + (f": {'; '.join(passed)}" if passed else "; run it anew")
        )

    def _refuse_newer(self, path: Path, manifest: Mapping[str, Any]) -> None:
        if manifest.get("format", 0) > FORMAT:
            raise BltError(
                f"{path.name} was written by a newer bltoolbox (format {manifest['format']}, this one reads up to"
                f" {FORMAT}); update bltoolbox to resume this run"
            )

    def _numbers(self) -> list[int]:
        return [int(path.stem.rpartition("-")[2]) for path in self.folder.glob("*-*.ckpt")] or [0]

    def _prune(self) -> None:
        """Keep the last manifests and the segments that they name."""
        manifests = sorted(self.folder.glob("state-*.ckpt"))
        needed: set[str] = set()
        for path in manifests[-_KEPT:]:
            try:
                needed |= {name for name, _ in read_checked(path)["segments"]}
            except DamagedCheckpoint:
                continue
        for path in manifests[:-_KEPT]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob("warm-*.ckpt"):
            if path.name not in needed:
                path.unlink(missing_ok=True)
