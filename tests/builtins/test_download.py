"""Downloads from a server on this machine: whole, interrupted, resumed, wrong, refused."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from blt_builtins.data import download
from blt_builtins.data.download import fetch, md5_of
from bltoolbox.errors import BltError, MissingError


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


NOISE = np.random.default_rng(0).integers(256, size=200_000, dtype=np.uint8).tobytes()
FILES = {"set/a.bin": NOISE, "set/list.txt": b"a\n"}
CONTENT = archive(FILES)
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves one file as a test wants it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.ranges = True
        self.lengths = True
        #: A false Content-Length, and a false Content-Range, which makes every answer a piece.
        self.length: str | None = None
        self.span: str | None = None
        self.status = 200
        #: Bytes sent by each connection before it is closed; all when there is no entry left.
        self.cuts: list[int] = []
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data/set.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, span = self.server, self.headers.get("Range")
        server.asked.append(span)
        if server.status != 200:
            self.send_error(server.status)
            return
        first = int(span.removeprefix("bytes=").removesuffix("-")) if span and server.ranges else 0
        if first >= len(server.content) > 0:
            self.send_error(416)
            return
        body = server.content[first:]
        self.send_response(206 if first or server.span else 200)
        if server.span:
            self.send_header("Content-Range", server.span)
        elif first:
            total = len(server.content)
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        if server.lengths:
            self.send_header("Content-Length", server.length or str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: Server, folder: Path) -> None:
    fetch(server.url, MD5, folder, ["set"], (folder / "set" / "a.bin").is_file)


def complete(folder: Path) -> bool:
    """All files in place, and nothing else but the lock."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return names == {*FILES, ".set.tar.gz.lock"} and (folder / "set/a.bin").read_bytes() == NOISE


def test_an_archive_is_fetched_and_unpacked(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    get(server, tmp_path / "new" / "folder")
    assert complete(tmp_path / "new" / "folder")
    told = capsys.readouterr()
    assert told.out == ""
    assert f"downloading {server.url}" in told.err and "100 %" in told.err
    get(server, tmp_path / "new" / "folder")
    assert server.asked == [None]


@pytest.mark.parametrize("lengths", [True, False])
def test_an_interrupted_download_goes_on_where_it_stopped(
    server: Server, tmp_path: Path, lengths: bool
) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT[:70_000])
    server.lengths = lengths
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked == ["bytes=70000-"]


def test_broken_connections_are_taken_up_again(server: Server, tmp_path: Path) -> None:
    server.cuts = [50_000, 30_000, 0, 40_000]
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked == [None, "bytes=50000-", "bytes=80000-", "bytes=80000-", "bytes=120000-"]


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.cuts = [50_000]
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked == [None, "bytes=50000-"]


def test_what_came_before_the_end_is_kept(server: Server, tmp_path: Path) -> None:
    server.cuts = [60_000, 0, 0, 0]
    with pytest.raises(
        MissingError, match=r"60000 bytes are kept; repeat the command to continue from there"
    ):
        get(server, tmp_path)
    assert (tmp_path / "set.tar.gz.part").read_bytes() == CONTENT[:60_000]
    assert not (tmp_path / "set").exists()
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked[-1] == "bytes=60000-"


@pytest.mark.parametrize("rest", [b"old version" * 1000, CONTENT + b"more", CONTENT[:-1] + b"?"])
def test_a_part_of_something_else_is_started_again(server: Server, tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(rest)
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked == [f"bytes={len(rest)}-", None]


def test_a_part_that_is_whole_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT)
    get(server, tmp_path)
    assert complete(tmp_path)


def test_an_archive_that_is_there_is_not_fetched(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").write_bytes(CONTENT)
    get(server, tmp_path)
    assert complete(tmp_path)
    assert server.asked == []


def test_the_wrong_sum_is_deleted(server: Server, tmp_path: Path) -> None:
    server.content = archive({"set/a.bin": b"other"})
    with pytest.raises(MissingError, match=r"set\.tar\.gz is not the file it should be .* was deleted"):
        get(server, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".set.tar.gz.lock"]


@pytest.mark.parametrize(("status", "reason"), [(404, "Not Found"), (503, "Service Unavailable")])
def test_the_server_refuses(server: Server, tmp_path: Path, status: int, reason: str) -> None:
    server.status = status
    with pytest.raises(MissingError, match=rf"the server answers {status} {reason} for http"):
        get(server, tmp_path)
    assert not (tmp_path / "set").exists()


def test_no_server(server: Server, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(
        MissingError, match=r"cannot be downloaded: .*refused.* \(is there a network\?\)$"
    ) as caught:
        fetch(f"http://127.0.0.1:{port}/set.tar.gz", MD5, tmp_path, ["set"], lambda: False)
    assert caught.value.exit_code == 4


def test_a_place_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BltError, match=r"cannot write to .*file"):
        get(server, tmp_path / "file" / "x")


def test_what_was_there_is_replaced_as_a_whole(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "leftover").write_text("half of an old one")
    get(server, tmp_path)
    assert complete(tmp_path)


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_nothing_is_written_through_a_link(server: Server, tmp_path: Path, link: str) -> None:
    """A folder from someone else may have one where the archive is to grow."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    place = tmp_path / "theirs"
    place.mkdir()
    part = place / "set.tar.gz.part"
    part.symlink_to(mine) if link == "symbolic" else part.hardlink_to(mine)
    with pytest.raises(BltError, match=r"set.tar.gz.part .* nothing is written there"):
        fetch(server.url, MD5, place, ["set"], (place / "set").is_dir)
    assert mine.read_text() == "mine"


def test_no_folder_below_the_root_is_a_link(server: Server, tmp_path: Path) -> None:
    mine, root = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    root.mkdir()
    (root / "base").symlink_to(mine)
    with pytest.raises(BltError, match="nothing is written there"):
        fetch(server.url, MD5, root / "base", ["set"], (root / "base" / "set").is_dir, root)
    assert not list(mine.iterdir())
    (tmp_path / "link").symlink_to(mine)  # the root itself is the user's choice
    fetch(server.url, MD5, tmp_path / "link" / "base", ["set"], lambda: False, tmp_path / "link")
    assert (mine / "base" / "set" / "a.bin").read_bytes() == NOISE


def test_members_must_be_there_and_stay_inside(server: Server, tmp_path: Path) -> None:
    for number, files in enumerate(({"other/a.bin": b"x"}, {"set/a.bin": b"x", "../outside": b"x"})):
        server.content = archive(files)
        path = tmp_path / str(number) / "folder"
        path.mkdir(parents=True)
        (path / "check").write_bytes(server.content)
        with pytest.raises(
            MissingError, match=r"set\.tar\.gz (does not hold the folder set|cannot be unpacked)"
        ):
            fetch(server.url, md5_of(path / "check"), path, ["set"], lambda: False)
        assert not (path / "set").exists() and not (path.parent / "outside").exists()


def test_two_at_a_time_fetch_once(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=get, args=(server, tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert complete(tmp_path)
    assert server.asked == [None]


@pytest.mark.parametrize("length", ["abc", "-5", "1e3", "9" * 5000, "²"])
def test_a_length_that_is_none_is_of_no_consequence(length: str, server: Server, tmp_path: Path) -> None:
    server.length = length.encode("utf-8").decode("latin-1")
    get(server, tmp_path)
    assert complete(tmp_path)


@pytest.mark.parametrize("length", ["7", str(10 * len(CONTENT))])
def test_a_false_length_never_passes_for_the_file(length: str, server: Server, tmp_path: Path) -> None:
    server.length = length
    try:
        get(server, tmp_path)
    except MissingError:
        assert not (tmp_path / "set").exists()
    else:
        assert complete(tmp_path)


@pytest.mark.parametrize(
    "span", ["bytes 500-999/1000", "bytes */1000", "bytes ²-5/9", "pages 1-2", "bytes " + "9" * 5000]
)
@pytest.mark.parametrize("begun", [0, 400])
def test_a_piece_that_nobody_asked_for_is_refused_in_a_sentence(
    span: str, begun: int, server: Server, tmp_path: Path
) -> None:
    if begun:
        (tmp_path / "set.tar.gz.part").write_bytes(CONTENT[:begun])
    server.span = span.encode("utf-8").decode("latin-1")
    with pytest.raises(MissingError, match="another piece of the file than was asked for"):
        get(server, tmp_path)
    assert not (tmp_path / "set").exists()
