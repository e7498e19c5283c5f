"""The command does not fetch the same memory from the system again and again; library users decide."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from bltoolbox.bilevel import memory as allocator

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the C library of GNU")

FAULTS = """
import resource, sys, torch
import bltoolbox
from blt_builtins.operators.identity import Identity
from blt_builtins.regularizers.foe import FieldOfExperts
from blt_builtins.lower_solvers.mm import MemoryGradient
from bltoolbox.bilevel.lower_loop import solve
from bltoolbox.restoration.theta import join
from bltoolbox.testing import variational

torch.set_num_threads(1)
if sys.argv[2] == "kept":
    bltoolbox.keep_freed_memory()
foe = FieldOfExperts()
theta = {name: value.float() for name, value in foe.init_params((3, 64, 64), torch.Generator()).items()}
y = torch.rand(int(sys.argv[1]), 3, 64, 64, generator=torch.Generator().manual_seed(0))
lower = variational(Identity(), foe).at(join(regularizer=theta), y.shape[1:]).on(y)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    solve(MemoryGradient(), lower, y, 1e-9, limit=3 if len(y) < 100 else 1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert "torch._inductor" not in sys.modules, "the compiler of torch: 150 MB and a second"
"""


def faults(images: int, *words: str, **environment: str) -> int:
    """Page faults of a solve that is not the first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, str(images), *words],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@needs_glibc
@pytest.mark.parametrize("images", [16, 208], ids=["blocks of 2.6 MB", "blocks of 34 MB"])
def test_a_second_solve_touches_no_new_pages(images: int) -> None:
    # What the user says goes first: with blocks of a megabyte fetched one by one there are many faults.
    user = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
    by_user = faults(images, "kept", **user)
    assert by_user > 5_000, "the solve is meant to need much memory"
    assert faults(images, "kept") < by_user / 10


SETTINGS = """
import ctypes, sys
calls = []

class Library:
    def __init__(self, name): pass
    def gnu_get_libc_version(self): return b"2.36"
    def mallopt(self, option, value): calls.append(option); return 1
    def malloc_trim(self, pad): calls.append("trim"); return 1
"""
LIBRARY_USE = (
    SETTINGS
    + """
import torch
import bltoolbox, bltoolbox.bilevel.memory as memory
memory.ctypes.CDLL, memory.WHILE = Library, 0.0
from bltoolbox import Model
Model.load("denoise-gray-foe").restore(torch.rand(24, 24).numpy())
print(calls)
"""
)
COMMAND = (
    SETTINGS
    + """
import bltoolbox.bilevel.memory as memory
memory.ctypes.CDLL = Library
sys.argv = ["blt", "--version"]
from bltoolbox.__main__ import main
import bltoolbox.cli
bltoolbox.cli.main = lambda: print(calls)
main()
"""
)


@pytest.mark.parametrize(("code", "printed"), [(LIBRARY_USE, "[]"), (COMMAND, "[-8, -4, -1, -2]")])
def test_only_the_command_changes_the_process(code: str, printed: str) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    fresh = allocator.Allocator()
    assert not fresh.keep() and not fresh.give_back()


GAPS = """
import ctypes, time
from pathlib import Path
from bltoolbox.bilevel import memory as allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

assert allocator.keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
blocks = [library.malloc(1 << 20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
full = resident()
for block in blocks[::2]:
    library.free(block)
assert resident() > full - (10 << 20), "kept"
assert not allocator.return_freed_memory(after=10), "so soon"
time.sleep(0.1)
assert allocator.return_freed_memory(after=0.1)
assert not allocator.return_freed_memory(after=0.1)
assert resident() < full - (80 << 20), "every second block went back, gaps or not"
"""


@needs_glibc
def test_what_is_free_goes_back_after_a_while() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", GAPS], env=kept, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
