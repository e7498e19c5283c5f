"""Small files that declare a lot, and a process in which to read them."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np

#: Bytes that reading may add to the memory of a process, and the address space that it may take.
GROWTH, SPACE = 2**27, 2**30

_CHILD = """
import resource, signal, sys
signal.alarm(60)
{imports}
def kilobytes(name):  # not from getrusage, whose peak is inherited from the parent
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))
space = 1024 * kilobytes("VmSize") + {space}
before = kilobytes("VmHWM")
resource.setrlimit(resource.RLIMIT_AS, (space, space))
try:
    {call}
    print("read")
except Exception as error:
    print(type(error).__name__, error)
print(1024 * (kilobytes("VmHWM") - before))
"""


def read_in_process(imports: str, call: str) -> tuple[str, int]:
    """What became of reading a file, and the bytes it took, in a process that cannot take many."""
    code = _CHILD.format(imports=imports, call=call, space=SPACE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *said, growth = done.stdout.splitlines()
    return "\n".join(said), int(growth)


def sparse(path: Path, size: int, start: bytes = b"") -> Path:
    """A file of any size that takes no room."""
    path.write_bytes(start)
    os.truncate(path, size)
    return path


def npy(path: Path, shape: tuple[int, ...], dtype: str = "<f8") -> Path:
    """An array of zeros of any size in 4 kB."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    start = header.getvalue()
    return sparse(path, len(start) + np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object)), start)


def inflating(size: int) -> bytes:
    """A thousandth of ``size`` bytes, which inflate to so many zeros."""
    deflate = zlib.compressobj(9)
    block = bytes(2**24)
    return b"".join(deflate.compress(block) for _ in range(size // len(block))) + deflate.flush()


def tiff(path: Path, tags: dict[int, tuple[int, ...]], data: bytes = bytes(384)) -> Path:
    """A TIFF file of 8×8 RGB pixels of 16 bits in one strip, with other tags where they are given."""
    strip = 8
    plain = {
        256: (8,),
        257: (8,),
        258: (16, 16, 16),
        259: (1,),
        262: (2,),
        273: (strip,),
        277: (3,),
        278: (8,),
    }
    entries = {**plain, 279: (len(data),), 284: (1,), **tags}
    directory, values = b"", b""
    place = strip + len(data) + len(data) % 2
    behind = place + 2 + 12 * len(entries) + 4
    for tag, numbers in sorted(entries.items()):
        content = struct.pack(f"<{len(numbers)}I", *numbers)
        if len(content) > 4:
            content, values = struct.pack("<I", behind + len(values)), values + content
        directory += struct.pack("<HHI4s", tag, 4, len(numbers), content)
    body = data + bytes(len(data) % 2) + struct.pack("<H", len(entries)) + directory + bytes(4) + values
    path.write_bytes(b"II*\0" + struct.pack("<I", place) + body)
    return path


def deflated(payload: bytes) -> bytes:
    """The same archive, its records compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return out.getvalue()


def with_index(payload: bytes, index: bytes) -> bytes:
    """The same archive with another index."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(payload)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, index if entry.filename.endswith("/data.pkl") else old.read(entry))
    return out.getvalue()
