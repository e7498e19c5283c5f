"""Archives from the web: downloads are resumed and verified, and their files are moved into place atomically.

An archive is downloaded to ``NAME.part``. An interrupted download continues from there by HTTP Range if the server
supports it, and otherwise restarts; it is used only if its MD5 sum is right. The archive is unpacked beside its
destination and renamed, so a folder is either complete or missing. Every failure is a ``MissingError`` that says what
to do.

This uses urllib directly (which respects the proxies of the environment), because neither torchvision's
``download_url`` nor pooch resumes a download or limits its size, and torchvision's has no timeout and falls back to
plain HTTP if HTTPS fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import shutil
import ssl
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from bltoolbox.plugin import DOWNLOAD, BltError, MissingError, acquire, make_folder, open_file, open_regular

_BLOCK = 2**18
#: Seconds without a byte before a connection counts as dead; connections in a row that bring nothing before we give
#: up; seconds between two of them.
TIMEOUT = 30.0
TRIES = 3
PAUSE = 1.0


def fetch(
    url: str,
    md5: str,
    folder: Path,
    members: Sequence[str],
    there: Callable[[], bool],
    root: Path | None = None,
) -> None:
    """Download the archive at ``url`` and move its top-level folders ``members`` into ``folder``.

    Nothing is written through a link below ``root``, the folder that the user named, which is ``folder`` by default.
    """
    root = folder if root is None else root
    try:
        root.mkdir(parents=True, exist_ok=True)
        make_folder(folder, within=root)
        name = Path(urlsplit(url).path).name
        with _only_me(folder / f".{name}.lock"):
            if there():
                return  # another process was quicker
            archive = folder / name
            if not (archive.is_file() and md5_of(archive) == md5):
                _download(url, md5, archive)
            _unpack(archive, folder, members)
            archive.unlink()
    except OSError as error:
        raise BltError(f"cannot write to {folder}: {error.strerror or error}") from error


def md5_of(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _download(url: str, md5: str, archive: Path) -> None:
    partial_file = archive.with_name(f"{archive.name}.part")
    resumed = _begun(partial_file) > 0
    _complete(url, partial_file)
    if md5_of(partial_file) != md5 and resumed:
        # What was there before may have been of another version.
        partial_file.unlink()
        _complete(url, partial_file)
    if md5_of(partial_file) != md5:
        partial_file.unlink()
        raise MissingError(
            f"{url} is not the file it should be (its MD5 sum is wrong) and was deleted; try again later, or get the"
            " file elsewhere"
        )
    os.replace(partial_file, archive)


def _complete(url: str, partial_file: Path) -> None:
    """Continue until the file is complete, as long as each connection delivers data."""
    failures = 0
    while True:
        before = _begun(partial_file)
        try:
            if _append(url, partial_file):
                return
            reason = "the connection was closed"
        except urllib.error.HTTPError as error:
            error.close()
            raise MissingError(
                f"the server answers {error.code} {error.reason} for {url}; try again later, or get the file elsewhere"
            ) from error
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            ssl.SSLError,
        ) as error:
            reason = str(getattr(error, "reason", None) or error or type(error).__name__)
        failures = 0 if _begun(partial_file) > before else failures + 1
        if failures >= TRIES:
            kept = f"; {_megabytes(_begun(partial_file))} are kept; repeat the command to continue from there"
            raise MissingError(
                f"{url} cannot be downloaded: {reason} (is there a network?){kept if _begun(partial_file) else ''}"
            )
        time.sleep(PAUSE if failures else 0)


def _append(url: str, partial_file: Path) -> bool:
    """One connection: append its data to the file; return whether the file is complete."""
    begun = _begun(partial_file)
    headers = {"User-Agent": "bltoolbox"} | ({"Range": f"bytes={begun}-"} if begun else {})
    try:
        response: Any = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not begun:
            raise
        error.close()
        return True  # nothing is left to send; the MD5 sum tells whether that is true
    with response:
        # 200 means that the server sends all of it from the beginning.
        begun = begun if response.status == 206 and _starts_at(response) == begun else 0
        left = _whole_number(response.headers.get("Content-Length"))
        total = None if left is None else begun + left
        if response.status == 206 and not begun:
            partial_file.unlink(missing_ok=True)
            raise http.client.HTTPException("the server sends another piece of the file than was asked for")
        with _opened(partial_file) as file, _Progress(url, begun, total) as progress:
            file.truncate(begun)
            file.seek(begun)
            while block := response.read(_BLOCK):
                file.write(block)
                progress.add(len(block))
                DOWNLOAD.check(url, file.tell())
    return total is None or _begun(partial_file) >= total


def _opened(path: Path) -> IO[bytes]:
    """A regular file to write to, made if there is none; a link is refused."""
    return open_regular(path, os.O_RDWR | os.O_CREAT, within=path.parent)


def _starts_at(response: Any) -> int | None:
    """The 500 in ``Content-Range: bytes 500-999/1000``."""
    unit, _, span = (response.headers.get("Content-Range") or "").partition(" ")
    return _whole_number(span.partition("-")[0]) if unit == "bytes" else None


def _whole_number(text: str | None) -> int | None:
    """The number in a header; None if the server sends something else, since the MD5 sum is verified anyway."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def _begun(partial_file: Path) -> int:
    return partial_file.stat().st_size if partial_file.exists() else 0


def _unpack(archive: Path, folder: Path, members: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as place:
        print(f"unpacking {archive.name}", file=sys.stderr)
        try:
            with tarfile.open(archive) as tar:
                # Refuses members that would land outside of the place.
                safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                tar.extractall(place, **safe)
        except (tarfile.TarError, EOFError) as error:
            raise MissingError(f"{archive} cannot be unpacked: {error}; delete it and try again") from error
        for member in members:
            source, target = Path(place, member), folder / member
            if not source.is_dir():
                raise MissingError(f"{archive} does not hold the folder {member}; delete it and try again")
            if target.exists():
                shutil.move(target, Path(place, f"{member}.old"))
            os.replace(source, target)


@contextlib.contextmanager
def _only_me(lock: Path) -> Iterator[None]:
    """A lock, so that two runs that need the same files do not download them twice."""
    with _opened(lock) as file:
        if not acquire(file, lock.parent):
            print(f"waiting for another process that downloads into {lock.parent}", file=sys.stderr)
            acquire(file, lock.parent, wait=True)
        yield


class _Progress:
    """A progress line on stderr: rewritten on a terminal, otherwise a new line for each tenth."""

    def __init__(self, url: str, done: int, total: int | None) -> None:
        self.url, self.done, self.total = url, done, total
        self.stream: IO[str] = sys.stderr
        self.tty = self.stream.isatty()
        self.told = -1

    def __enter__(self) -> _Progress:
        size = "" if self.total is None else f" ({_megabytes(self.total)})"
        begun = f", continuing after {_megabytes(self.done)}" if self.done else ""
        print(f"downloading {self.url}{size}{begun}", file=self.stream)
        return self

    def __exit__(self, *error: object) -> None:
        if self.tty and self.told >= 0:
            print(file=self.stream)

    def add(self, size: int) -> None:
        self.done += size
        step = 1 if self.tty else 10
        if self.total is None:
            return
        percent = 100 * self.done // max(1, self.total) // step * step
        if percent > self.told:
            self.told = percent
            text = f"{percent:3d} %  {_megabytes(self.done)} of {_megabytes(self.total)}"
            print(text, file=self.stream, end="\r" if self.tty else "\n", flush=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size} bytes"
