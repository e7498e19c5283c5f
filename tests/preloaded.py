"""``blt`` in processes of their own that need not import torch: they are forked from a process that has.

``Popen`` replaces ``subprocess.Popen`` in tests, for commands that begin with ``BLT`` and for scripts in the folder
they are run in. The new process is a child of its caller like any other, with its own standard streams, folder,
environment, command line, signals and exit code. Only its modules are already imported, its figures are sketches, and
it does not wait for disks. Other commands, commands on a terminal, commands with variables that Python or torch read at
startup, and everything outside Linux are started as usual.

The server is this file, run as a script. It forks twice and ends the process in the middle; the caller adopts
orphans at that moment and so becomes the parent of the new process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

#: Runs the command line as a user would, without depending on where the script was installed.
BLT = [sys.executable, "-m", "bltoolbox"]
#: What is read only while a process starts, so that a fork cannot have other values than its server.
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "TORCH_", "MPL")
_LIMIT = 1 << 20
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
#: Room for a command line and an environment in the places where /proc shows them.
_ROOM = 1 << 15
_SCRIPT = re.compile(r"\w+\.py")


@dataclass(frozen=True)
class _Request:
    #: What follows the interpreter.
    words: list[str]
    folder: str
    environment: dict[str, str]
    #: Numbers of further descriptors, which follow the three of the standard streams.
    passed: list[int]
    new_session: bool


class Popen(subprocess.Popen[Any]):
    """A process, forked from the server if possible."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        names = ("preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell")
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        more = ("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group")
        asked = dict(zip((*names, *pipes, *more), rest, strict=True))
        streams = [
            standard if asked[pipe] == -1 else asked[pipe]
            for standard, pipe in enumerate(("p2cread", "c2pwrite", "errwrite"))
        ]
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        others = asked["preexec_fn"] or asked["shell"] or asked["process_group"] != -1
        server = None if others or executable or not _can_be_forked(args) else _server(args[0])
        if server is None or not server.can(environment, streams):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", args[0], args, asked["cwd"], asked["env"])
        request = _Request(
            [os.fsdecode(word) for word in args[1:]],
            os.path.abspath(asked["cwd"] or "."),
            environment,
            list(asked["pass_fds"]),
            asked["start_new_session"],
        )
        self.pid = server.start(request, streams)
        self._child_created = True
        self._close_pipe_fds(*(asked[pipe] for pipe in pipes))  # type: ignore[attr-defined]


def _can_be_forked(args: list[Any]) -> bool:
    return args[1:3] == BLT[1:] or (len(args) > 1 and bool(_SCRIPT.fullmatch(os.fsdecode(args[1]))))


class _Server:
    """A process that has imported everything and forks when asked to."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str]) -> None:
        self.control = control
        self.owner = os.getpid()
        self.at_start = _at_start(environment)

    def can(self, environment: Mapping[str, str], streams: list[int]) -> bool:
        """Whether a fork behaves like a new process; never in forks of the caller, which share its connection."""
        terminals = any(os.isatty(stream) for stream in streams)
        return os.getpid() == self.owner and not terminals and _at_start(environment) == self.at_start

    def start(self, request: _Request, streams: list[int]) -> int:
        """The number of the new process."""
        with _adopting():
            content = json.dumps(asdict(request)).encode()
            socket.send_fds(self.control, [content], [*streams, *request.passed])
            answer = self.control.recv(64)
        if not answer:
            raise RuntimeError("the process that forks commands for tests has ended")
        return int(answer)


#: By the interpreter.
_servers: dict[str, _Server] = {}


def _server(python: str) -> _Server | None:
    """The server of this interpreter; that of tests is started when it is first needed."""
    if python == sys.executable and python not in _servers and sys.platform == "linux":
        _servers[python], process = _start(python, os.environ)
        atexit.register(_stop, _servers[python], process)
    return _servers.get(python)


@contextlib.contextmanager
def serving(python: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Fork the commands of an interpreter within this block, with the packages that it has at the beginning."""
    if sys.platform != "linux":
        yield
        return
    server, process = _start(python, environment)
    before = dict(_servers)
    _servers[python] = server
    try:
        yield
    finally:
        _servers.clear()
        _servers.update(before)
        _stop(server, process)


def is_serving(python: str) -> bool:
    return _server(python) is not None


def _start(python: str, environment: Mapping[str, str]) -> tuple[_Server, subprocess.Popen[bytes]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    with theirs:
        process = subprocess.Popen(
            [python, __file__, str(theirs.fileno()), "-" * _ROOM],
            env=inherited | {"ROOM": "-" * _ROOM},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return _Server(mine, inherited), process


def _stop(server: _Server, process: subprocess.Popen[bytes]) -> None:
    server.control.close()
    if os.getpid() == server.owner:
        process.wait()


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_START) and name != "PYTHONPATH"
    }


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Processes below this one that lose their parent become its children."""
    library = ctypes.CDLL(None)
    library.prctl(_ADOPT, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(_ADOPT, 0, 0, 0, 0)


# The server


def _preload() -> None:
    """Everything that a command may import, but nothing that does something."""
    for name in ("bltoolbox", "blt_builtins"):
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            if not module.name.endswith("__main__") and ".testing" not in module.name:
                importlib.import_module(module.name)
    for name in ("skimage", "tifffile"):
        importlib.import_module(name)
    from figures import sketch

    from bltoolbox.reports import writer

    writer.draw = sketch
    os.fsync = lambda descriptor: None  # type: ignore[assignment,misc]  # the power does not fail during tests


def _serve(control: socket.socket) -> None:
    """Fork when asked to, until nobody asks any more; returns in the new processes only, set up as requested."""
    while True:
        content, streams, _, _ = socket.recv_fds(control, _LIMIT, 64)
        if not content:
            os._exit(0)
        request = _Request(**json.loads(content))
        number, adopted = os.pipe(), os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:
                os.write(number[1], str(child).encode())
                os._exit(0)
            os.close(adopted[1])
            os.read(adopted[0], 1)
            for descriptor in (*number, adopted[0]):
                os.close(descriptor)
            control.close()
            _become(request, streams)
            return
        os.waitpid(middle, 0)
        answer = os.read(number[0], 64)
        for descriptor in (*number, *adopted, *streams):
            os.close(descriptor)
        control.send(answer)


def _become(request: _Request, streams: list[int]) -> None:
    """Turn this fork into the process that was asked for."""
    _servers.clear()
    if "sweep" in request.words or "--nproc" in request.words:
        _fork_server(request, streams)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.new_session:
        os.setsid()
    wanted = [0, 1, 2, *request.passed]
    high = [os.dup2(stream, 100 + k, inheritable=False) for k, stream in enumerate(streams)]
    for stream in streams:
        os.close(stream)
    for target, descriptor in zip(wanted, high, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    places = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [request.folder, *places]
    importlib.invalidate_caches()
    name, rest = request.words[0], request.words[1:]
    if name == "-m":
        name, rest = str(Path(sys.modules["bltoolbox"].__file__ or "").with_name("__main__.py")), rest[1:]
    sys.argv, sys.orig_argv = [name, *rest], [sys.executable, *request.words]
    _show_in_proc(sys.orig_argv, [f"{name}={value}" for name, value in request.environment.items()])


def _fork_server(request: _Request, streams: list[int]) -> None:
    """A server for the processes that this one is going to start, forked while everything is as it was loaded."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        for stream in streams:
            os.close(stream)
        _serve(theirs)
        _command()
    theirs.close()
    _servers[sys.executable] = _Server(mine, request.environment)
    subprocess.Popen = Popen  # type: ignore[misc]


def _show_in_proc(words: list[str], environment: list[str]) -> None:
    """Overwrite the memory that /proc shows as command line and environment; nothing else refers to it by now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for lines, place in ((words, 45), (environment, 47)):
        start, end = int(fields[place]), int(fields[place + 1])
        content = b"".join(os.fsencode(line) + b"\0" for line in lines)[: end - start - 1]
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _command() -> NoReturn:
    """Run what was asked for and end as Python would, except that the modules are not taken down one by one."""
    from bltoolbox.__main__ import main

    code = 1
    try:
        if _SCRIPT.fullmatch(sys.argv[0]):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            main()
        code = 0
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads and ends those of executors
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    _command()
