"""What a disk may hold after the power went: whatever was synchronised, and as much of the rest as it pleases.

The rules are those of POSIX, no kinder: the content of a file is safe once the file is synchronised, and its name
once the folder is. Names and contents that were not may be there or not, in any combination; names change in the
order in which they were changed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from disk import Operation

#: ``kept``: the whole page cache reaches the disk. ``strict``: nothing does that was not synchronised. ``names``: names
#: do, contents do not. ``contents``: the other way round. ``mixed``: chance decides for each.
Mode = Literal["kept", "strict", "names", "contents", "mixed"]
MODES: tuple[Mode, ...] = ("strict", "names", "contents", "mixed")


@dataclass
class _Inode:
    content: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass
class _Change:
    """Of names in a folder: what each of them means afterwards."""

    names: dict[str, int | None]
    safe: bool = False

    @property
    def folders(self) -> set[str]:
        return {str(PurePosixPath(name).parent) for name in self.names}


class State:
    """Files and names after some operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.inodes: dict[int, _Inode] = {}
        self.changes: list[_Change] = []
        self._now: dict[str, int | None] = {".": -1}
        for operation in operations:
            self._apply(operation)

    def _apply(self, one: Operation) -> None:
        if one.kind == "create":
            self.inodes[one.inode] = _Inode()
            self._name({one.path: one.inode})
        elif one.kind == "mkdir":
            self._name({one.path: -1})
        elif one.kind in ("unlink", "rmdir"):
            self._name({one.path: None})
        elif one.kind == "link":
            self._name({one.target: self._now[one.path]})
        elif one.kind == "rename":
            inside = {name: number for name, number in self._now.items() if name.startswith(one.path + "/")}
            moved = {one.target + name[len(one.path) :]: number for name, number in inside.items()}
            self._name({one.path: None, one.target: self._now[one.path]} | dict.fromkeys(inside) | moved)
        elif one.kind == "write":
            content = self.inodes[one.inode].content
            content.extend(bytes(max(0, one.offset - len(content))))
            content[one.offset : one.offset + len(one.data)] = one.data
        elif one.kind == "truncate":
            content = self.inodes[one.inode].content
            content[:] = content[: one.offset] + bytes(max(0, one.offset - len(content)))
        elif one.kind == "sync":
            self._sync(one)

    def _name(self, names: dict[str, int | None]) -> None:
        self.changes.append(_Change(names))
        self._now |= names

    def _sync(self, one: Operation) -> None:
        if one.inode in self.inodes:
            inode = self.inodes[one.inode]
            inode.safe = bytes(inode.content)
            return
        for change in self.changes:
            change.safe = change.safe or one.path in change.folders

    def after_crash(self, mode: Mode, chance: random.Random) -> dict[str, bytes | None]:
        """Path to content of each file; folders have None."""
        kept = {"strict": 0, "contents": 0, "mixed": chance.randint(0, len(self.changes))}
        limit = kept.get(mode, len(self.changes))
        names: dict[str, int | None] = {}
        for number, change in enumerate(self.changes):
            if change.safe or number < limit:
                names |= change.names
        found = {name: number for name, number in names.items() if number is not None}
        contents = {number: self._content(inode, mode, chance) for number, inode in self.inodes.items()}
        tree: dict[str, bytes | None] = {}
        for name, number in sorted(found.items()):
            folders = [str(parent) for parent in PurePosixPath(name).parents][:-1]
            if all(found.get(folder) == -1 for folder in folders):
                tree[name] = None if number == -1 else contents[number]
        return tree

    @staticmethod
    def _content(inode: _Inode, mode: Mode, chance: random.Random) -> bytes:
        now, safe = bytes(inode.content), inode.safe
        if mode == "mixed":
            zeros = safe + bytes(max(0, len(now) - len(safe)))
            cut = now[: chance.randint(min(len(safe), len(now)), len(now))]
            return chance.choice([now, safe, zeros, cut]) if now != safe else now
        return now if mode in ("kept", "contents") else safe


def restore(tree: dict[str, bytes | None], folder: Path) -> None:
    """Write a tree to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in sorted(tree.items()):
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).write_bytes(content)


def tree(folder: Path) -> dict[str, bytes | None]:
    """What a folder holds."""
    found = {str(one.relative_to(folder)): one for one in sorted(folder.rglob("*"))}
    return {name: None if one.is_dir() else one.read_bytes() for name, one in found.items()}
