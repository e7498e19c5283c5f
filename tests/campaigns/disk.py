"""A disk that fails where it is told to: every change of a file below one folder is counted, recorded and may fail.

The shim replaces what Python's own file functions call, in this process and for good: install it in a forked child.
Everything that the toolbox writes goes through these functions; the campaign checks that, by comparing the folder
that the record describes with the one on the disk.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

#: ``full``: no room from the operation on. ``error``: it alone fails. ``kill``: the process ends in the middle of it.
Kind = Literal["full", "error", "kill"]
#: What needs no room on a disk.
_FREE = frozenset({"unlink", "rmdir", "truncate", "chmod"})


@dataclass(frozen=True)
class Fault:
    """What happens at the operation of a number; the first has number 1."""

    kind: Kind
    at: int


@dataclass(frozen=True)
class Operation:
    """A change of the disk. Paths are relative to the folder; ``inode`` tells files apart, whatever their names."""

    kind: str
    path: str
    target: str = ""
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    #: How many operations had been tried, with this one.
    number: int = 0


class Disk:
    """Counts and records the changes below ``root``, and lets one of them fail."""

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self.root = os.path.abspath(root)
        self.fault = fault
        self.operations: list[Operation] = []
        #: Path of each descriptor of a file or folder below the root.
        self.descriptors: dict[int, str] = {}
        #: Numbers of our own, as the system uses those of removed files again.
        self._inodes: dict[int, int] = {}
        self.count = 0

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path relative to the root, or None if it is elsewhere."""
        if isinstance(path, int):
            return self.descriptors.get(path)
        name = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self.descriptors:
                return None
            name = os.path.join(self.root, self.descriptors[dir_fd], name)
        name = os.path.abspath(name)
        return os.path.relpath(name, self.root) if (name + os.sep).startswith(self.root + os.sep) else None

    def fails(self, kind: str) -> BaseException | None:
        """Count an operation; the error that it ends in, if it is its turn."""
        self.count += 1
        fault = self.fault
        if fault is None or self.count < fault.at:
            return None
        if fault.kind == "full" and kind not in _FREE:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault.kind == "error" and self.count == fault.at:
            return OSError(errno.EIO, os.strerror(errno.EIO))
        return _Killed() if fault.kind == "kill" else None

    def number(self, descriptor: int, fresh: bool = False) -> int:
        """Of the file behind a descriptor."""
        known = os.fstat(descriptor).st_ino
        if fresh or known not in self._inodes:
            self._inodes[known] = 1 + max(self._inodes.values(), default=0)
        return self._inodes[known]

    def change(self, kind: str, act: Callable[[], Any], path: str, target: str = "", **details: Any) -> Any:
        """Do something to the disk, unless it is its turn to fail."""
        if error := self.fails(kind):
            raise error
        result = act()
        self._record(Operation(kind, path, target, **details))
        return result

    def _record(self, operation: Operation) -> None:
        self.operations.append(replace(operation, number=self.count))

    def opened(self, act: Callable[[], int], name: str, path: str, writes: bool, empties: bool) -> int:
        """A new descriptor, by ``act``."""
        existed = os.path.exists(name)
        changes = writes and (empties or not existed)
        if changes and (error := self.fails("open")):
            raise error
        descriptor = act()
        self.descriptors[descriptor] = path
        if changes:
            number = self.number(descriptor, fresh=not existed)
            kind = "truncate" if existed else "create"
            self._record(Operation(kind, path, inode=number))
        return descriptor

    def write(self, descriptor: int, data: bytes, offset: int, act: Callable[[bytes], int]) -> int:
        """Write; what fails has written half of it."""
        path, number = self.descriptors[descriptor], self.number(descriptor)
        if error := self.fails("write"):
            if len(data) > 1:
                act(data[: len(data) // 2])
            raise error
        written = act(data)
        self._record(Operation("write", path, inode=number, offset=offset, data=bytes(data[:written])))
        return written

    def install(self) -> None:
        """Take the place of the system's functions, in this process and for good."""
        _install(self)


class _Killed(BaseException):
    """Raising it ends the process: nothing is cleaned up, as after SIGKILL."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _install(disk: Disk) -> None:
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "ftruncate", "close")}
    plain_open = io.open

    class Counted(io.FileIO):
        def __init__(self, file: Any, mode: str, closefd: bool, opener: Any) -> None:
            path = disk.inside(file)
            assert path is not None
            if isinstance(file, int):
                super().__init__(file, mode, closefd)
                return

            def act() -> int:
                super(Counted, self).__init__(file, mode, closefd, opener)
                return self.fileno()

            disk.opened(act, os.path.join(disk.root, path), path, True, "w" in mode)

        def write(self, data: Any) -> int:
            offset = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
            return disk.write(self.fileno(), bytes(data), offset, super().write)

        def close(self) -> None:
            if not self.closed and self.closefd:
                disk.descriptors.pop(self.fileno(), None)
            super().close()

        def truncate(self, size: int | None = None) -> int:
            size = self.tell() if size is None else size
            number = disk.number(self.fileno())
            path = disk.descriptors[self.fileno()]
            act = super().truncate
            return int(disk.change("truncate", lambda: act(size), path, inode=number, offset=size))

    def open_file(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or disk.inside(file) is None:
            found = plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                disk.descriptors.pop(found.fileno(), None)  # a number that a file before had
            return found
        raw = Counted(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        inside = disk.inside(path, dir_fd)
        if inside is None:
            descriptor = int(real["open"](path, flags, mode, dir_fd=dir_fd))
            disk.descriptors.pop(descriptor, None)
            return descriptor
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        name = os.path.join(disk.root, inside)
        act = lambda: int(real["open"](path, flags, mode, dir_fd=dir_fd))  # noqa: E731
        return disk.opened(act, name, inside, writes, bool(flags & os.O_TRUNC))

    def os_write(descriptor: int, data: Any) -> int:
        if descriptor not in disk.descriptors:
            return int(real["write"](descriptor, data))
        offset = os.lseek(descriptor, 0, os.SEEK_CUR)
        return disk.write(descriptor, bytes(data), offset, lambda piece: real["write"](descriptor, piece))

    def fsync(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if descriptor not in disk.descriptors:
            return real["fsync"](descriptor)
        number = disk.number(descriptor)
        disk.change("sync", lambda: None, disk.descriptors[descriptor], inode=number)

    def ftruncate(descriptor: int, size: int) -> None:
        if descriptor not in disk.descriptors:
            return real["ftruncate"](descriptor, size)
        number, path = disk.number(descriptor), disk.descriptors[descriptor]
        act = lambda: real["ftruncate"](descriptor, size)  # noqa: E731
        disk.change("truncate", act, path, inode=number, offset=size)

    def close(descriptor: int) -> None:
        disk.descriptors.pop(descriptor, None)
        real["close"](descriptor)

    io.open = builtins.open = open_file  # type: ignore[assignment]
    os.open, os.write, os.close = os_open, os_write, close  # type: ignore[assignment]
    os.fsync = os.fdatasync = fsync
    os.ftruncate = ftruncate
    for name in ("mkdir", "rmdir", "unlink", "remove", "chmod"):
        setattr(os, name, _one_path(disk, name, getattr(os, name)))
    for name in ("rename", "replace", "link"):
        setattr(os, name, _two_paths(disk, name, getattr(os, name)))


def _one_path(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    kind = "unlink" if name == "remove" else name

    def change(path: Any, *rest: Any, dir_fd: int | None = None, **options: Any) -> Any:
        options |= {} if dir_fd is None else {"dir_fd": dir_fd}
        inside = disk.inside(path, dir_fd)
        if inside is None:
            return real(path, *rest, **options)
        return disk.change(kind, lambda: real(path, *rest, **options), inside)

    return change


def _two_paths(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def change(source: Any, target: Any, **options: Any) -> Any:
        inside = (
            disk.inside(source, options.get("src_dir_fd")),
            disk.inside(target, options.get("dst_dir_fd")),
        )
        if inside[0] is None or inside[1] is None:
            return real(source, target, **options)
        kind = "link" if name == "link" else "rename"
        return disk.change(kind, lambda: real(source, target, **options), inside[0], inside[1])

    return change
