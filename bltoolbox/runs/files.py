"""Writing files atomically, and never outside the intended folder.

A run directory may come from someone else, with links in it that lead anywhere. Code that writes into one passes it
as ``within``: below it no link is followed, and only regular files are opened. The folder itself, and what lies above
it, is the user's choice and may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from bltoolbox.config.printable import printable_json
from bltoolbox.errors import BltError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
#: Windows cannot open a file relative to an open folder; there, links are detected by name.
_DESCENDS = os.open in os.supports_dir_fd
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
#: Opening a pipe must not wait for its other end.
_FILE = _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
#: How systems report a link where none may be, and something that is not a folder or not a file.
_REFUSALS = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)


class UnsafePath(BltError):
    """A file or folder is not written to because it might lead elsewhere."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}, so nothing is written there; remove it, then try again")


@contextlib.contextmanager
def entered(path: Path, within: Path | None = None) -> Iterator[tuple[int | None, Path]]:
    """The folder of ``path``: its descriptor, and the prefix of names in it if there is no descriptor."""
    root = path.parent if within is None else within
    if not path.is_relative_to(root) or ".." in (names := path.relative_to(root).parts):
        raise UnsafePath(path, f"is not in {root}")
    if not _DESCENDS:
        for depth in range(1, len(names)):
            if root.joinpath(*names[:depth]).is_symlink():
                raise UnsafePath(root.joinpath(*names[:depth]), "is a symbolic link")
        yield None, path.parent
        return
    folder = os.open(root, _FOLDER)
    try:
        for depth, name in enumerate(names[:-1], start=1):
            with _refusing(root.joinpath(*names[:depth]), "is not a folder"):
                inner = os.open(name, _FOLDER | _NO_LINK, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder, Path()
    finally:
        os.close(folder)


def write_bytes(path: Path, content: bytes, within: Path | None = None) -> None:
    """Replace ``path`` atomically: write beside it, flush to disk, rename."""
    with entered(path, within) as (folder, base):
        temporary = base / _temporary_name(path.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, base / path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if folder is not None:
                os.fsync(folder)  # otherwise a power failure may restore the old file
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


def write_text(path: Path, content: str, within: Path | None = None) -> None:
    """Replace ``path`` atomically."""
    # It may contain a name that is not UTF-8; escaped, it is still valid JSON.
    write_bytes(path, content.encode("utf-8", "backslashreplace"), within)


def write_json(path: Path, content: Any, within: Path | None = None) -> None:
    """Replace ``path`` atomically with JSON that a person can read."""
    text = json.dumps(finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, printable_json(text) + "\n", within)


def json_line(content: Any) -> str:
    """One line of a log in JSON."""
    return json.dumps(finite(content), allow_nan=False)


def _temporary_name(name: str) -> str:
    """A temporary name for ``name``, shortened, since ``name`` may have the maximum length."""
    return f".{name[:40]}.{secrets.token_hex(6)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a file was left behind by ``write_bytes`` or ``try_to_write``."""
    return _TEMPORARY.fullmatch(name) is not None


def try_to_write(folder: Path, within: Path) -> None:
    """Raise OSError if no file can be written to a folder."""
    path = folder / _temporary_name("try")
    write_bytes(path, b"", within)
    remove(path, within)


def remove_temporaries(folder: Path, within: Path) -> None:
    """Delete the files that a process killed during ``write_bytes`` left in a folder."""
    for name in list_folder(folder, within):
        if is_temporary(name):
            remove(folder / name, within)


def open_regular(path: Path, flags: int, within: Path) -> IO[bytes]:
    """Open a file to write in place, as ``os.open`` does with ``flags``; refuses links, also hard ones, and devices."""
    mode = "ab" if flags & os.O_APPEND else "r+b"
    with entered(path, within) as (folder, base), _refusing(path, "is not a regular file"):
        if not _DESCENDS and path.is_symlink():
            raise UnsafePath(path, "is a symbolic link")
        descriptor = os.open(base / path.name, flags | _FILE, 0o666, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePath(path, "is not a regular file")
        if status.st_nlink > 1:
            raise UnsafePath(path, "has other names, too (hard links)")
    except UnsafePath:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, mode)


def append_to(path: Path, within: Path) -> IO[bytes]:
    """Open a file for appending, creating it if necessary."""
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, within)


def make_root(path: Path) -> None:
    """Create a folder and its parents durably, so that they survive a power failure."""
    if path.is_dir():
        return
    make_root(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a folder may be writable but not readable
        parent = os.open(path.parent, _FOLDER)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def make_folder(path: Path, within: Path) -> None:
    """Create a folder and its parents up to ``within``, if they are missing."""
    if path != within:
        make_folder(path.parent, within)
        with entered(path, within) as (folder, base), contextlib.suppress(FileExistsError):
            os.mkdir(base / path.name, dir_fd=folder)
    with entered(path / "_", within):  # refuses anything but a folder
        pass


def remove(path: Path, within: Path) -> None:
    """Delete a file if it exists."""
    with contextlib.suppress(FileNotFoundError), entered(path, within) as (folder, base):
        os.unlink(base / path.name, dir_fd=folder)


def list_folder(path: Path, within: Path) -> list[str]:
    """The names in a folder, sorted; none if it does not exist."""
    try:
        with entered(path / "_", within) as (folder, base):
            return sorted(os.listdir(base if folder is None else folder))
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    """Turn the error about a link, a pipe or a folder in the way into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSALS:
            raise UnsafePath(path, "is a symbolic link" if path.is_symlink() else what) from error
        raise


def finite(data: Any, name: Callable[[float], str | None] = lambda number: None) -> Any:
    """Data for JSON, which has no infinite numbers: null, or their names. The PSNR of a perfect image is one."""
    if isinstance(data, dict):
        return {key: finite(value, name) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value, name) for value in data]
    return name(data) if isinstance(data, float) and not math.isfinite(data) else data
